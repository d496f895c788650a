package dedupe

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// TxOptions are the settings of [NewTxStore]. The zero value is the default.
type TxOptions struct {
	// Retries is how often a transaction that lost against another one
	// (serialization failure, deadlock) is run again before it is given up
	// with ErrContention. Defaults to 5; -1 disables.
	Retries int
	// CommitTimeout bounds the commit, the rollback and the record of a
	// conflict, which go on when the caller's context is done: a handler that
	// has succeeded is not undone because its deadline passed a moment later,
	// and a commit that is cut off would only be unknown. Defaults to 10 s.
	CommitTimeout time.Duration
	// MaxReply is the greatest reply of a handler, in bytes. A longer one is
	// ErrReplyTooLarge. Defaults to DefaultMaxReply; negative is no limit.
	MaxReply int
}

const (
	defaultRetries       = 5
	defaultCommitTimeout = 10 * time.Second
	// firstPause is before the first run again; it doubles up to maxPause.
	firstPause = 2 * time.Millisecond
	maxPause   = 100 * time.Millisecond
)

// NewTxStore makes a [Store] of a driver: the state machine that all
// transactional stores share; it is a [Batcher] if d is a [BatchDriver],
// and a [Placer] if d is a [PlaceDriver]. o may be nil. It panics if d is nil.
func NewTxStore[Tx any](d TxDriver[Tx], o *TxOptions) Store[Tx] {
	if d == nil {
		panic("dedupe: NewTxStore: the driver is nil")
	}
	s := &txStore[Tx]{driver: d, retries: defaultRetries, commitTimeout: defaultCommitTimeout}
	s.explainer, _ = d.(Explainer[Tx])
	if o != nil {
		s.maxReply = o.MaxReply
		if o.Retries != 0 {
			s.retries = max(o.Retries, 0)
		}
		if o.CommitTimeout > 0 {
			s.commitTimeout = o.CommitTimeout
		}
	}
	return s.withPowers(d)
}

// withPowers gives s what its driver can do more.
func (s *txStore[Tx]) withPowers(d TxDriver[Tx]) Store[Tx] {
	b, batches := d.(BatchDriver[Tx])
	p, places := d.(PlaceDriver[Tx])
	switch {
	case batches && places:
		return struct {
			*txBatchStore[Tx]
			*txPlacer[Tx]
		}{&txBatchStore[Tx]{s, b}, &txPlacer[Tx]{s, p}}
	case batches:
		return &txBatchStore[Tx]{s, b}
	case places:
		return struct {
			*txStore[Tx]
			*txPlacer[Tx]
		}{s, &txPlacer[Tx]{s, p}}
	}
	return s
}

type txStore[Tx any] struct {
	driver        TxDriver[Tx]
	explainer     Explainer[Tx] // nil if the driver sees nothing
	retries       int
	commitTimeout time.Duration
	maxReply      int
}

// handler is the function of [Store.Once].
type handler[Tx any] = func(ctx context.Context, tx Tx) ([]byte, error)

// Once implements [Store].
func (s *txStore[Tx]) Once(ctx context.Context, c Claim, fn func(ctx context.Context, tx Tx) ([]byte, error)) (Result, error) {
	c, err := c.Normal()
	if err != nil {
		return Result{}, err
	}
	if err := ctx.Err(); err != nil {
		return Result{}, fmt.Errorf("dedupe: the context is done before the claim: %w", err)
	}
	return untilWon(ctx, s, func() (Result, error) { return s.try(ctx, c, fn) })
}

// untilWon runs a transaction again, a bounded number of times, as long as it
// loses against others.
func untilWon[Tx, R any](ctx context.Context, s *txStore[Tx], try func() (R, error)) (R, error) {
	var none R
	pause := firstPause
	for run := 0; ; run++ {
		res, err := try()
		switch {
		case err == nil:
			return res, nil
		case !s.again(err):
			return none, err
		case run >= s.retries:
			return none, fmt.Errorf("%w, in %d runs: %w", ErrContention, run+1, err)
		}
		if end := sleep(ctx, pause/2+rand.N(pause)); end != nil {
			return none, fmt.Errorf("%w (before another run after: %w)", end, err)
		}
		pause = min(2*pause, maxPause)
	}
}

// again reports whether another run may go better. A commit whose answer was
// lost is never run again here: it may have happened, and the retry would
// then be a duplicate that hides the outcome from the caller's own count.
func (s *txStore[Tx]) again(err error) bool {
	for _, final := range [...]error{ErrUnknownOutcome, ErrInProgress, ErrUnavailable, ErrBusy} {
		if errors.Is(err, final) {
			return false
		}
	}
	return s.driver.Classify(err) == ClassRetry
}

// try is one transaction.
func (s *txStore[Tx]) try(ctx context.Context, c Claim, fn handler[Tx]) (Result, error) {
	tx, prior, err := s.driver.Begin(ctx, c)
	if err != nil {
		return Result{}, s.storeFault(ctx, "claim", err)
	}
	if prior != nil {
		return s.settled(ctx, c, *prior)
	}
	return s.run(ctx, c, tx, fn)
}

// settled answers a claim of a key that is done.
func (s *txStore[Tx]) settled(ctx context.Context, c Claim, prior Record) (Result, error) {
	if prior.Fingerprint == c.Fingerprint {
		return Result{Outcome: Duplicate, Reply: prior.Reply}, nil
	}
	ctx, cancel := s.detach(ctx)
	defer cancel()
	if err := s.driver.Conflict(ctx, NewConflictRecord(c, prior)); err != nil {
		return Result{}, s.storeFault(ctx, "record a conflict", err)
	}
	return Result{Outcome: Conflict}, nil
}

