package outbox

import (
	"context"
	"errors"
	"time"

	"github.com/unecho/unecho/envelope"
)

// Appender is what a [Writer] needs of a database: it adds rows to the outbox
// in a transaction that belongs to the caller.
type Appender[Tx any] interface {
	// Append adds msgs in order, in tx, and leaves tx open. The rows stand or
	// fall with tx. An error of the database leaves tx to the caller.
	Append(ctx context.Context, tx Tx, msgs []*envelope.Message) error
}

// Row is one message in the outbox.
type Row struct {
	// ID is the row's place in the order of the outbox.
	ID int64
	// Message is what to publish, never nil.
	Message *envelope.Message
	// Attempts counts the publishes of this row that the broker refused.
	// Outages are not counted.
	Attempts int
	// Blocked: an earlier row of the same topic and key is held and is not
	// among the rows in front of this one, so it must not be published now.
	// It is to be settled as Hold.
	Blocked bool
	// Err, if not nil, says why what is stored is not a whole message: somebody
	// else has written it, or a newer program. Message has the topic and the
	// key. The row must not be published and is to be parked.
	Err error
	// Handle is the store's own.
	Handle any
}

// Lease is the right to publish. Only one relay holds it, and its Epoch rises
// with every new holder.
type Lease struct {
	Owner string
	Epoch int64
	// For is how long the lease lasts from the moment the store answered, by
	// the store's clock.
	For time.Duration
}

// Action says what became of a row.
type Action int

const (
	// Sent: the broker has acknowledged the row.
	Sent Action = iota + 1
	// Hold: the row cannot go now. It moves aside, with its place in the
	// order of its key, and blocks the later rows of that key; it becomes due
	// again after the settlement's After. A row without a key blocks nothing.
	Hold
	// Park: the row will not go until somebody has looked at it. It moves
	// aside as for Hold, and is never due by itself.
	Park
	// Skip parks the row, and lets the later rows of its key pass it.
	Skip
)

// Settlement is what became of one row.
type Settlement struct {
	Row    Row
	Action Action
	// Counted: the broker refused this message, so it is an attempt.
	Counted bool
	// After is how long a held row waits, by the store's clock. 0 is at once.
	After time.Duration
	// Reason says why, for people; at most 1 KiB of it is kept. It never
	// holds a payload.
	Reason string
}

// Store is the relay's side of an outbox. Every method that takes a lease and
// writes checks its epoch in the database, in the statement that writes, and
// answers ErrFenced if another relay has taken over. A Store value belongs to
// one relay, whose calls do not overlap but for Renew; it may keep state between them, and
// must drop it when the epoch differs from the last one it saw.
// outboxtest.Run shows that a store is right.
type Store interface {
	// Acquire takes the lease if it is free or has run out, by the store's
	// clock. ErrHeld if another owner has it. The epoch of a new lease is
	// greater than that of every earlier one.
	Acquire(ctx context.Context, owner string, d time.Duration) (Lease, error)
	// Renew makes l last for l.For from now. It is the one call that may
	// overlap with another, a Read.
	Renew(ctx context.Context, l Lease) error
	// Read returns up to limit rows that are not settled yet, those that were
	// held and are due first, then the others, in the order of their IDs
	// within a topic and key. It returns the same rows again until they are
	// settled. Held rows take no more than half of limit while there are
	// others to fill the rest, so those that become due again and again starve
	// nobody. Large rows make fewer: no more than 20 MiB are returned at once.
	// Every committed row is returned at some time, however late its
	// transaction ended; no row of a rolled-back transaction ever is.
	Read(ctx context.Context, l Lease, limit int) ([]Row, error)
	// Settle records what became of all the rows of the last Read, in their
	// order, in one transaction, and renews l. An error means that nothing is
	// settled, or that the answer was lost: read again in both cases, so a
	// row may be published again.
	Settle(ctx context.Context, l Lease, ss []Settlement) error
	// Release gives the lease up, so that another relay need not wait for its
	// end. Releasing a lease that is not held any more is no error.
	Release(ctx context.Context, l Lease) error
}

// Pruner is an optional power of a [Store]: rows that were sent are kept for
// a while, so that they can be published again for a broker that lost what it
// had acknowledged, and deleted then.
type Pruner interface {
	// Prune deletes up to limit rows that are settled and were written longer
	// than age ago by the store's clock, and returns how many it deleted. It
	// may delete fewer than there are, and is called again.
	Prune(ctx context.Context, age time.Duration, limit int) (int, error)
}

// Parked is a row that waits for somebody to look at it.
type Parked struct {
	ID       int64
	Topic    string
	Type     string
	Attempts int
	Reason   string
	Size     int // of the body, in bytes
}

// Parker is an optional power of a [Store]: what operators do with rows that
// are parked. It needs no lease.
type Parker interface {
	// Parked returns up to limit parked rows with an id greater than after,
	// in the order of their ids.
	Parked(ctx context.Context, after int64, limit int) ([]Parked, error)
	// Requeue makes a parked row due again with no attempts spent, in its
	// place in the order of its key. It reports whether id is a parked row.
	Requeue(ctx context.Context, id int64) (bool, error)
	// Drop deletes a parked row, so that the rows behind it can go. It
	// reports whether id is a parked row.
	Drop(ctx context.Context, id int64) (bool, error)
}

var (
	// ErrHeld: another relay holds the lease. Stand by.
	ErrHeld = errors.New("outbox: the lease is held by another relay")
	// ErrFenced: the lease is not ours any more. Nothing was recorded; stop
	// publishing and acquire anew.
	ErrFenced = errors.New("outbox: the lease is lost")
	// ErrInvalidMessage: the message cannot be put into an outbox. Nothing
	// was written, and the transaction is as it was.
	ErrInvalidMessage = errors.New("outbox: invalid message")
)
