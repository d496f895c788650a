package outbox

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// pruneBatch is how many rows one delete takes, pruneEvery how often it is
// looked whether there are any.
const (
	pruneBatch = 1000
	pruneEvery = time.Minute
)

// Run steps until ctx is done, and returns nil then. It stands by while
// another relay holds the lease, waits out outages of the store and of the
// broker with back-off, and looks at an empty outbox less and less often.
//
// When ctx is done Run finishes the batch in hand under a context of its own,
// at most for the grace, so that what was published is also recorded, and
// gives up the lease.
func (r *Relay) Run(ctx context.Context) error {
	work, cancel := r.outlive(ctx)
	defer cancel()
	idle := r.o.Poll
	for ctx.Err() == nil {
		n, err := r.Step(work)
		r.count(err)
		switch {
		case err != nil:
			if !errors.Is(err, ErrHeld) && !errors.Is(err, ErrFenced) {
				r.observe(work, Event{Step: StepFailed, Err: err})
			}
			r.pause(ctx, r.after(err))
		case n > 0:
			idle = r.o.Poll
		default:
			if r.prune(work) {
				continue
			}
			if r.pause(ctx, jitter(idle)) {
				idle = r.o.Poll
			} else {
				idle = min(2*idle, r.o.MaxPoll)
			}
		}
	}
	return r.release(work)
}

// outlive returns a context that ends the grace after ctx does.
func (r *Relay) outlive(ctx context.Context) (context.Context, context.CancelFunc) {
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		t := time.AfterFunc(r.o.Grace, cancel)
		context.AfterFunc(work, func() { t.Stop() })
	})
	return work, func() { stop(); cancel() }
}

// count keeps how often in a row nothing could be done.
func (r *Relay) count(err error) {
	switch {
	case err == nil:
		r.outages, r.refusals = 0, 0
	case isOutage(err):
		r.outages++
	case !errors.Is(err, ErrHeld) && !errors.Is(err, ErrFenced):
		r.refusals++
	}
}

// after is the wait after an error of Step.
func (r *Relay) after(err error) time.Duration {
	switch {
	case errors.Is(err, ErrHeld):
		return jitter(r.o.Lease / 3)
	case errors.Is(err, ErrFenced):
		return jitter(r.o.Poll)
	}
	d := r.o.Poll << min(max(r.outages, r.refusals), 16)
	return jitter(min(d, max(r.o.Lease, r.o.MaxPoll)))
}

// jitter takes a random part of up to a third off.
func jitter(d time.Duration) time.Duration {
	return d - rand.N(d/3+1)
}

// pause waits for d, and reports whether a Wake ended it.
func (r *Relay) pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-r.wake:
		return true
	case <-t.C:
	case <-ctx.Done():
	}
	return false
}

// prune deletes a batch of old rows when it is time to, and reports whether
// there may be more.
func (r *Relay) prune(ctx context.Context) bool {
	p, ok := r.store.(Pruner)
	if !ok || r.o.Retain < 0 || time.Now().Before(r.pruneAt) {
		return false
	}
	n, err := p.Prune(ctx, r.o.Retain, pruneBatch)
	if err != nil {
		r.observe(ctx, Event{Step: StepFailed, Err: fmt.Errorf("outbox: prune: %w", err)})
	}
	if err == nil && n == pruneBatch {
		return true
	}
	r.pruneAt = time.Now().Add(pruneEvery)
	return false
}

// release gives the lease up, so that the next relay need not wait.
func (r *Relay) release(ctx context.Context) error {
	if !r.held {
		return nil
	}
	r.held = false
	ctx, cancel := context.WithTimeout(ctx, r.o.Lease)
	defer cancel()
	if err := r.store.Release(ctx, r.lease); err != nil {
		r.observe(ctx, Event{Step: StepFailed, Err: fmt.Errorf("outbox: release: %w", err)})
	}
	return nil // it runs out by itself
}
