package brokers

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/unecho/unecho/envelope"
)

// Delivery is one hand-over of a message by a broker. It must be settled
// exactly once: by Ack, by Nack where the source has it, or by Return.
// A delivery that is never settled comes back when the broker says so
// (end of the session on Kafka, end of AckWait on NATS).
type Delivery struct {
	// Message is the message as it was on the wire, never nil.
	Message *envelope.Message
	// Lane is the unit of order. Deliveries with an equal, non-empty Lane are
	// received in their order, and by default handled one after the other. They
	// may be settled in any order. Empty means that nothing is promised about
	// order.
	Lane string
	// Attempt counts the deliveries of this message as the broker does, from
	// 1; 0 when the broker does not count (Kafka). It includes deliveries
	// that ended with an outage or a crash, so it is no measure of poison.
	Attempt int
	// Stopping is closed when the source wants the delivery back unless it
	// has already been started: a delivery that still waits is to be
	// returned, one that runs may finish. Nil: that never happens.
	Stopping <-chan struct{}
	// Lost is closed when the claim on the delivery is gone and another
	// consumer may have it: the handler is to be cancelled, and Ack, Nack and
	// Return answer ErrLost. Nil: that never happens. The deliveries of a lane
	// share it, or theirs is closed from the last one to the first: what is
	// behind a lost one must not be handled before that comes again.
	Lost <-chan struct{}

	// Handle is the adapter's own.
	Handle any
}

// Source is what a consumer needs of a broker. All methods may be called
// concurrently, except that only one Receive runs at a time.
//
// A source bounds by itself how many deliveries are unsettled, and Receive
// waits while that bound is reached.
type Source interface {
	// Receive returns the next delivery. It waits for one until ctx is done
	// and returns ctx's error then. ErrClosed after Close. An outage of the
	// broker is waited out inside, with back-off, and not returned: an error
	// other than these means that the source cannot go on (bad credentials,
	// a topic that is gone and stays gone).
	Receive(ctx context.Context) (*Delivery, error)
	// Ack settles d as done. Nil means that the source has taken note, which
	// may be before the broker has: until the broker has, the message can
	// come back. ErrLost when the claim on d is gone; nothing was settled.
	Ack(ctx context.Context, d *Delivery) error
	// Return settles d as not done: it was not started, or its handling was
	// cut short through no fault of the message. It comes back, to this
	// consumer or to another, without delay where the broker can do that.
	// After Return of a delivery in a lane, the later ones of that lane
	// cannot be acknowledged any more in this session and come back as well.
	Return(ctx context.Context, d *Delivery) error
	// Close stops receiving, gives the broker what was acknowledged, and
	// leaves. It returns when all goroutines of the source have ended, within
	// the bound that the adapter documents. Unsettled deliveries come back.
	// A second Close returns nil.
	Close() error
}

// Nacker is an optional power of a [Source]: the broker itself waits before
// it delivers again.
type Nacker interface {
	// Nack settles d as failed. The broker delivers it again not before
	// after has passed.
	Nack(ctx context.Context, d *Delivery, after time.Duration) error
}

// Demander is an optional power of a [Source]: it is told how many deliveries
// will be worked on at once, so that it prefetches no more than that. Called
// at most once, before the first Receive. A bound set in the adapter's own
// configuration wins.
type Demander interface {
	Demand(workers int)
}

// Sharer is an optional power of a [Source] with lanes: it divides the deliveries
// that may be unsettled among its lanes, so that a lane whose deliveries are not
// settled holds its own share, and never all of them.
type Sharer interface {
	// Share tells how many deliveries may be unsettled over all lanes. Called at
	// most once, before the first Receive. A bound set in the adapter's own
	// configuration holds beside it.
	Share(unsettled int)
}

// Forever is a [Horizon] without an end.
const Forever = time.Duration(math.MaxInt64)

// Horizon is for how long a broker may deliver a message again.
type Horizon struct {
	// For counts from when the message was written; Forever if the broker's
	// settings set no end.
	For time.Duration
	// Why names the setting and where it was found, for people.
	Why string
}

// Retaining is an optional power of a [Source]: it knows for how long the broker
// keeps what it delivers, and so for how long it may deliver it again.
type Retaining interface {
	// Horizon asks the broker. An error that matches ErrUnavailable means that
	// it is out of reach; any other one that it does not tell.
	Horizon(ctx context.Context) (Horizon, error)
}

