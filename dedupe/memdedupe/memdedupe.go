package memdedupe

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/unecho/unecho/dedupe"
)

// Options are the settings of [NewStore] and [NewDriver]. The zero value, and
// nil, is the default.
type Options struct {
	// Wait is how long a claim waits for another holder of the key.
	// Defaults to 2 s; -1 disables.
	Wait time.Duration
	// Tx are the settings of the transactions.
	Tx dedupe.TxOptions
}

const defaultWait = 2 * time.Second

// NewStore returns an empty store. o may be nil.
func NewStore(o *Options) dedupe.Store[*Tx] {
	if o == nil {
		o = &Options{}
	}
	return dedupe.NewTxStore(NewDriver(o), &o.Tx)
}

// Driver is the store behind [NewStore], for those who want to look into it or
// to build on it. It implements [dedupe.TxDriver]. It is safe for concurrent
// use.
type Driver struct {
	wait time.Duration

	mu        sync.Mutex
	slots     map[dedupe.Key]*slot
	expiry    expiryQueue // of slots that are done
	conflicts map[conflict]dedupe.ConflictRecord
	positions map[dedupe.Partition]*position
}

// slot is what is known about one key. A key that nobody holds or has done has
// no slot.
type slot struct {
	key     dedupe.Key
	record  *dedupe.Record // nil while a transaction holds the key
	expires time.Time
	changed chan struct{} // closed when the holder ends
}

type conflict struct {
	key         dedupe.Key
	fingerprint [32]byte
}

// NewDriver returns an empty driver. o may be nil.
func NewDriver(o *Options) *Driver {
	d := &Driver{wait: defaultWait, slots: make(map[dedupe.Key]*slot), conflicts: make(map[conflict]dedupe.ConflictRecord),
		positions: make(map[dedupe.Partition]*position)}
	if o != nil && o.Wait != 0 {
		d.wait = max(o.Wait, 0)
	}
	return d
}

// ErrConflict is what a handler returns to be run again at once in a
// transaction of its own, as after a serialization failure of a database.
var ErrConflict = errors.New("memdedupe: the transaction lost against another one")

// Begin implements [dedupe.TxDriver].
func (d *Driver) Begin(ctx context.Context, c dedupe.Claim) (*Tx, *dedupe.Record, error) {
	tx, priors, err := d.BeginBatch(ctx, []dedupe.Claim{c})
	if err != nil {
		return nil, nil, err
	}
	return tx, priors[0], nil
}

// BeginBatch implements [dedupe.BatchDriver]. It takes all keys in one step, and
// none while another transaction holds one of them.
func (d *Driver) BeginBatch(ctx context.Context, claims []dedupe.Claim) (tx *Tx, priors []*dedupe.Record, err error) {
	err = d.await(ctx, func() (busy <-chan struct{}) {
		tx, priors, busy = d.claim(claims)
		return busy
	})
	return tx, priors, err
}

// await tries until nobody else is in the way, for a bounded time.
func (d *Driver) await(ctx context.Context, try func() (busy <-chan struct{})) error {
	deadline := time.NewTimer(d.wait)
	defer deadline.Stop()
	for {
		busy := try()
		if busy == nil {
			return nil
		}
		select {
		case <-busy:
		case <-deadline.C:
			return fmt.Errorf("memdedupe: %w: waited %v", dedupe.ErrInProgress, d.wait)
		case <-ctx.Done():
			return fmt.Errorf("memdedupe: wait for another holder of the key: %w", ctx.Err())
		}
	}
}

// claim returns a transaction, nil if all keys are done, and their records; or
// the channel that is closed when the present holder of one of them ends.
func (d *Driver) claim(claims []dedupe.Claim) (*Tx, []*dedupe.Record, <-chan struct{}) {
	tx := &Tx{driver: d, begun: time.Now()}
	priors, busy := d.claimIn(tx, claims)
	if busy != nil || len(tx.slots) == 0 {
		return nil, priors, busy
	}
	return tx, priors, nil
}

