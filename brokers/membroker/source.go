package membroker

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/internal/fair"
	"github.com/unecho/unecho/brokers/internal/receive"
	"github.com/unecho/unecho/envelope"
)

// group is a consumer group on one topic.
type group struct {
	name    string
	topic   string
	members []*Source
	next    []int64 // committed offset by partition: everything below is done
}

// Source receives from one topic as a member of a group. It implements
// brokers.Source and brokers.Sharer.
type Source struct {
	b      *Broker
	g      *group
	share  int         // of unsettled deliveries; 0 is no bound
	budget fair.Budget // the share, divided among the partitions
	turn   int         // the partition that is looked at first, for fairness
	parts  map[int]*claim
	closed bool
}

// claim is a partition as it is held by a source.
type claim struct {
	read     int64          // next offset to hand out
	asked    int64          // for which offset Faults.Late was asked; noOffset if for none
	due      time.Time      // when that one may be handed out
	done     map[int64]bool // settled above the committed offset
	open     map[int64]*handle
	stopping chan struct{}
	lost     chan struct{}
	counted  int // of open, in the source's budget
}

// noOffset is no offset of any message.
const noOffset = -1

// handle is the adapter's part of a delivery.
type handle struct {
	c         *claim
	partition int
	offset    int64
}

// Source returns a new member of a group of a topic, from whose committed
// offset, or from the oldest message, it receives. The partitions are shared
// out anew among the members.
func (b *Broker) Source(topic, groupName string) *Source {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := b.topics[topic]
	if t == nil {
		panic(fmt.Sprintf("membroker: Source: there is no topic %q", topic))
	}
	key := groupKey{topic, groupName}
	g := b.groups[key]
	if g == nil {
		g = &group{name: groupName, topic: topic, next: make([]int64, len(t.partitions))}
		b.groups[key] = g
	}
	s := &Source{b: b, g: g}
	g.members = append(g.members, s)
	g.rebalance()
	b.wake()
	return s
}

// Rebalance takes all partitions of a group of a topic away and shares them
// out anew: unsettled deliveries are lost and come back.
func (b *Broker) Rebalance(topic, groupName string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if g := b.groups[groupKey{topic, groupName}]; g != nil {
		g.rebalance()
		b.wake()
	}
}

// Committed returns the committed offsets of a group by partition; nil if
// there is no such group.
func (b *Broker) Committed(topic, groupName string) []int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	if g := b.groups[groupKey{topic, groupName}]; g != nil {
		return slices.Clone(g.next)
	}
	return nil
}

