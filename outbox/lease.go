package outbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// errLapsed: we do not know that another relay has taken over, but one may have.
var errLapsed = fmt.Errorf("%w: it could not be renewed in time", ErrFenced)

// hold sees to it that the lease is ours for a while: it takes it, or renews
// it when half of it is over. A lease that may have run out is renewed as
// well: it is still ours if nobody has taken it, and acquiring it would mean
// to wait for its end.
func (r *Relay) hold(ctx context.Context) error {
	switch {
	case !r.held:
		return r.acquire(ctx)
	case time.Until(r.until) > r.o.Lease/2:
		return nil
	}
	return r.failed(r.renew(ctx))
}

func (r *Relay) acquire(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.o.StoreTimeout)
	defer cancel()
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

func (r *Relay) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.o.StoreTimeout)
	defer cancel()
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
		r.held = errors.Is(err, errLapsed)
		r.observe(context.Background(), Event{Step: StepFenced, Epoch: r.lease.Epoch, Err: err})
	}
	return err
}

// underLease renews the lease for as long as f takes, and ends f's context
// before the lease can have run out: when a relay that holds the next epoch
// publishes the same rows, this one must not be at it any more.
func (r *Relay) underLease(ctx context.Context, f func(context.Context) error) error {
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
	err := f(ctx)
	close(done)
	keeper.Wait()
	if lost != nil {
		return lost
	}
	return err
}

// keepAlive renews the lease until done is closed. It returns an error that
// matches ErrFenced if the lease is lost or cannot be renewed in time.
func (r *Relay) keepAlive(ctx context.Context, done <-chan struct{}) error {
	for {
		left := time.Until(r.until)
		t := time.NewTimer(min(r.o.Lease/3, left/2+time.Millisecond))
		select {
		case <-done:
			t.Stop()
			return nil
		case <-t.C:
		}
		if left <= 0 {
			select {
			case <-done: // and the store decides whether it was in time
				return nil
			default:
				return errLapsed
			}
		}
		one, cancel := context.WithDeadline(ctx, r.until)
		err := r.renew(one)
		cancel()
		if errors.Is(err, ErrFenced) {
			return err
		}
	}
}

// release gives the lease up, so that the next relay need not wait.
func (r *Relay) release(ctx context.Context) {
	if !r.held {
		return
	}
	r.held = false
	ctx, cancel := context.WithTimeout(ctx, min(r.o.Lease, r.o.StoreTimeout))
	defer cancel()
	if err := r.store.Release(ctx, r.lease); err != nil { // it runs out by itself
		r.observe(ctx, Event{Step: StepFailed, Err: fmt.Errorf("outbox: release: %w", err)})
	}
}