// run runs fn in tx, which owns the key, and ends tx on every path: by a
// commit, or by a rollback if fn fails, panics, or ends its goroutine.
func (s *txStore[Tx]) run(ctx context.Context, c Claim, tx Tx, fn handler[Tx]) (Result, error) {
	returned := false
	defer func() {
		if !returned {
			_ = s.rollback(ctx, tx) // the panic goes on, and says more
		}
	}()
	reply, err := fn(ctx, tx)
	returned = true
	if err == nil {
		err = CheckReply(reply, s.maxReply)
	}
	if err != nil {
		return Result{}, s.failed(ctx, tx, err)
	}
	err = s.commit(ctx, tx, c, reply)
	var taken *Taken
	switch {
	case errors.As(err, &taken):
		return s.settled(ctx, c, taken.Record)
	case err != nil:
		return Result{}, err
	}
	return Result{Outcome: Processed, Reply: reply}, nil
}

// failed rolls back after a handler's error. Whether the store or the handler
// is to blame does not depend on how the handler wrapped what it got: the
// driver may know what the transaction died of, and when the rollback fails
// as well the connection is gone, which is an outage.
//
// But a driver closes the connection when a context ends in the middle of a
// statement, and a handler that always takes too long, by our clock or by its
// own, must not pass for an outage: then the error stays the handler's.
func (s *txStore[Tx]) failed(ctx context.Context, tx Tx, err error) error {
	cause := s.explain(tx)
	rb := s.rollback(ctx, tx)
	switch {
	case errors.Is(rb, ErrScope):
		return fmt.Errorf("%w; it failed as well: %w", rb, err)
	case s.driver.Classify(err) == ClassUnavailable:
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	case s.driver.Classify(cause) == ClassUnavailable:
		return fmt.Errorf("%w: %w: %w", ErrUnavailable, cause, err)
	case isContextError(err), isContextError(cause):
		return err
	case ctx.Err() != nil:
		return fmt.Errorf("%w (the handler's context had ended: %w)", err, context.Cause(ctx))
	case rb != nil:
		return fmt.Errorf("%w: the connection was lost while the handler ran: %w (rollback: %w)", ErrUnavailable, err, rb)
	case s.driver.Classify(cause) == ClassRetry && s.driver.Classify(err) == ClassOther:
		return fmt.Errorf("%w (its transaction was aborted: %w)", err, cause)
	}
	return err
}

func (s *txStore[Tx]) explain(tx Tx) error {
	if s.explainer == nil {
		return nil
	}
	return s.explainer.Explain(tx)
}

func isContextError(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// commit commits. What the server refuses is the handler's: a deferred
// constraint speaks up only now.
func (s *txStore[Tx]) commit(ctx context.Context, tx Tx, c Claim, reply []byte) error {
	return s.committed(ctx, func(ctx context.Context) error { return s.driver.Commit(ctx, tx, c, reply) })
}

func (s *txStore[Tx]) committed(ctx context.Context, commit func(context.Context) error) error {
	ctx, cancel := s.detach(ctx)
	defer cancel()
	err := commit(ctx)
	switch {
	case err == nil:
		return nil
	case isKnown(err), errors.As(err, new(*Taken)):
		return err
	case s.driver.Classify(err) == ClassUnavailable:
		return fmt.Errorf("%w: commit: %w", ErrUnavailable, err)
	}
	return fmt.Errorf("dedupe: commit: %w", err)
}

func (s *txStore[Tx]) rollback(ctx context.Context, tx Tx) error {
	ctx, cancel := s.detach(ctx)
	defer cancel()
	return s.driver.Rollback(ctx, tx)
}

// detach bounds what must be finished although ctx may be done already.
func (s *txStore[Tx]) detach(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), s.commitTimeout)
}

// isKnown reports whether a driver has put its error into one of the classes
// that callers act on.
func isKnown(err error) bool {
	for _, known := range [...]error{ErrInProgress, ErrUnknownOutcome, ErrScope, ErrUnavailable, ErrBusy, ErrInvalidKey, ErrInvalidClaim} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

// storeFault judges an error of the store's own statements. No handler has
// run, so whatever it is (a missing table, a password that was changed), no
// message is to blame: it is an outage, unless another run may go better, or
// the caller has lost interest.
func (s *txStore[Tx]) storeFault(ctx context.Context, op string, err error) error {
	switch {
	case isKnown(err):
		return err
	case s.driver.Classify(err) == ClassRetry, errors.Is(ctx.Err(), context.Canceled):
		return fmt.Errorf("dedupe: %s: %w", op, err)
	}
	return fmt.Errorf("%w: %s: %w", ErrUnavailable, op, err)
}

// Normal returns c as stores keep it: with its defaults, and with the identity
// in the fingerprint. The error matches ErrInvalidKey or ErrInvalidClaim. It is
// for those who build a store of their own; applying it twice changes nothing.
func (c Claim) Normal() (Claim, error) {
	if err := c.Key.Validate(); err != nil {
		return c, err
	}
	if c.Retain < 0 {
		return c, fmt.Errorf("%w: Retain is %v, it must be positive", ErrInvalidClaim, c.Retain)
	}
	if c.Retain == 0 {
		c.Retain = DefaultRetain
	}
	c.Retain = max(c.Retain, LeastLifetime)
	c.Fingerprint = c.Key.seal(c.Fingerprint)
	return c, nil
}

// sleep waits for d or returns ctx's error.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
