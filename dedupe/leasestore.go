package dedupe

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// LeaseOptions are the settings of [NewLeaseStore]. The zero value is the
// default.
type LeaseOptions struct {
	// Lease is how long a key stays claimed by an owner that has died. It is
	// extended while the handler runs. Defaults to 30 s, the least is 50 ms;
	// negative is an error of every claim.
	Lease time.Duration
	// Timeout bounds each call of the store. Defaults to a quarter of Lease,
	// at most 5 s.
	Timeout time.Duration
	// Unknown says what becomes of a key whose earlier owner has vanished.
	// Defaults to Rerun.
	Unknown UnknownPolicy
	// Resolve, if there is one, is asked instead of Unknown.
	Resolve Resolver
	// MaxReply is the greatest reply of a handler, in bytes. After a longer
	// one the key is unknown, for the effect has been brought about, and the
	// error matches ErrReplyTooLarge. Defaults to DefaultMaxReply; negative is
	// no limit.
	MaxReply int
	// Holder names this process to people who ask who has a key: up to 100
	// bytes of it are kept. Defaults to nothing.
	Holder string
}

const (
	defaultLease    = 30 * time.Second
	leastLease      = 50 * time.Millisecond
	maxLeaseTimeout = 5 * time.Second
	maxHolder       = 100
)

// NewLeaseStore makes a [Store] of a lease driver. o may be nil. It panics if d
// is nil.
//
// Once of this store differs from that of a transactional one: what the handler
// does is not undone when it fails. Beside the errors of [Store] it returns
// ErrLeaseLost; ErrUnknownOutcome means that the answer to the completion was
// lost. While the store is out of reach no handler is started.
func NewLeaseStore(d LeaseDriver, o *LeaseOptions) Store[*Lease] {
	if d == nil {
		panic("dedupe: NewLeaseStore: the driver is nil")
	}
	s := &leaseStore{driver: d}
	if o != nil {
		s.o = *o
	}
	if s.o.Lease == 0 {
		s.o.Lease = defaultLease
	}
	if s.o.Timeout <= 0 {
		s.o.Timeout = min(s.o.Lease/4, maxLeaseTimeout)
	}
	return s
}

type leaseStore struct {
	driver LeaseDriver
	o      LeaseOptions
}

// holding is one granted lease.
type holding struct {
	*leaseStore
	claim Claim
	owner string
	lease Lease
	until time.Time // when the lease may have run out, at the latest
}

// Once implements [Store].
func (s *leaseStore) Once(ctx context.Context, c Claim, fn func(ctx context.Context, l *Lease) ([]byte, error)) (Result, error) {
	c, err := c.Normal()
	if err != nil {
		return Result{}, err
	}
	if s.o.Lease < leastLease {
		return Result{}, fmt.Errorf("%w: the lease is %v, the least is %v", ErrInvalidClaim, s.o.Lease, leastLease)
	}
	h, prior, err := s.acquire(ctx, c)
	switch {
	case err != nil:
		return Result{}, err
	case prior != nil:
		return s.settled(ctx, c, *prior)
	}
	return h.run(ctx, fn)
}

// acquire claims the key. A claim whose answer was lost is sent once more by
// the same name: if it had been granted it is found, instead of passing for
// another owner's, which would hold the event up for a whole lease.
func (s *leaseStore) acquire(ctx context.Context, c Claim) (*holding, *Record, error) {
	h := &holding{leaseStore: s, claim: c, owner: s.name()}
	for try := 0; ; try++ {
		before := time.Now()
		grant, prior, err := s.try(ctx, c, h.owner)
		switch {
		case err == nil && prior != nil:
			return nil, prior, nil
		case err == nil:
			h.lease = Lease{Key: c.Key, Token: grant.Token, Attempt: grant.Attempt, Unknown: grant.Unknown}
			h.until = s.safe(before)
			return h, nil, nil
		case errors.Is(err, ErrInProgress), errors.Is(err, ErrParked), errors.Is(err, ErrInvalidKey), errors.Is(err, ErrInvalidClaim), errors.Is(err, ErrBusy):
			return nil, nil, err
		case try == 1 || ctx.Err() != nil:
			return nil, nil, fmt.Errorf("%w: acquire: %w", ErrUnavailable, err)
		}
	}
}

// name is that of one claim: random, behind the name of the process.
func (s *leaseStore) name() string {
	if s.o.Holder == "" {
		return rand.Text()
	}
	holder := s.o.Holder[:min(len(s.o.Holder), maxHolder)]
	return strings.ToValidUTF8(strings.ReplaceAll(holder, "\x00", ""), "") + "/" + rand.Text()
}

func (s *leaseStore) try(ctx context.Context, c Claim, owner string) (Grant, *Record, error) {
	ctx, cancel := context.WithTimeout(ctx, s.o.Timeout)
	defer cancel()
	return s.driver.Acquire(ctx, c, owner, s.o.Lease)
}

// safe is until when a lease can be relied on that was granted after before:
// the store counts from its answer, we from our question, and take a fifth off
// for clocks that do not run alike and for the time to stop.
func (s *leaseStore) safe(before time.Time) time.Time {
	return before.Add(s.o.Lease - s.o.Lease/5)
}

func (s *leaseStore) settled(ctx context.Context, c Claim, prior Record) (Result, error) {
	if prior.Fingerprint == c.Fingerprint {
		return Result{Outcome: Duplicate, Reply: prior.Reply}, nil
	}
	ctx, cancel := s.detach(ctx)
	defer cancel()
	if err := s.driver.Conflict(ctx, NewConflictRecord(c, prior)); err != nil {
		return Result{}, fmt.Errorf("%w: record a conflict: %w", ErrUnavailable, err)
	}
	return Result{Outcome: Conflict}, nil
}

