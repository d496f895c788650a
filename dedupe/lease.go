package dedupe

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Lease is the scope of a handler whose effect is outside the store: the right
// to handle one event for a while, which is extended as long as the handler
// runs. The event is never lost and never handled by two live owners at once.
// Its effect is repeated only if the owner dies, or loses the lease, after the
// effect and before the completion: the handler then sees Unknown, and can hand
// the same derived key to the outside system again.
type Lease struct {
	// Key is the event's.
	Key Key
	// Token is the fencing token: it rises with every owner of the key. An
	// outside system that keeps the highest token it has seen, and refuses
	// lower ones, cannot be written to by an owner that has lost the lease.
	Token int64
	// Attempt counts the times that handling has begun, from 1.
	Attempt int
	// Unknown: an earlier owner has vanished, and may have brought the effect
	// about.
	Unknown bool
}

// Derive returns the idempotency key of an operation of the handler. It is the
// same at every attempt. See the function [Derive].
func (l *Lease) Derive(operation string, ordinal int) string {
	return Derive(l.Key, operation, ordinal)
}

// Grant is the answer of a [LeaseDriver] to a claim that was granted.
type Grant struct {
	Token   int64
	Attempt int
	// Unknown: the lease of an earlier owner ran out, and nobody has said
	// since what came of it.
	Unknown bool
}

// LeaseDriver is what a store of leases has to provide; [NewLeaseStore] makes
// a [Store] of it. Orders to whoever implements one:
//
//   - Every method decides and writes in one atomic step, by the store's clock.
//   - A lease, or a retention, of less than [LeastLifetime] is refused by
//     [CheckLifetimes]; more precise than that no store has to be.
//   - owner is a random name of one claim. An Acquire whose answer was lost is
//     sent again with the same owner, and must find its own claim, not another's.
//   - Tokens rise for each key, whatever the store forgets.
//   - An owner whose lease has run out still owns the key until another claim
//     has taken it over: extending and completing late, but unstolen, succeeds.
//   - Errors that match ErrLeaseLost are verdicts. Any other error leaves it
//     open whether the step was done.
//   - All methods may be called concurrently. Keep no argument.
//
// storetest.RunLease shows that a driver is right.
type LeaseDriver interface {
	// Acquire claims c.Key for d. It returns a grant; or the record of a key
	// that is done; or an error that matches ErrInProgress, if another owner's
	// lease has not run out, and is a *HeldError; or ErrParked.
	//
	// A key that is claimed, unknown or parked with another fingerprint is not
	// granted: what came of the first content must be known before another
	// one runs. Its record is returned, as if it were done.
	Acquire(ctx context.Context, c Claim, owner string, d time.Duration) (Grant, *Record, error)
	// Extend makes the lease last for d from now.
	Extend(ctx context.Context, k Key, owner string, token int64, d time.Duration) error
	// Complete marks the key done, with reply and the fingerprint that was
	// claimed, and keeps it for c.Retain. The same call again is no error.
	Complete(ctx context.Context, c Claim, owner string, token int64, reply []byte) error
	// Release gives the key up: StateFree if its effect was not brought about,
	// StateUnknown if it may have been, StateParked to hold it for a person.
	// The next claim of a key that is not parked is granted at once.
	Release(ctx context.Context, k Key, owner string, token int64, to State) error
	// Conflict keeps a record of a claim that met its key with another
	// fingerprint: one for each key and fingerprint.
	Conflict(ctx context.Context, r ConflictRecord) error
}

// LeastLifetime is the least that a lease or a retention may be at a driver.
const LeastLifetime = time.Millisecond

// CheckLifetimes returns an error that matches ErrInvalidClaim if one of the
// lifetimes that a driver was given is below [LeastLifetime]. Redis takes zero
// for no lifetime at all, or for the end of it; nobody means either.
func CheckLifetimes(lifetimes ...time.Duration) error {
	for _, d := range lifetimes {
		if d < LeastLifetime {
			return fmt.Errorf("%w: a lifetime of %v, the least is %v", ErrInvalidClaim, d, LeastLifetime)
		}
	}
	return nil
}

// ErrLeaseLost: the lease is not ours any more: it ran out, and another owner
// has taken the key over, or it could not be extended in time. What the handler
// did after that moment was not ours to do. The delivery must not be
// acknowledged; it comes again and meets the new owner, or its result.
var ErrLeaseLost = errors.New("dedupe: the lease is lost")

// HeldError is an [ErrInProgress] that knows for how long another owner's lease
// goes on, unless it is extended, or given up before.
type HeldError struct {
	Left time.Duration // by the store's clock when it answered; not negative
}

// Error says for how long.
func (e *HeldError) Error() string {
	return fmt.Sprintf("%v, under a lease of another %v", ErrInProgress, e.Left.Round(time.Millisecond))
}

// Unwrap returns ErrInProgress.
func (*HeldError) Unwrap() error { return ErrInProgress }

// ErrParked: an earlier owner of the key has vanished, and the policy is to let
// a person find out what came of it, by [Admin]. Park the delivery; claiming
// again changes nothing until the key is released or forgotten.
var ErrParked = errors.New("dedupe: what came of an earlier attempt is not known, and the key is parked")

// UnknownPolicy says what becomes of a key whose owner has vanished.
type UnknownPolicy int

const (
	// Rerun runs the handler, which sees Lease.Unknown and derives the same
	// keys. It is the default.
	Rerun UnknownPolicy = iota
	// Park runs nothing, and answers ErrParked until a person has decided.
	Park
)

// Verdict is the answer of a [Resolver].
type Verdict int

const (
	// NotDone: the effect has not been brought about. The handler runs.
	NotDone Verdict = iota + 1
	// Done: it has. The key is marked done with the resolver's reply, and the
	// handler does not run.
	Done
	// AskLater: it cannot be told yet. The delivery comes back later.
	AskLater
)

// Resolver is asked about a lease whose earlier owner has vanished: did it
// happen? It may ask the outside system by the key that the handler derives.
// An error means AskLater.
type Resolver func(ctx context.Context, l *Lease) (v Verdict, reply []byte, err error)
