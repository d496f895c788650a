package natsbroker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/internal/receive"
)

// Config are the settings of [NewSource]. Stream and Durable are mandatory,
// the zero value of everything else is the default.
type Config struct {
	// Stream is the stream to consume.
	Stream string
	// Durable is the name of the consumer, which is what a consumer group is
	// on Kafka. It is created when it is missing. One that was created by a
	// Source is brought to these settings when they differ: a mark in its
	// metadata tells. One that others made is used if its AckWait,
	// MaxAckPending, MaxDeliver and filter are as they are asked for here.
	// Otherwise Receive ends with an error that matches ErrForeign, and
	// nothing is changed or received.
	Durable string
	// Update has a consumer that others made brought to these settings, its
	// filter included, and marks it as made here.
	Update bool
	// Subjects are the subjects of the stream to consume. Defaults to all.
	Subjects []string
	// Start is where the consumer begins, if it is created here; one that exists
	// stays where it is. Defaults to Oldest.
	Start Start
	// AckWait is after how long without a heartbeat the server delivers again.
	// Defaults to 30 s, the least is 100 ms.
	AckWait time.Duration
	// MaxInFlight bounds the deliveries in hand. Defaults to the number of
	// workers that Demand names, or 16.
	MaxInFlight int
	// MaxAckPending bounds the unsettled deliveries of the consumer over all
	// sources. With 1 the stream's order is kept, also when a consumer dies:
	// nothing is delivered behind a message that is not acknowledged.
	// Defaults to no bound.
	MaxAckPending int
	// ConfirmAck makes Ack wait until the server has taken note. Without it an
	// acknowledgement can get lost in a crash, and the message comes again, to
	// be recognised as a duplicate.
	ConfirmAck bool
	// FailIfDeleted ends Receive with an error that matches ErrDeleted when
	// somebody has deleted the consumer. By default it is created again; it
	// then begins with the oldest message, all of which is recognised as long
	// as the keys are kept.
	FailIfDeleted bool
	// OnError is told of errors that the source waits out. It must not block.
	// Defaults to none.
	OnError func(error)
}

// Start says where a consumer begins.
type Start int

const (
	// Oldest begins at the oldest message of the stream.
	Oldest Start = iota
	// Newest begins behind the newest message there is when the consumer is
	// created. The server keeps that, so a crash before the first message does not
	// move it.
	Newest
)

// ErrDeleted: the consumer was deleted on the server.
var ErrDeleted = errors.New("natsbroker: the consumer was deleted")

const (
	defaultAckWait     = 30 * time.Second
	leastAckWait       = 100 * time.Millisecond
	defaultMaxInFlight = 16
	pullExpiry         = 5 * time.Second
	pullHeartbeat      = time.Second
	requestTimeout     = 5 * time.Second
	lookTimeout        = time.Second
	closeTimeout       = 2 * time.Second
)

// Source consumes a stream by a durable pull consumer. It implements
// brokers.Source, brokers.Nacker and brokers.Demander.
type Source struct {
	nc *nats.Conn
	js jetstream.JetStream
	c  Config

	ctx  context.Context // ends with Close
	stop context.CancelFunc
	wg   sync.WaitGroup

	stale  atomic.Bool   // the consumer may not be as we want it any more
	ponged chan struct{} // has one whenever pong has moved on

	mu      sync.Mutex
	bound   int
	buffer  []*claim        // received and not handed out
	open    map[*claim]bool // received and not settled, buffer included
	changed chan struct{}   // closed and replaced whenever there may be something to do
	pong    time.Time       // when the latest ping that the server has answered was sent
	fatal   error
	closed  bool
	mute    bool // for tests: no heartbeats
}

// NewSource returns a source on nc, which stays the caller's; give it a
// connection that reconnects for ever, as [Connect] makes. The consumer is
// created in the background: a server that cannot be reached is not an error,
// Receive waits for it.
func NewSource(nc *nats.Conn, c Config) (*Source, error) {
	switch {
	case nc == nil:
		return nil, errors.New("natsbroker: NewSource: the connection is nil")
	case c.Stream == "" || c.Durable == "":
		return nil, errors.New("natsbroker: Config.Stream and Config.Durable must be set")
	}
	if c.AckWait <= 0 {
		c.AckWait = defaultAckWait
	}
	if c.AckWait < leastAckWait {
		return nil, fmt.Errorf("natsbroker: Config.AckWait is %v, the least is %v", c.AckWait, leastAckWait)
	}
	if c.MaxAckPending <= 0 {
		c.MaxAckPending = -1
	}
	if c.OnError == nil {
		c.OnError = func(error) {}
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("natsbroker: %w", err)
	}
	s := &Source{nc: nc, js: js, c: c, bound: c.MaxInFlight, open: make(map[*claim]bool), changed: make(chan struct{}),
		ponged: make(chan struct{}, 1)}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.wg.Go(s.pull)
	s.wg.Go(s.heartbeats)
	s.wg.Go(s.advisories)
	return s, nil
}