// claimIn is claim in a transaction that is open.
func (d *Driver) claimIn(tx *Tx, claims []dedupe.Claim) ([]*dedupe.Record, <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.expire(time.Now())
	priors := make([]*dedupe.Record, len(claims))
	var free []dedupe.Key
	for i, c := range claims {
		switch s := d.slots[c.Key]; {
		case s == nil:
			free = append(free, c.Key)
		case s.record == nil:
			return nil, s.changed
		default:
			prior := *s.record
			prior.Reply = clone(prior.Reply)
			priors[i] = &prior
		}
	}
	for _, k := range free {
		s := &slot{key: k, changed: make(chan struct{})}
		d.slots[k] = s
		tx.slots = append(tx.slots, s)
	}
	return priors, nil
}

// Commit implements [dedupe.TxDriver].
func (d *Driver) Commit(ctx context.Context, tx *Tx, c dedupe.Claim, reply []byte) error {
	return d.CommitBatch(ctx, tx, []dedupe.Claim{c}, [][]byte{reply})
}

// CommitBatch implements [dedupe.BatchDriver]: it runs what was staged, and
// nobody sees a key as done before, or anything of it undone after.
func (d *Driver) CommitBatch(_ context.Context, tx *Tx, claims []dedupe.Claim, replies [][]byte) error {
	return d.commit(tx, dedupe.Advance{Claims: claims, Replies: replies})
}

func (d *Driver) commit(tx *Tx, a dedupe.Advance) error {
	staged, err := tx.end()
	if err != nil {
		return fmt.Errorf("memdedupe: %w: %w", dedupe.ErrScope, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, apply := range staged {
		apply()
	}
	for i, s := range tx.slots { // in the order of the claims
		c := a.Claims[i]
		s.record = &dedupe.Record{Fingerprint: c.Fingerprint, Fields: clone(c.Fields), Reply: clone(a.Replies[i]), DoneAt: time.Now()}
		s.expires = tx.begun.Add(c.Retain)
		d.expiry.push(s)
		close(s.changed)
	}
	for _, r := range a.Conflicts {
		d.record(r)
	}
	tx.place.move(a.To)
	return nil
}

// Rollback implements [dedupe.TxDriver].
func (d *Driver) Rollback(_ context.Context, tx *Tx) error {
	if _, err := tx.end(); err != nil {
		return nil // after Commit it does nothing
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range tx.slots {
		delete(d.slots, s.key)
		close(s.changed)
	}
	tx.place.leave()
	return nil
}

// Conflict implements [dedupe.TxDriver].
func (d *Driver) Conflict(_ context.Context, r dedupe.ConflictRecord) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.record(r)
	return nil
}

// record keeps a conflict. The caller holds mu.
func (d *Driver) record(r dedupe.ConflictRecord) {
	id := conflict{r.Key, r.Fingerprint}
	if _, ok := d.conflicts[id]; !ok {
		r.SeenAt = time.Now()
		d.conflicts[id] = r
	}
}

// Classify implements [dedupe.TxDriver].
func (d *Driver) Classify(err error) dedupe.Class {
	if errors.Is(err, ErrConflict) {
		return dedupe.ClassRetry
	}
	return dedupe.ClassOther
}

// Conflicts returns what was recorded of claims that met their key done with
// another fingerprint, one for each key and fingerprint, in no order.
func (d *Driver) Conflicts() []dedupe.ConflictRecord {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Values(d.conflicts))
}

// expire drops the keys whose time is over at now. The caller holds mu.
func (d *Driver) expire(now time.Time) {
	for len(d.expiry) > 0 && !d.expiry[0].expires.After(now) {
		s := d.expiry.pop()
		delete(d.slots, s.key)
	}
}

// clone keeps nil nil and empty empty.
func clone(b []byte) []byte {
	if b == nil {
		return nil
	}
	return append([]byte{}, b...)
}