func (s *leaseStore) detach(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), s.o.Timeout)
}

// run settles what is unknown, runs fn under the lease, and completes.
func (h *holding) run(ctx context.Context, fn leaseHandler) (Result, error) {
	if h.lease.Unknown && h.o.Resolve == nil && h.o.Unknown == Park {
		return Result{}, h.park(ctx)
	}
	a := attempt{holding: h, fn: fn, outcome: Processed}
	returned := false
	defer func() {
		if !returned { // fn panicked, or ended its goroutine
			_ = h.release(ctx, a.fate(nil)) // if it cannot be released, the lease runs out
		}
	}()
	err := h.extended(ctx, a.run)
	returned = true
	switch {
	case errors.Is(err, ErrLeaseLost):
		return Result{}, err
	case err != nil:
		_ = h.release(ctx, a.fate(err))
		return Result{}, err
	}
	if err := h.complete(ctx, a.reply); err != nil {
		return Result{}, err
	}
	return Result{Outcome: a.outcome, Reply: a.reply}, nil
}

// leaseHandler is the function of [Store.Once].
type leaseHandler = func(ctx context.Context, l *Lease) ([]byte, error)

// attempt is one run of a handler, or of the resolver in its place.
type attempt struct {
	*holding
	fn      leaseHandler
	started bool
	outcome Outcome
	reply   []byte
}

func (a *attempt) run(ctx context.Context) (err error) {
	v := NotDone
	if a.lease.Unknown && a.o.Resolve != nil {
		l := a.lease
		if v, a.reply, err = a.o.Resolve(ctx, &l); err != nil || v == AskLater {
			return fmt.Errorf("%w: it is not known yet what came of an earlier attempt: %w", ErrInProgress, orNotYet(err))
		}
	}
	if v == Done {
		a.outcome = Duplicate
		return CheckReply(a.reply, a.o.MaxReply)
	}
	a.started = true
	l := a.lease
	if a.reply, err = a.fn(ctx, &l); err != nil {
		return err
	}
	return CheckReply(a.reply, a.o.MaxReply)
}

// fate is what is known about the effect after an attempt that did not
// succeed; err is nil if it did not return.
//
// A handler that says that it failed has failed: what it did before is its own
// to know, and the next attempt's key is the same. One that panicked may have
// been anywhere, and one whose reply is too large has had its effect. If the
// earlier owner's fate was open and the handler did not run, it still is.
func (a *attempt) fate(err error) State {
	switch {
	case a.started && (err == nil || errors.Is(err, ErrReplyTooLarge)):
		return StateUnknown
	case a.lease.Unknown && !a.started:
		return StateUnknown
	}
	return StateFree
}

// park gives the key into the hands of a person. Until the store has said that
// it did, the key only counts as claimed.
func (h *holding) park(ctx context.Context) error {
	err := h.release(ctx, StateParked)
	switch {
	case err == nil:
		return fmt.Errorf("%w (attempt %d)", ErrParked, h.lease.Attempt-1)
	case errors.Is(err, ErrLeaseLost):
		return err
	}
	return fmt.Errorf("%w: park: %w", ErrUnavailable, err)
}

var errNotYet = errors.New("the resolver says later")

func orNotYet(err error) error {
	if err == nil {
		return errNotYet
	}
	return err
}

// extended runs f and keeps the lease meanwhile. f's context ends before the
// lease can have run out, with ErrLeaseLost as its cause, and whatever f then
// returns, ErrLeaseLost is the error.
func (h *holding) extended(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var keeper sync.WaitGroup
	done := make(chan struct{})
	var lost error
	keeper.Go(func() {
		if lost = h.keep(context.WithoutCancel(ctx), done); lost != nil {
			cancel(lost)
		}
	})
	stop := sync.OnceFunc(func() { close(done); keeper.Wait() })
	defer stop() // also when f panics
	err := f(ctx)
	stop()
	if lost != nil {
		return lost
	}
	return err
}

// keep extends the lease until done is closed. It returns an error that
// matches ErrLeaseLost when it is another's, or could not be extended in time.
func (h *holding) keep(ctx context.Context, done <-chan struct{}) error {
	for {
		left := time.Until(h.until)
		if left <= 0 {
			return fmt.Errorf("%w: it could not be extended in time", ErrLeaseLost)
		}
		t := time.NewTimer(min(h.o.Lease/3, left/2+time.Millisecond))
		select {
		case <-done:
			t.Stop()
			return nil
		case <-t.C:
		}
		before := time.Now()
		one, cancel := context.WithTimeout(ctx, min(h.o.Timeout, time.Until(h.until)))
		err := h.driver.Extend(one, h.claim.Key, h.owner, h.lease.Token, h.o.Lease)
		cancel()
		switch {
		case err == nil:
			h.until = h.safe(before)
		case errors.Is(err, ErrLeaseLost):
			return err
		}
	}
}

// complete marks the key done. An answer that was lost is asked for once more:
// completing twice is no error.
func (h *holding) complete(ctx context.Context, reply []byte) (err error) {
	for range 2 {
		one, cancel := h.detach(ctx)
		err = h.driver.Complete(one, h.claim, h.owner, h.lease.Token, reply)
		cancel()
		if err == nil || errors.Is(err, ErrLeaseLost) {
			return err
		}
	}
	return fmt.Errorf("%w: complete: %w", ErrUnknownOutcome, err)
}

// release gives the key up.
func (h *holding) release(ctx context.Context, to State) error {
	ctx, cancel := h.detach(ctx)
	defer cancel()
	return h.driver.Release(ctx, h.claim.Key, h.owner, h.lease.Token, to)
}
