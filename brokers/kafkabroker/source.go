package kafkabroker

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"

	"github.com/segmentio/kafka-go"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/internal/fair"
	"github.com/unecho/unecho/brokers/internal/receive"
)

// Source consumes topics as a member of a consumer group, or a fixed list of
// partitions. It implements brokers.Source, brokers.Sharer, brokers.Stalling and
// brokers.Retaining. The lane of a delivery is its partition.
type Source struct {
	c         Config
	addr      net.Addr
	transport *kafka.Transport
	conns     connections

	stop context.CancelFunc // ends the loop
	loop chan struct{}      // closed when it has ended

	mu      sync.Mutex
	gen     *generation       // nil between generations
	share   int               // of unsettled deliveries over all partitions; 0 is no bound
	turn    int               // the partition that is looked at first, for fairness
	changed chan struct{}     // closed and replaced when there may be something to receive
	waiting bool              // somebody may wait for changed
	fatal   error             // why the source cannot go on
	told    map[string]string // by topic, the trouble with it that was told of last
	closed  bool
}

// NewSource joins the consumer group, in the background, and returns. A broker
// that cannot be reached is not an error: Receive waits for it. An error means
// that the configuration makes no sense.
func NewSource(c Config) (*Source, error) {
	c, err := c.normal()
	if err != nil {
		return nil, err
	}
	s := &Source{c: c, addr: kafka.TCP(c.Brokers...), loop: make(chan struct{}), changed: make(chan struct{})}
	s.transport = s.conns.transport(c.ClientID, c.TLS, c.SASL, c.named()...)
	if c.Partitions == nil {
		group := s.group(slices.Concat(c.Topics, []string{anyTopic}))
		if err := group.Validate(); err != nil {
			return nil, fmt.Errorf("kafkabroker: %w", err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.stop = cancel
	go func() {
		defer close(s.loop)
		s.consume(ctx)
	}()
	return s, nil
}

// Receive implements brokers.Source. It takes turns between the partitions.
func (s *Source) Receive(ctx context.Context) (*brokers.Delivery, error) {
	return receive.Loop(ctx, s.take)
}

// take returns a delivery, or a channel that closes when it is worth another try.
func (s *Source) take() (*brokers.Delivery, <-chan struct{}, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return nil, nil, brokers.ErrClosed
	case s.fatal != nil:
		return nil, nil, s.fatal
	case s.gen != nil && !s.gen.draining:
		if d := s.next(s.gen.parts); d != nil {
			return d, nil, nil
		}
	}
	s.waiting = true
	return nil, s.changed, nil
}

// next takes a delivery from the first partition that has one and may hand it out,
// beginning behind the one that was the last to do so.
func (s *Source) next(parts []*partition) *brokers.Delivery {
	n, at := len(parts), s.turn
	for range n {
		if at >= n {
			at = 0
		}
		p := parts[at]
		at++
		if len(p.buffer) > 0 && p.room() {
			s.turn = at
			return p.hand()
		}
	}
	return nil
}

// wake lets Receive look again. s.mu is held.
func (s *Source) wake() {
	if s.waiting {
		s.waiting = false
		close(s.changed)
		s.changed = make(chan struct{})
	}
}

// Share implements brokers.Sharer. It is divided among the partitions, and
// what is fetched and not delivered is not counted: Config.WindowBytes bounds that.
// With more partitions than unsettled, those that come first have it all.
func (s *Source) Share(unsettled int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.share = unsettled
	if s.gen != nil {
		s.gen.number = fair.New(unsettled, len(s.gen.parts))
	}
}

// handle is the adapter's part of a delivery.
type handle struct {
	p *partition
	e *entry
}

// Ack implements brokers.Source. The offset is committed within the commit
// interval; until then a crash brings the message back.
func (s *Source) Ack(_ context.Context, d *brokers.Delivery) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, err := s.live(d)
	if err != nil {
		return err
	}
	h.p.settle(h.e)
	s.wake()
	return nil
}

// Return implements brokers.Source. Kafka cannot take one message back: the
// partition is read again from it on, and the deliveries behind it are lost.
func (s *Source) Return(_ context.Context, d *brokers.Delivery) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, err := s.live(d)
	if err != nil {
		return err
	}
	if h.p.gen.draining {
		h.p.track.giveUp(h.e) // the next owner reads on from here
		h.p.gen.progress()
		return nil
	}
	h.p.rewind(h.e)
	s.wake()
	return nil
}

// live returns the handle of a delivery of this generation that is not
// settled. s.mu is held.
func (s *Source) live(d *brokers.Delivery) (handle, error) {
	h, ok := d.Handle.(handle)
	if !ok || s.closed || s.gen == nil || h.p.gen != s.gen || h.e.settled != running {
		return handle{}, brokers.ErrLost
	}
	return h, nil
}

// Stuck implements brokers.Stalling: it returns the partitions whose window is full,
// and those that have waited for one message longer than Config.StuckAfter.
func (s *Source) Stuck() []brokers.Stuck {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []brokers.Stuck
	if s.gen == nil {
		return nil
	}
	for _, p := range s.gen.parts {
		if st, ok := p.stuck(); ok {
			out = append(out, st)
		}
	}
	return out
}

// Close implements brokers.Source. What was acknowledged is committed, and the
// group is left, so that its partitions go to others at once. It takes as long
// as the coordinator takes to answer, at most some 15 s.
func (s *Source) Close() error {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	s.wake()
	if s.gen != nil {
		s.gen.progress() // a drain that waits need not any more
	}
	s.mu.Unlock()
	s.stop()
	<-s.loop
	if first {
		s.transport.CloseIdleConnections()
		s.conns.close()
	}
	return nil
}

func (s *Source) failed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fatal != nil
}

func (s *Source) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fatal == nil {
		s.fatal = err
	}
	s.wake()
}
