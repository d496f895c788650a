package membroker

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"sync"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

// Broker is a broker in memory. It is safe for concurrent use.
type Broker struct {
	mu      sync.Mutex
	topics  map[string]*topic
	groups  map[groupKey]*group
	changed chan struct{} // closed and replaced whenever there may be something to receive
	faults  Faults
}

type topic struct{ partitions []*log }

// log is one partition.
type log struct{ records []*envelope.Message }

type groupKey struct{ topic, group string }

// Faults are what the broker does wrong on purpose. A nil function does
// nothing. They are called under the broker's lock: they must be quick and
// must not call the broker.
type Faults struct {
	// Publish answers for a message instead of storing it; an error that
	// matches brokers.ErrUnknown is answered after storing it.
	Publish func(m *envelope.Message) error
	// DropAck loses the acknowledgement of a delivery, although Ack says nil.
	DropAck func(d *brokers.Delivery) bool
	// Twice has a message stored twice, as a producer does whose first answer
	// was lost.
	Twice func(m *envelope.Message) bool
	// Late is by how much later than it could be a message is handed over. It is
	// asked each time that the message comes up. What is behind it in its
	// partition waits with it, other partitions do not.
	Late func(m *envelope.Message) time.Duration
	// Turn chooses the partition that is read next, among those that have
	// something to hand over, and returns its index in partitions, which are
	// sorted. Without it they take turns.
	Turn func(partitions []int) int
	// Crash ends the process that holds a delivery, when it has just been handed
	// over, or when it is about to be acknowledged (acking): all deliveries of
	// the group are lost, d among them, and what is not committed comes again. So
	// does as much of what was: the last forget offsets of each partition, whose
	// commit the process had not sent yet.
	Crash func(d *brokers.Delivery, acking bool) (crash bool, forget int)
}

// New returns a broker without topics.
func New() *Broker {
	return &Broker{topics: make(map[string]*topic), groups: make(map[groupKey]*group), changed: make(chan struct{})}
}

// CreateTopic adds a topic. A topic that is there already stays as it is. It
// panics if partitions is not positive.
func (b *Broker) CreateTopic(name string, partitions int) {
	if partitions <= 0 {
		panic("membroker: CreateTopic: partitions must be positive")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.topics[name] != nil {
		return
	}
	t := &topic{}
	for range partitions {
		t.partitions = append(t.partitions, &log{})
	}
	b.topics[name] = t
}

// SetFaults replaces the faults.
func (b *Broker) SetFaults(f Faults) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.faults = f
}

// Len returns how many messages are stored in a topic.
func (b *Broker) Len(name string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	if t := b.topics[name]; t != nil {
		for _, p := range t.partitions {
			n += len(p.records)
		}
	}
	return n
}

// poke wakes whoever waits, from outside the lock.
func (b *Broker) poke() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.wake()
}

// wake is called under the lock.
func (b *Broker) wake() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// MaxMessage is the greatest body that the broker takes, in bytes.
const MaxMessage = 1 << 20

// Publisher returns a publisher that writes CloudEvents as on Kafka.
func (b *Broker) Publisher() brokers.Publisher { return &publisher{b: b} }

type publisher struct {
	b      *Broker
	mu     sync.Mutex
	closed bool
}

// Publish implements brokers.Publisher.
func (p *publisher) Publish(ctx context.Context, msgs []*envelope.Message) brokers.Results {
	p.mu.Lock()
	closed := p.closed
	p.mu.Unlock()
	switch {
	case closed:
		return brokers.Fill(len(msgs), brokers.ErrClosed)
	case ctx.Err() != nil:
		return brokers.Fill(len(msgs), fmt.Errorf("%w: %w", brokers.ErrUnavailable, ctx.Err()))
	}
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	defer p.b.wake()
	res, failed := make(brokers.Results, len(msgs)), map[string]bool{}
	for i, m := range msgs {
		key := m.Topic + "\x00" + string(m.Key)
		if m.Key != nil && failed[key] {
			res[i] = brokers.ErrBlocked
			continue
		}
		res[i] = p.b.store(m)
		failed[key] = failed[key] || res[i] != nil
	}
	return res
}

// Close implements brokers.Publisher.
func (p *publisher) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	return nil
}

func (b *Broker) store(m *envelope.Message) error {
	wire, err := envelope.Kafka.Encode(m, envelope.Binary)
	if err != nil {
		return fmt.Errorf("%w: %w", brokers.ErrRejected, err)
	}
	t := b.topics[m.Topic]
	switch {
	case t == nil:
		return fmt.Errorf("%w: %s", brokers.ErrNoRoute, m.Topic)
	case len(m.Body) > MaxMessage:
		return fmt.Errorf("%w: the body has %d bytes, %d are allowed", brokers.ErrTooLarge, len(m.Body), MaxMessage)
	}
	var answer error
	if b.faults.Publish != nil {
		answer = b.faults.Publish(m)
	}
	if answer != nil && !errors.Is(answer, brokers.ErrUnknown) {
		return answer
	}
	n := 1
	if b.faults.Twice != nil && b.faults.Twice(m) {
		n = 2
	}
	for range n {
		t.append(m.Topic, wire)
	}
	return answer
}

// append stores a copy at the partition of the key; messages without a key
// take turns.
func (t *topic) append(name string, wire *envelope.Message) {
	at := 0
	if wire.Key != nil {
		h := fnv.New32a()
		h.Write(wire.Key)
		at = int(h.Sum32() % uint32(len(t.partitions)))
	} else {
		for i, p := range t.partitions {
			if len(p.records) < len(t.partitions[at].records) {
				at = i
			}
		}
	}
	c := wire.Clone()
	c.Position = fmt.Sprintf("%s/%d/%d", name, at, len(t.partitions[at].records))
	t.partitions[at].records = append(t.partitions[at].records, c)
}
