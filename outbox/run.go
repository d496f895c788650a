package outbox

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// pruneBatch is how many rows one delete takes at least, pruneEvery how often
// it is looked whether there are any.
const (
	pruneBatch = 1000
	pruneEvery = time.Minute
)

// Run steps until ctx is done, and returns nil then. It stands by while
// another relay holds the lease, waits out outages of the store and of the
// broker with back-off, and looks at an empty outbox less and less often. In
// an outage of the broker that lasts it gives the lease up between two tries:
// another relay may still reach the broker.
//
// When ctx is done Run finishes the batch in hand under a context of its own,
// at most for the grace, so that what was published is also recorded, and
// gives up the lease.
func (r *Relay) Run(ctx context.Context) error {
	work, publishing, cancel := r.outlive(ctx)
	defer cancel()
	idle := r.o.Poll
	for ctx.Err() == nil {
		n, err := r.step(work, publishing)
		r.count(err)
		more := err == nil && r.prune(work)
		switch {
		case err != nil:
			r.backOff(ctx, work, err)
		case n > 0:
			idle = r.o.Poll
		case more: // to be pruned, and there may be rows meanwhile
		case r.pause(ctx, jitter(idle), r.wake):
			idle = r.o.Poll
		default:
			idle = min(2*idle, r.o.MaxPoll)
		}
	}
	r.release(work)
	return nil
}

// outlive returns contexts that end the grace, and three quarters of it,
// after ctx does.
func (r *Relay) outlive(ctx context.Context) (work, publishing context.Context, cancel context.CancelFunc) {
	work, cancelWork := context.WithCancel(context.WithoutCancel(ctx))
	publishing, cancelPublishing := context.WithCancel(work)
	stop := context.AfterFunc(ctx, func() {
		soft := time.AfterFunc(r.o.Grace*3/4, cancelPublishing)
		hard := time.AfterFunc(r.o.Grace, cancelWork)
		context.AfterFunc(work, func() { soft.Stop(); hard.Stop() })
	})
	return work, publishing, func() { stop(); cancelWork(); cancelPublishing() }
}

// backOff waits after an error of a step.
func (r *Relay) backOff(ctx, work context.Context, err error) {
	if !errors.Is(err, ErrHeld) && !errors.Is(err, ErrFenced) {
		r.observe(work, Event{Step: StepFailed, Err: err})
	}
	wait := r.after(err)
	if isOutage(err) && wait > r.o.Lease/4 {
		r.release(work)
	}
	r.pause(ctx, wait, nil)
}

// count keeps how often in a row nothing could be done.
func (r *Relay) count(err error) {
	switch {
	case err == nil:
		r.failures = 0
	case !errors.Is(err, ErrHeld) && !errors.Is(err, ErrFenced):
		r.failures++
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
	d := r.o.Poll << min(r.failures, 16)
	return jitter(min(d, max(r.o.Lease/2, r.o.MaxPoll))) // it is also how late we are when it is back
}

// jitter takes a random part of up to a third off.
func jitter(d time.Duration) time.Duration {
	return d - rand.N(d/3+1)
}

// pause waits for d, and reports whether wake ended it.
func (r *Relay) pause(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-wake:
		return true
	case <-t.C:
	case <-ctx.Done():
	}
	return false
}

// prune deletes a batch of old rows when it is time to, and reports whether
// there may be more. It has its turn under load as well, or a busy outbox
// would grow for ever.
func (r *Relay) prune(ctx context.Context) bool {
	p, ok := r.store.(Pruner)
	if !ok || r.o.Retain < 0 || time.Now().Before(r.pruneAt) {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, r.o.StoreTimeout)
	defer cancel()
	limit := max(pruneBatch, 2*r.o.Batch) // more than a step adds
	n, err := p.Prune(ctx, r.o.Retain, limit)
	if err != nil {
		r.observe(ctx, Event{Step: StepFailed, Err: fmt.Errorf("outbox: prune: %w", err)})
	}
	if err == nil && n == limit {
		return true
	}
	r.pruneAt = time.Now().Add(pruneEvery)
	return false
}