// WaitSettled returns nil as soon as a group has committed all that a topic holds,
// also what is published meanwhile, or ctx's error. A group that is not there yet
// is waited for.
func (b *Broker) WaitSettled(ctx context.Context, topic, groupName string) error {
	for {
		settled, changed := b.settled(topic, groupName)
		if settled {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (b *Broker) settled(topicName, groupName string) (settled bool, changed <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t, g := b.topics[topicName], b.groups[groupKey{topicName, groupName}]
	if t == nil || g == nil {
		return false, b.changed
	}
	for p, l := range t.partitions {
		if g.next[p] < int64(len(l.records)) {
			return false, b.changed
		}
	}
	return true, b.changed
}

func (g *group) rebalance() {
	for _, m := range g.members {
		for _, c := range m.parts {
			close(c.stopping)
			close(c.lost)
		}
		m.parts = make(map[int]*claim)
	}
	if len(g.members) == 0 {
		return
	}
	for p := range g.next {
		m := g.members[p%len(g.members)]
		m.parts[p] = &claim{read: g.next[p], asked: noOffset, done: map[int64]bool{}, open: map[int64]*handle{},
			stopping: make(chan struct{}), lost: make(chan struct{})}
	}
	for _, m := range g.members {
		m.budget = fair.New(m.share, len(m.parts))
	}
}

// Share implements brokers.Sharer.
func (s *Source) Share(unsettled int) {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.share = unsettled
	s.budget = fair.New(unsettled, len(s.parts))
}

// count brings the budget up to date with what of c is open.
func (s *Source) count(c *claim) {
	s.budget.Move(c.counted, len(c.open))
	c.counted = len(c.open)
}

// Receive implements brokers.Source.
func (s *Source) Receive(ctx context.Context) (*brokers.Delivery, error) {
	return receive.Loop(ctx, s.take)
}

// take returns a delivery, or a channel that closes when it is worth another try.
func (s *Source) take() (*brokers.Delivery, <-chan struct{}, error) {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.closed {
		return nil, nil, brokers.ErrClosed
	}
	p, ok := s.choose()
	if !ok {
		return nil, s.b.changed, nil
	}
	return s.handOut(p), nil, nil
}

// choose returns the partition to hand out from; false if none has anything.
func (s *Source) choose() (partition int, ok bool) {
	n, first := len(s.g.next), -1
	var ready []int
	for i := range n {
		p := (s.turn + i) % n
		if c := s.parts[p]; c == nil || s.budget.Left(c.counted) == 0 || !s.ready(c, s.log(p)) {
			continue
		}
		if first < 0 {
			first = p
		}
		ready = append(ready, p)
	}
	if turn := s.b.faults.Turn; turn != nil && first >= 0 {
		slices.Sort(ready)
		first = ready[turn(ready)]
	}
	return first, first >= 0
}

func (s *Source) log(partition int) []*envelope.Message {
	return s.b.topics[s.g.topic].partitions[partition].records
}

// ready reports whether the head of a partition is there, and not late. Whoever
// waits is woken when it is due.
func (s *Source) ready(c *claim, records []*envelope.Message) bool {
	if c.read >= int64(len(records)) {
		return false
	}
	late := s.b.faults.Late
	if late == nil {
		return true
	}
	if c.asked != c.read {
		c.asked, c.due = c.read, time.Now()
		if d := late(records[c.read]); d > 0 {
			c.due = c.due.Add(d)
			time.AfterFunc(d, s.b.poke)
		}
	}
	return !time.Now().Before(c.due)
}

func (s *Source) handOut(partition int) *brokers.Delivery {
	s.turn = partition + 1
	c := s.parts[partition]
	h := &handle{c: c, partition: partition, offset: c.read}
	c.open[h.offset], c.asked = h, noOffset
	s.count(c)
	c.read++
	d := &brokers.Delivery{Message: s.log(partition)[h.offset].Clone(), Lane: fmt.Sprintf("%s/%d", s.g.topic, partition),
		Stopping: c.stopping, Lost: c.lost, Handle: h}
	s.crashes(d, false)
	return d
}

// crashes lets the process that has d end, if the faults want that.
func (s *Source) crashes(d *brokers.Delivery, acking bool) bool {
	if s.b.faults.Crash == nil {
		return false
	}
	crash, forget := s.b.faults.Crash(d, acking)
	if crash {
		for p := range s.parts {
			s.g.next[p] = max(0, s.g.next[p]-int64(forget))
		}
		s.g.rebalance()
		s.b.wake()
	}
	return crash
}

// Ack implements brokers.Source.
func (s *Source) Ack(ctx context.Context, d *brokers.Delivery) error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	h, err := s.settle(d)
	if err != nil {
		return err
	}
	if s.crashes(d, true) {
		return brokers.ErrLost
	}
	if s.b.faults.DropAck != nil && s.b.faults.DropAck(d) {
		s.rewind(h)
		return nil
	}
	h.c.done[h.offset] = true
	for h.c.done[s.g.next[h.partition]] {
		delete(h.c.done, s.g.next[h.partition])
		s.g.next[h.partition]++
	}
	s.b.wake()
	return nil
}

// Return implements brokers.Source: the partition is read again from d on.
func (s *Source) Return(ctx context.Context, d *brokers.Delivery) error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	h, err := s.settle(d)
	if err != nil {
		return err
	}
	s.rewind(h)
	return nil
}

// settle takes d out of what is open.
func (s *Source) settle(d *brokers.Delivery) (*handle, error) {
	h, ok := d.Handle.(*handle)
	if !ok || h.c != s.parts[h.partition] || h.c.open[h.offset] != h {
		return nil, brokers.ErrLost
	}
	delete(h.c.open, h.offset)
	s.count(h.c)
	return h, nil
}

// rewind has the partition read again from h on. Later deliveries of it are
// forgotten, whether they were settled or not: they come again.
func (s *Source) rewind(h *handle) {
	c := h.c
	for o := range c.open {
		if o > h.offset {
			delete(c.open, o)
		}
	}
	for o := range c.done {
		if o > h.offset {
			delete(c.done, o)
		}
	}
	c.read, c.asked = h.offset, noOffset
	s.count(c)
	s.b.wake()
}

// Close implements brokers.Source.
func (s *Source) Close() error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	s.g.members = slices.DeleteFunc(s.g.members, func(m *Source) bool { return m == s })
	for _, c := range s.parts {
		close(c.stopping)
		close(c.lost)
	}
	s.parts = nil
	s.g.rebalance()
	s.b.wake()
	return nil
}