// Stuck is a message that keeps what is behind it from being acknowledged to the
// broker.
type Stuck struct {
	Topic     string
	Partition int
	// Offset is that of the lowest delivery that is not settled.
	Offset int64
	// Behind is how many deliveries were made behind it, settled or not. All of
	// them come again if the process ends now.
	Behind int
	// Since is since when Offset has been the lowest.
	Since time.Time
	// Full: nothing more of the partition is delivered before something of it
	// is settled. Otherwise it goes on behind the message.
	Full bool
}

// Stalling is an optional power of a [Source] that acknowledges in order.
type Stalling interface {
	// Stuck returns one message for each partition that waits for it: because as
	// much was delivered behind it as the source allows, or for longer than a
	// partition that is only busy would.
	Stuck() []Stuck
}

// Publisher hands messages to a broker. Its methods may be called concurrently.
type Publisher interface {
	// Publish publishes msgs and waits until each is known to be accepted,
	// refused or lost. The results are as many as msgs and positional: nil at
	// i means that the broker has positively acknowledged msgs[i]. Publish
	// keeps nothing of msgs after it returns, and modifies nothing.
	//
	// Order: messages with an equal Topic and a non-nil, equal Key are stored
	// in the order given. When one of them fails, no later one of them is
	// sent: it gets ErrBlocked.
	//
	// Publish returns within ctx, plus at most the bound that the adapter
	// documents; what had not been answered then is ErrUnknown, for it may
	// have been stored.
	//
	// Every non-nil result matches exactly one of ErrRejected, ErrNoRoute,
	// ErrUnavailable, ErrUnknown, ErrBlocked and ErrClosed.
	Publish(ctx context.Context, msgs []*envelope.Message) Results
	// Close waits for what is in flight, within the bound that the adapter
	// documents, and releases the connection if the publisher owns it.
	// Publish answers ErrClosed afterwards. A second Close returns nil.
	Close() error
}

// Prober is an optional power of a [Publisher]: it can ask the broker how it is.
type Prober interface {
	// Probe asks the broker for a word of its own, that is about no topic. Nil means
	// that it serves: an outage that a publish met is then one of the topic or
	// partition. Otherwise the error matches ErrUnavailable. It returns within ctx,
	// and stores nothing.
	Probe(ctx context.Context) error
}

// Router is an optional power of a [Publisher]: it knows which messages go to the
// same part of the broker, and so fare alike when that part does not serve.
type Router interface {
	// Destination names where m goes, for people too: its topic, or that and a
	// partition. It does not wait, so it may say less than it would know later, and
	// modifies nothing.
	Destination(m *envelope.Message) string
}

// Results are the positional answers of [Publisher.Publish].
type Results []error

// Err returns the first non-nil result, or nil.
func (r Results) Err() error {
	for _, err := range r {
		if err != nil {
			return err
		}
	}
	return nil
}

// Fill returns n results that are all err.
func Fill(n int, err error) Results {
	r := make(Results, n)
	for i := range r {
		r[i] = err
	}
	return r
}

var (
	// ErrClosed: the source or publisher was closed by its owner.
	ErrClosed = errors.New("brokers: closed")
	// ErrLost: the claim on this delivery is gone (the partition went to
	// another member, AckWait passed), so it was not settled. It will be, or
	// was, delivered again. Nothing is to be done about it.
	ErrLost = errors.New("brokers: the delivery is no longer ours")
	// ErrRejected: the broker, or the adapter on its behalf, will never
	// accept this message: it is too large, its subject is not valid, it is
	// not authorised. Nothing was stored. Park it.
	ErrRejected = errors.New("brokers: the message was rejected")
	// ErrTooLarge matches ErrRejected: the message is larger than the topic or
	// the server allows. A smaller form of it may be taken.
	ErrTooLarge = fmt.Errorf("%w: it is too large", ErrRejected)
	// ErrNoRoute: the topic or stream does not exist, or not yet. Nothing was
	// stored. Other topics are not concerned; try again later.
	ErrNoRoute = errors.New("brokers: no such topic or stream")
	// ErrUnavailable: the broker cannot be reached or does not serve. Nothing
	// was stored. It is an outage, and no message is to blame.
	ErrUnavailable = errors.New("brokers: the broker is unavailable")
	// ErrUnknown: the message was sent and the answer was lost. It may have
	// been stored. Publish it again, under the same identity.
	ErrUnknown = errors.New("brokers: the outcome of the publish is unknown")
	// ErrBlocked: an earlier message of the same topic and key failed in the
	// same call, so this one was not sent.
	ErrBlocked = errors.New("brokers: not sent, an earlier message of the same key failed")
)
