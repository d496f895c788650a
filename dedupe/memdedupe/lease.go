package memdedupe

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/unecho/unecho/dedupe"
)

// NewLeaseStore returns a store of leases that holds no keys. o may be nil.
func NewLeaseStore(o *dedupe.LeaseOptions) dedupe.Store[*dedupe.Lease] {
	return dedupe.NewLeaseStore(NewLeaseDriver(), o)
}

// NewLeaseDriver returns the driver behind [NewLeaseStore], for those who want
// to look into it or to build on it.
func NewLeaseDriver() *LeaseDriver {
	return &LeaseDriver{keys: make(map[dedupe.Key]*leased), conflicts: make(map[dedupe.Key]map[[32]byte]dedupe.ConflictRecord)}
}

// LeaseDriver implements dedupe.LeaseDriver. It is safe for concurrent use.
type LeaseDriver struct {
	mu        sync.Mutex
	keys      map[dedupe.Key]*leased
	conflicts map[dedupe.Key]map[[32]byte]dedupe.ConflictRecord
	token     int64 // the last one, over all keys
}

// leased is a key that was claimed at some time.
type leased struct {
	owner   string
	grant   dedupe.Grant
	until   time.Time      // of the lease; zero when the key was given up
	parked  bool           // given up, for a person
	claimed dedupe.Record  // fingerprint and fields of the claim
	done    *dedupe.Record // nil until it is
	expires time.Time      // of done
}

// Acquire implements dedupe.LeaseDriver.
func (d *LeaseDriver) Acquire(_ context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	if err := dedupe.CheckLifetimes(lease, c.Retain); err != nil {
		return dedupe.Grant{}, nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	now, l := time.Now(), d.keys[c.Key]
	if l == nil || l.done != nil && !now.Before(l.expires) {
		l = &leased{}
	}
	if r := l.settled(c); r != nil {
		return dedupe.Grant{}, r, nil
	}
	switch {
	case l.owner == owner && !l.until.IsZero():
		return l.grant, nil, nil // the same claim, whose answer was lost
	case l.parked:
		return dedupe.Grant{}, nil, dedupe.ErrParked
	case now.Before(l.until):
		return dedupe.Grant{}, nil, &dedupe.HeldError{Left: l.until.Sub(now)}
	}
	d.token++
	next := &leased{owner: owner, until: now.Add(lease)}
	next.claimed = dedupe.Record{Fingerprint: c.Fingerprint, Fields: bytes.Clone(c.Fields)}
	next.grant = dedupe.Grant{Token: d.token, Attempt: l.grant.Attempt + 1, Unknown: l.unknown()}
	d.keys[c.Key] = next
	return next.grant, nil, nil
}

// unknown reports whether an owner has vanished, or may yet, or could not tell
// what came of the effect.
func (l *leased) unknown() bool { return l.grant.Unknown || !l.until.IsZero() }

// settled returns the record that answers a claim: of a key that is done, or of
// another content of which it is not known what came.
func (l *leased) settled(c dedupe.Claim) *dedupe.Record {
	r := l.claimed
	switch {
	case l.done != nil:
		r = *l.done
	case l.owner == "" || !l.unknown() || r.Fingerprint == c.Fingerprint:
		return nil
	}
	r.Reply, r.Fields = bytes.Clone(r.Reply), bytes.Clone(r.Fields)
	return &r
}

// ours returns the claim if it is still the caller's. d.mu is held.
func (d *LeaseDriver) ours(k dedupe.Key, owner string, token int64) (*leased, error) {
	l := d.keys[k]
	if l == nil || l.owner != owner || l.grant.Token != token || l.done == nil && l.until.IsZero() {
		return nil, fmt.Errorf("%w: another owner has the key, or nobody", dedupe.ErrLeaseLost)
	}
	return l, nil
}

// Extend implements dedupe.LeaseDriver.
func (d *LeaseDriver) Extend(_ context.Context, k dedupe.Key, owner string, token int64, lease time.Duration) error {
	if err := dedupe.CheckLifetimes(lease); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	l, err := d.ours(k, owner, token)
	if err == nil && l.done != nil {
		err = fmt.Errorf("%w: the key is done", dedupe.ErrLeaseLost)
	}
	if err == nil {
		l.until = time.Now().Add(lease)
	}
	return err
}

// Complete implements dedupe.LeaseDriver.
func (d *LeaseDriver) Complete(_ context.Context, c dedupe.Claim, owner string, token int64, reply []byte) error {
	if err := dedupe.CheckLifetimes(c.Retain); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	l, err := d.ours(c.Key, owner, token)
	if err == nil && l.done == nil {
		now := time.Now()
		l.done = &dedupe.Record{Fingerprint: l.claimed.Fingerprint, Fields: l.claimed.Fields, Reply: bytes.Clone(reply), DoneAt: now}
		l.expires = now.Add(c.Retain)
	}
	return err
}

// Release implements dedupe.LeaseDriver.
func (d *LeaseDriver) Release(_ context.Context, k dedupe.Key, owner string, token int64, to dedupe.State) error {
	if to != dedupe.StateFree && to != dedupe.StateUnknown && to != dedupe.StateParked {
		return fmt.Errorf("memdedupe: release: %w: no lease is given up as %v", dedupe.ErrWrongState, to)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	l, err := d.ours(k, owner, token)
	if err == nil && l.done != nil {
		err = fmt.Errorf("%w: the key is done", dedupe.ErrLeaseLost)
	}
	if err == nil {
		l.until, l.grant.Unknown, l.parked = time.Time{}, to != dedupe.StateFree, to == dedupe.StateParked
	}
	return err
}

// Conflict implements dedupe.LeaseDriver.
func (d *LeaseDriver) Conflict(_ context.Context, r dedupe.ConflictRecord) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.conflicts[r.Key] == nil {
		d.conflicts[r.Key] = make(map[[32]byte]dedupe.ConflictRecord)
	}
	if _, ok := d.conflicts[r.Key][r.Fingerprint]; !ok {
		r.SeenAt = time.Now()
		d.conflicts[r.Key][r.Fingerprint] = r
	}
	return nil
}