// Demand implements brokers.Demander.
func (s *Source) Demand(workers int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.c.MaxInFlight <= 0 {
		s.bound = workers
		s.wake()
	}
}

// Receive implements brokers.Source.
func (s *Source) Receive(ctx context.Context) (*brokers.Delivery, error) {
	return receive.Loop(ctx, s.take)
}

func (s *Source) take() (*brokers.Delivery, <-chan struct{}, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.closed && len(s.buffer) > 0 {
		c := s.buffer[0]
		s.buffer = s.buffer[1:]
		if s.open[c] && !s.expired(c, time.Now()) {
			return c.d, nil, nil
		}
		if s.open[c] {
			s.drop(c)
		}
	}
	switch {
	case s.closed:
		return nil, nil, brokers.ErrClosed
	case s.fatal != nil:
		return nil, nil, s.fatal
	}
	return nil, s.changed, nil
}

// wake lets Receive and the puller look again. s.mu is held.
func (s *Source) wake() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Ack implements brokers.Source. While the connection is away it is an error,
// and the message comes again: what the client would keep and send later could
// settle a delivery that another worker has by then.
func (s *Source) Ack(ctx context.Context, d *brokers.Delivery) error {
	return s.settle(d, "ack", func(m *nats.Msg) error {
		if !s.c.ConfirmAck {
			return m.Ack()
		}
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		return m.AckSync(nats.Context(ctx))
	})
}

// Nack implements brokers.Nacker.
func (s *Source) Nack(_ context.Context, d *brokers.Delivery, after time.Duration) error {
	return s.settle(d, "nack", func(m *nats.Msg) error { return m.NakWithDelay(max(after, minDelay)) })
}

// Return implements brokers.Source.
func (s *Source) Return(_ context.Context, d *brokers.Delivery) error {
	return s.settle(d, "return", func(m *nats.Msg) error { return m.NakWithDelay(minDelay) })
}

// minDelay is as good as none. A delay of zero would be a bare nak.
const minDelay = time.Millisecond

// settle takes d out of what is in hand and tells the server.
func (s *Source) settle(d *brokers.Delivery, what string, tell func(*nats.Msg) error) error {
	c, err := s.close(d)
	if err != nil {
		return err
	}
	if !s.reachable() {
		return fmt.Errorf("natsbroker: %s: not connected, the message comes again", what)
	}
	c.settle()
	if err := tell(c.msg); err != nil {
		return fmt.Errorf("natsbroker: %s: %w", what, err)
	}
	return nil
}

// reachable reports whether what is published now leaves now.
func (s *Source) reachable() bool { return s.nc.IsConnected() || s.nc.IsDraining() }

// close takes d out of what is in hand: ErrLost when it is not, or not any more.
func (s *Source) close(d *brokers.Delivery) (*claim, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, ok := d.Handle.(*claim)
	if !ok || s.closed || !s.open[c] {
		return nil, brokers.ErrLost
	}
	if s.expired(c, time.Now()) {
		s.drop(c)
		return nil, brokers.ErrLost
	}
	delete(s.open, c)
	s.wake()
	return c, nil
}

// Close implements brokers.Source. What is not settled is handed back, so that
// it need not wait for AckWait. It takes at most some 3 s, also without a server.
func (s *Source) Close() error {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.wake()
	s.mu.Unlock()
	s.stop()
	s.wg.Wait()
	if !first {
		return nil
	}
	s.handBack()
	// What was acknowledged is in the connection's buffer: see that it leaves.
	// If it does not, it comes again and is recognised.
	if s.reachable() {
		_ = s.nc.FlushTimeout(closeTimeout)
	}
	return nil
}

func (s *Source) handBack() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.open {
		if s.reachable() && !s.expired(c, time.Now()) {
			_ = c.msg.NakWithDelay(minDelay) // else it comes back after AckWait
		}
		close(c.lost)
	}
	clear(s.open)
	s.buffer = nil
}

func (s *Source) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fatal == nil {
		s.fatal = err
	}
	s.wake()
}
