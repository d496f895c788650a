package consumer

import (
	"context"
	"crypto/sha256"
	"errors"
	"time"

	"github.com/unecho/unecho/envelope"
)

// Defer makes messages that fail wait outside of the log: the zero value does
// not.
//
// A message that was tried After times without success is put into Place,
// durably, and acknowledged. It comes back from there when it is due, to this
// consumer or to another member, with all that a delivery gets: its attempts go on
// to be counted, and it ends with the dead letters when they are spent. With
// OrderByKey the messages of its key that come later join behind it; others pass.
//
// It is for runs that need not keep the order of a whole lane, and not for
// handlers by positions, whose position would pass the message. The handler
// should be one of [Wrap]: a crash between Place and the acknowledgement brings a
// message twice. One that has waited for longer than the handler keeps its keys
// goes to the dead letters, for nobody can tell any more whether it was done.
type Defer struct {
	// Place is where messages wait, such as that of pgparking.NewDeferPlace.
	Place DeferPlace
	// Consumer is the logical consumer: two that share a place have their messages
	// apart. Mandatory with a Place.
	Consumer string
	// After is how many tries a message has before. Defaults to 3.
	After int
	// Workers is how many messages from Place are in hand at once. They share
	// Concurrency with the others. Defaults to a quarter of it.
	Workers int
	// Poll is how long the place is not asked when it had nothing that is due.
	// Defaults to 500 ms.
	Poll time.Duration
}

// Deferred is a message in a [DeferPlace].
type Deferred struct {
	// ID is the same for all deliveries of one message from one position to one
	// consumer: 32 hexadecimal digits.
	ID string
	// Consumer is that of Defer. Lane is that of the delivery; empty if it had
	// none.
	Consumer, Lane string
	// Key, with Consumer and Lane, names the queue of the message: what is in one
	// queue is handled one after the other, in the order in which it was put there.
	// Nil: the message is in a queue of its own.
	Key []byte
	// Message is the message as it was on the wire, with Topic, Position, Key, Body,
	// Time and Header, nil and empty told apart. In what List returns it has a
	// Topic and a Position only.
	Message *envelope.Message
	// Class, Error and Attempts are what is known of its tries. Error is the text
	// of the last error, as that of a Parked. Empty for a message that has only
	// joined.
	Class    Class
	Error    string
	Attempts int

	// DeferredAt is when it was put there first, DueAt when it may be taken: by the
	// place's clock. Age is how long ago DeferredAt was when it was read, by that
	// clock alone. Put does not look at them.
	DeferredAt, DueAt time.Time
	Age               time.Duration
	// Token is that of the lease under which it was taken.
	Token int64
}

// QueueID names the queue of one key, within its consumer and lane.
type QueueID [16]byte

// QueueOf returns the name of the queue of a key: the beginning of its SHA-256.
func QueueOf(key []byte) QueueID {
	sum := sha256.Sum256(key)
	return QueueID(sum[:16])
}

// ErrDeferLost: the lease on a deferred message is gone. Another member may have
// the message, or nobody has it any more; nothing was changed.
var ErrDeferLost = errors.New("consumer: the lease on the deferred message is gone")

// DeferPlace keeps messages that wait to be tried again. It is safe for
// concurrent use, by any number of processes. An outage is an error that matches
// dedupe.ErrUnavailable or brokers.ErrUnavailable; if the answer to a change was
// lost, the error matches dedupe.ErrUnknownOutcome: it was made, or was not.
//
// defertest.Run shows that a place is right.
type DeferPlace interface {
	// Put stores d at the end of its queue, and reports true only when that is
	// durable. It is due after that time, and not before what is in front of it in
	// its queue is gone. With join it is stored only if there is something in its
	// queue, in one step with that question, and false says that there was
	// nothing: d has to be handled now. A message with d.ID that is there already
	// stays as it is, in its place, and the answer is true. d stays the caller's.
	Put(ctx context.Context, d *Deferred, after time.Duration, join bool) (bool, error)
	// Queues returns the queues of a lane that have something: those of messages
	// with a key.
	Queues(ctx context.Context, consumer, lane string) ([]QueueID, error)
	// Take returns up to n messages of a consumer that are due and at the head of
	// their queues, those that are due for the longest time first. Each is leased
	// for that time by the place's clock: nobody else gets it meanwhile. Its
	// Token rises with every lease on it.
	Take(ctx context.Context, consumer string, n int, lease time.Duration) ([]*Deferred, error)
	// Extend makes the lease on d last for that time from now. The error matches
	// ErrDeferLost if d was taken by another one since, or is gone.
	Extend(ctx context.Context, d *Deferred, lease time.Duration) error
	// Return ends the lease. d stays at the head of its queue and is due after
	// that time, with its Class, Error and Attempts. ErrDeferLost as for Extend.
	Return(ctx context.Context, d *Deferred, after time.Duration) error
	// Remove takes d out of the place. Of several calls for one message with a
	// token that is its last, one has removed it, and the others answer nil as well.
	// ErrDeferLost if d was taken by another one since.
	Remove(ctx context.Context, d *Deferred) error
	// List returns up to limit messages of a consumer, or of all if it is empty,
	// the oldest first, without payloads, and how many there are in all.
	List(ctx context.Context, consumer string, limit int) ([]*Deferred, int, error)
}
