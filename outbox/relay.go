package outbox

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
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
	// found empty. They default to 10 ms and 500 ms.
	Poll, MaxPoll time.Duration
	// PublishTimeout bounds the publish of one batch. What has not been
	// answered then is published again. Defaults to 10 s.
	PublishTimeout time.Duration
	// Grace is how long Run may take to finish the batch in hand when its
	// context is done. Defaults to 10 s.
	Grace time.Duration
	// Retain is how long sent rows are kept, if the store can prune. Defaults
	// to 24 h; -1 keeps them for ever.
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
	outages  int // steps in a row in which the broker took nothing
	refusals int // steps in a row that failed at the store
}

// NewRelay returns a relay that reads from store and publishes to pub, both of
// which stay the caller's. o may be nil. It panics if store or pub is nil.
func NewRelay(store Store, pub brokers.Publisher, o *RelayOptions) *Relay {
	if store == nil || pub == nil {
		panic("outbox: NewRelay: the store or the publisher is nil")
	}
	r := &Relay{store: store, pub: pub, wake: make(chan struct{}, 1)}
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
	positive(&o.Grace, 10*time.Second)
	o.MaxPoll = max(o.MaxPoll, o.Poll)
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
func (r *Relay) Step(ctx context.Context) (int, error) {
	if err := r.acquire(ctx); err != nil {
		return 0, err
	}
	start := time.Now()
	rows, err := r.store.Read(ctx, r.lease, r.o.Batch)
	if err != nil {
		return 0, r.failed(fmt.Errorf("outbox: read: %w", err))
	}
	if len(rows) == 0 {
		return 0, r.keep(ctx)
	}
	r.observe(ctx, Event{Step: StepRead, Rows: rows, Took: time.Since(start)})
	results, err := r.publish(ctx, rows)
	if err != nil {
		return 0, r.failed(err)
	}
	ss := r.judge(rows, results)
	if ss == nil {
		return 0, fmt.Errorf("outbox: publish: %w", outage(results))
	}
	return r.settle(ctx, ss)
}

// acquire takes the lease unless it is ours and has not run out.
func (r *Relay) acquire(ctx context.Context) error {
	if r.held && time.Now().Before(r.until) {
		return nil
	}
	r.held = false
	before := time.Now()
	l, err := r.store.Acquire(ctx, r.o.Owner, r.o.Lease)
	if err != nil {
		return fmt.Errorf("outbox: acquire: %w", err)
	}
	r.lease, r.held = l, true
	r.until = r.safe(before)
	r.observe(ctx, Event{Step: StepLease, Epoch: l.Epoch})
	return nil
}

// safe is until when a lease can be relied on that the store granted after
// before. The store counts from when it answered, we from when we asked, and
// take a fifth off for clocks that do not run alike.
func (r *Relay) safe(before time.Time) time.Time {
	return before.Add(r.o.Lease - r.o.Lease/5)
}

// keep renews the lease of an idle relay when half of it is over.
func (r *Relay) keep(ctx context.Context) error {
	if time.Until(r.until) > r.o.Lease/2 {
		return nil
	}
	if err := r.renew(ctx); err != nil {
		return r.failed(err)
	}
	return nil
}

func (r *Relay) renew(ctx context.Context) error {
	before := time.Now()
	if err := r.store.Renew(ctx, r.lease); err != nil {
		return fmt.Errorf("outbox: renew: %w", err)
	}
	r.until = r.safe(before)
	return nil
}

// failed drops the lease if err says that it is another's.
func (r *Relay) failed(err error) error {
	if errors.Is(err, ErrFenced) {
		r.held = false
		r.observe(context.Background(), Event{Step: StepFenced, Epoch: r.lease.Epoch, Err: err})
	}
	return err
}

// publish publishes the rows that are not blocked. It stops before the lease
// can have run out, unless that is renewed meanwhile: when a relay that holds
// the next epoch publishes the same rows, this one must not be at it any more.
func (r *Relay) publish(ctx context.Context, rows []Row) (brokers.Results, error) {
	msgs := make([]*envelope.Message, 0, len(rows))
	for _, row := range rows {
		if !row.Blocked {
			msgs = append(msgs, row.Message)
		}
	}
	if len(msgs) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, r.o.PublishTimeout)
	defer cancel()
	start := time.Now()
	results, err := r.publishUnderLease(ctx, msgs)
	r.observe(ctx, Event{Step: StepPublish, Rows: rows, Err: results.Err(), Took: time.Since(start)})
	if err == nil && len(results) != len(msgs) {
		err = fmt.Errorf("outbox: the publisher gave %d results for %d messages", len(results), len(msgs))
	}
	return results, err
}

// publishUnderLease renews the lease for as long as the publish takes.
func (r *Relay) publishUnderLease(ctx context.Context, msgs []*envelope.Message) (brokers.Results, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var keeper sync.WaitGroup
	done := make(chan struct{})
	var lost error
	keeper.Go(func() {
		if lost = r.keepAlive(ctx, done); lost != nil {
			cancel(lost)
		}
	})
	results := r.pub.Publish(ctx, msgs)
	close(done)
	keeper.Wait()
	return results, lost
}

// keepAlive renews the lease until done is closed. It returns an error that
// matches ErrFenced if the lease is lost or cannot be renewed in time.
func (r *Relay) keepAlive(ctx context.Context, done <-chan struct{}) error {
	ctx = context.WithoutCancel(ctx)
	for {
		left := time.Until(r.until)
		if left <= 0 {
			return fmt.Errorf("%w: it could not be renewed in time", ErrFenced)
		}
		t := time.NewTimer(min(r.o.Lease/3, left/2+time.Millisecond))
		select {
		case <-done:
			t.Stop()
			return nil
		case <-t.C:
		}
		one, cancel := context.WithDeadline(ctx, r.until)
		err := r.renew(one)
		cancel()
		if errors.Is(err, ErrFenced) {
			return err
		}
	}
}

func (r *Relay) settle(ctx context.Context, ss []Settlement) (int, error) {
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
