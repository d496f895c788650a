package outbox

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"time"

	"github.com/unecho/unecho/brokers"
)

// RelayOptions are the settings of [NewRelay]. The zero value, and nil, is the
// default.
type RelayOptions struct {
	// Owner names this relay in the lease, for people. Defaults to the host's
	// name, the process id and a random part.
	Owner string
	// Batch is how many rows are read and published at once. Defaults to 500.
	Batch int
	// Lease is how long a relay that has died blocks the others. Defaults to
	// 3 s, the least is 300 ms.
	Lease time.Duration
	// MaxAttempts is after how many refusals by the broker a row is parked.
	// Outages are no refusals. Defaults to 10; -1 is no limit.
	MaxAttempts int
	// Backoff is the wait before a refused row is tried again, doubled with
	// each attempt up to MaxBackoff. They default to 500 ms and 1 minute.
	Backoff, MaxBackoff time.Duration
	// SkipParked lets the later rows of a key pass one that was parked. By
	// default they wait until it was requeued or dropped, because order is
	// what the key was given for.
	SkipParked bool
	// Poll and MaxPoll bound the wait between two looks at an outbox that was
	// found empty. They default to 10 ms and 500 ms. Neither is more than a
	// quarter of Lease, so that an idle relay keeps it.
	Poll, MaxPoll time.Duration
	// PublishTimeout bounds the publish of one batch. What has not been
	// answered then is published again. Defaults to 10 s.
	PublishTimeout time.Duration
	// StoreTimeout bounds each call of the store. Defaults to 30 s.
	StoreTimeout time.Duration
	// Grace is how long Run may take to finish the batch in hand when its
	// context is done. A publish under way has three quarters of it; the rest
	// is for recording the answers. Defaults to 10 s.
	Grace time.Duration
	// Retain is how long rows that were sent are kept, from when they were
	// written, if the store can prune. Defaults to 24 h; -1 keeps them for ever.
	Retain time.Duration
	// Observer is told what happens. Defaults to none.
	Observer Observer
}

// Relay publishes the rows of an outbox. Of any number of relays on one
// outbox, one works, and the others stand by.
type Relay struct {
	store Store
	pub   brokers.Publisher
	o     RelayOptions

	wake chan struct{} // one token: somebody has written

	// What follows belongs to whoever is in Step or Run.
	lease    Lease
	held     bool
	until    time.Time // when the lease may have run out, at the latest
	pruneAt  time.Time
	failures int                     // steps in a row that failed at the store or at the broker
	down     map[string]*destination // by name, those that do not serve
}

// NewRelay returns a relay that reads from store and publishes to pub, both of
// which stay the caller's. o may be nil. It panics if store or pub is nil.
func NewRelay(store Store, pub brokers.Publisher, o *RelayOptions) *Relay {
	if store == nil || pub == nil {
		panic("outbox: NewRelay: the store or the publisher is nil")
	}
	r := &Relay{store: store, pub: pub, wake: make(chan struct{}, 1), down: make(map[string]*destination)}
	if o != nil {
		r.o = *o
	}
	r.o.defaults()
	return r
}

func (o *RelayOptions) defaults() {
	positive := func(d *time.Duration, def time.Duration) {
		if *d <= 0 {
			*d = def
		}
	}
	if o.Owner == "" {
		o.Owner = owner()
	}
	if o.Batch <= 0 {
		o.Batch = 500
	}
	if o.MaxAttempts == 0 {
		o.MaxAttempts = 10
	}
	if o.Retain == 0 {
		o.Retain = 24 * time.Hour
	}
	positive(&o.Lease, 3*time.Second)
	o.Lease = max(o.Lease, 300*time.Millisecond)
	positive(&o.Backoff, 500*time.Millisecond)
	positive(&o.MaxBackoff, time.Minute)
	positive(&o.Poll, 10*time.Millisecond)
	positive(&o.MaxPoll, 500*time.Millisecond)
	positive(&o.PublishTimeout, 10*time.Second)
	positive(&o.StoreTimeout, 30*time.Second)
	positive(&o.Grace, 10*time.Second)
	o.MaxPoll = min(max(o.MaxPoll, o.Poll), o.Lease/4)
	o.Poll = min(o.Poll, o.MaxPoll)
}

func owner() string {
	host, _ := os.Hostname() // a part of a name for people
	b := make([]byte, 4)
	_, _ = rand.Read(b)
	return fmt.Sprintf("%s/%d/%s", host, os.Getpid(), hex.EncodeToString(b))
}

// Wake makes a relay that waits look at once. It never blocks. Call it after
// the commit of a transaction that wrote to the outbox, if the relay runs in
// the same process; without it the relay finds the rows at its next look.
func (r *Relay) Wake() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Step does one batch: it takes the lease if it has none, reads rows,
// publishes them and settles them, without waiting in between. It returns how
// many rows it has settled.
//
// ErrHeld means that another relay works, ErrFenced that one has taken over;
// an error that matches brokers.ErrUnavailable or brokers.ErrUnknown that the
// broker took nothing of the batch, which stays as it is. Other errors are the
// store's. After any of them Step can be called again. Step and Run must not
// overlap.
func (r *Relay) Step(ctx context.Context) (int, error) { return r.step(ctx, ctx) }

// step is Step; the publish also ends with publishing.
func (r *Relay) step(ctx, publishing context.Context) (int, error) {
	if err := r.hold(ctx); err != nil {
		return 0, err
	}
	var rows []Row
	var b []entry
	err := r.underLease(ctx, func(ctx context.Context) (err error) {
		if rows, err = r.read(ctx); err != nil || len(rows) == 0 {
			return err
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(publishing, cancel)()
		b = r.plan(rows)
		return r.publish(ctx, b)
	})
	switch {
	case err != nil:
		return 0, r.failed(err)
	case len(rows) == 0:
		return 0, nil
	}
	ss, err := r.judge(ctx, b)
	if err != nil {
		return 0, err
	}
	return r.settle(ctx, ss)
}

func (r *Relay) read(ctx context.Context) ([]Row, error) {
	ctx, cancel := context.WithTimeout(ctx, r.o.StoreTimeout)
	defer cancel()
	start := time.Now()
	rows, err := r.store.Read(ctx, r.lease, r.o.Batch)
	if err != nil {
		return nil, fmt.Errorf("outbox: read: %w", err)
	}
	if !r.o.SkipParked {
		block(rows)
	}
	if len(rows) > 0 {
		r.observe(ctx, Event{Step: StepRead, Rows: rows, Took: time.Since(start)})
	}
	return rows, nil
}

func (r *Relay) settle(ctx context.Context, ss []Settlement) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, r.o.StoreTimeout)
	defer cancel()
	before := time.Now()
	if err := r.store.Settle(ctx, r.lease, ss); err != nil {
		return 0, r.failed(fmt.Errorf("outbox: settle: %w", err))
	}
	r.until = r.safe(before)
	r.observe(ctx, Event{Step: StepSettle, Settled: ss, Took: time.Since(before)})
	return len(ss), nil
}

func (r *Relay) observe(ctx context.Context, e Event) {
	if r.o.Observer != nil {
		r.o.Observer.Observe(ctx, e)
	}
}
