package dedupe

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Claim is what a delivery asks for: the right to run a handler for Key.
type Claim struct {
	Key Key
	// Fingerprint is a digest of what the event says. The same key with
	// another fingerprint is a [Conflict].
	Fingerprint [32]byte
	// Fields, if there are any, are what [JSONFields] made of the content. They
	// are kept with the key, so that a conflict can say which fields differ.
	Fields []byte
	// Retain is how long the key is kept at least once it is done, by the
	// store's clock, counted from the beginning of the transaction that did
	// it; a store that is pruned keeps it until then. It must outlast every
	// redelivery the broker can still make.
	// Defaults to DefaultRetain. Negative is an error that matches ErrInvalidClaim.
	Retain time.Duration
}

// DefaultRetain is how long a key is kept when a claim does not say: a week
// is the default retention of a Kafka topic.
const DefaultRetain = 7*24*time.Hour + 12*time.Hour

// Outcome is how a claim ended. In progress is not among them: it is an
// error, [ErrInProgress], because a delivery that met it must not be
// acknowledged, while one that met any Outcome must be.
type Outcome int

const (
	// Processed: the handler ran, and its effect and the key are committed.
	Processed Outcome = iota + 1
	// Duplicate: the key was done before. The handler did not run.
	Duplicate
	// Conflict: the key was claimed before with another fingerprint. The
	// handler did not run, the first result is intact, and the conflict is
	// recorded: see ConflictRecord.
	Conflict
)

// String returns the lower-case name of the outcome.
func (o Outcome) String() string {
	switch o {
	case Processed:
		return "processed"
	case Duplicate:
		return "duplicate"
	case Conflict:
		return "conflict"
	}
	return fmt.Sprintf("outcome(%d)", int(o))
}

// Result is the answer to a claim.
type Result struct {
	Outcome Outcome
	// Reply is what the handler returned, now or, for a Duplicate, when it
	// ran: byte for byte, nil if it returned nil. Nil for a Conflict. The
	// slice is the caller's.
	Reply []byte
}

// Store runs a function at most once for each key. S is the scope that the
// function works in, and says what holds it and the key together: a pgx.Tx
// or *sql.Tx commits both or neither.
//
// A Store is safe for concurrent use.
type Store[S any] interface {
	// Once claims c.Key and, if it is new, runs fn in a scope of its own and
	// makes fn's effect, the key and the reply durable together.
	//
	// A nil error comes with a Result whose Outcome is set; the delivery may
	// be acknowledged. On any error it must not be:
	//
	//   - ErrInProgress: another holder of the key is at work, or its outcome
	//     did not become known within the store's wait. Come back later.
	//   - ErrUnknownOutcome: the commit was sent and its answer was lost. The
	//     effect and the key are there both, or neither. Claim again.
	//   - ErrUnavailable: the store could not be reached, was shutting down
	//     or is not set up, before, after or while fn ran. Nothing is
	//     committed.
	//   - ErrBusy: no connection of the pool was free in time. Nothing is
	//     committed.
	//   - ErrContention: the transaction lost against others as often as it
	//     was run. Nothing is committed.
	//   - ErrScope: fn left its transaction aborted, ended it, or kept it
	//     busy. Nothing is committed, but for what fn has committed itself
	//     behind the store's back.
	//   - ErrInvalidKey, ErrInvalidClaim: the claim cannot be stored, ever.
	//   - ErrReplyTooLarge: fn's reply is over the cap of the store. Nothing is
	//     committed.
	//   - ctx's error, if ctx was done before fn ran; nothing is committed.
	//   - what fn returned, wrapped or not; nothing is committed.
	//
	// When fn has returned nil the commit goes on although ctx is done.
	//
	// Once may run fn again after a serialization failure or a deadlock, a
	// bounded number of times; each run has a scope of its own, and no effect
	// of an earlier run is left. If fn panics the scope is rolled back and
	// the panic goes on. fn must not keep the scope after it returns.
	Once(ctx context.Context, c Claim, fn func(ctx context.Context, scope S) (reply []byte, err error)) (Result, error)
}

// Prober is an optional power of a [Store]: it can be asked how it is.
type Prober interface {
	// Probe claims a key of its own, as Once does, and undoes that. Nil means
	// that the store serves, so that an error of another claim is about that
	// claim; otherwise the error is what Once would have returned. It leaves
	// nothing behind, and takes no longer than a claim.
	Probe(ctx context.Context) error
}

// Bounded is an optional power of a [Store]: it has a pool of connections.
type Bounded interface {
	// MaxConcurrent is how many calls of Once can be at work at once, which is
	// the size of the pool; 0 is no bound.
	MaxConcurrent() int
}

var (
	// ErrInProgress: somebody else holds the key and has not finished. The
	// delivery must neither be acknowledged nor be counted as failed.
	ErrInProgress = errors.New("dedupe: the key is in progress elsewhere")
	// ErrUnknownOutcome: the answer to a commit was lost. Whether it happened
	// shows when the key is claimed again: a Duplicate, or a fresh run.
	ErrUnknownOutcome = errors.New("dedupe: the outcome of the commit is unknown")
	// ErrUnavailable: the store is out of reach, or its tables are missing. No
	// message is to blame.
	ErrUnavailable = errors.New("dedupe: the store is unavailable")
	// ErrBusy: every connection of the pool was in use for as long as the store
	// waits. It is back-pressure and no outage; come back later.
	ErrBusy = errors.New("dedupe: no connection of the pool was free in time")
	// ErrContention: the transaction met serialization failures, deadlocks or
	// lock time-outs in every one of its runs. No message is to blame; come
	// back later.
	ErrContention = errors.New("dedupe: the transaction lost against others")
	// ErrScope: the handler swallowed an SQL error, ended the transaction that
	// it was lent, or left a query in it unread. Mend the handler.
	ErrScope = errors.New("dedupe: the handler left its transaction unusable")
	// ErrInvalidKey: the key has an empty or over-long part, or bytes that
	// no key may have.
	ErrInvalidKey = errors.New("dedupe: invalid key")
	// ErrInvalidClaim: the claim asks for something impossible.
	ErrInvalidClaim = errors.New("dedupe: invalid claim")
	// ErrReplyTooLarge: the handler's reply is longer than the store keeps, and
	// no reply is ever kept in part. Let the handler store it where large
	// things are stored, and reply with a reference to it.
	ErrReplyTooLarge = errors.New("dedupe: the reply is too large")
)

// DefaultMaxReply is the greatest reply that a store keeps by default, in bytes.
const DefaultMaxReply = 64 << 10

// CheckReply returns an error that matches ErrReplyTooLarge if a reply is longer
// than most bytes; 0 means DefaultMaxReply, and negative no limit.
func CheckReply(reply []byte, most int) error {
	if most == 0 {
		most = DefaultMaxReply
	}
	if most > 0 && len(reply) > most {
		return fmt.Errorf("%w: %d bytes, %d are kept; reply with a reference, or raise MaxReply", ErrReplyTooLarge, len(reply), most)
	}
	return nil
}
