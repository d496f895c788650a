package kafkabroker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/unecho/unecho/brokers"
)

// partition is one partition of a generation. Its fields are guarded by Source.mu.
type partition struct {
	gen   *generation
	topic string
	id    int
	lane  string
	track tracker

	buffer   []record // fetched and not handed out
	buffered int      // bytes of it
	asked    int      // bytes that a fetch under way may bring
	held     int      // what is counted of it in generation.bytes
	open     int      // what is counted of it in generation.number

	at    int64 // where to fetch on; negative until it is resolved
	epoch int   // rises with a rewind, so that a fetch under way is dropped
	begin int64 // where this group begins, if it had committed nothing
	pin   bool  // commit begin although nothing was consumed

	starving bool          // its fetcher waits
	more     chan struct{} // a token: it may look again
	quiet    bool          // the last answer had nothing
	swell    int           // how much larger messages are in memory than on the wire
}

// firstSwell is thought of messages before any was seen: small ones.
const firstSwell = 8

func newPartition(g *generation, topic string, id int, at int64) *partition {
	return &partition{gen: g, topic: topic, id: id, lane: fmt.Sprintf("%s/%d", topic, id), track: tracker{read: at}, at: at,
		more: make(chan struct{}, 1), swell: firstSwell}
}

// room reports whether another message may be handed out. s.mu is held.
func (p *partition) room() bool { return !p.windowFull() && p.gen.number.Left(p.track.open) > 0 }

// windowFull reports whether as much was handed out behind a delivery that is not
// settled as may come again.
func (p *partition) windowFull() bool {
	return p.track.first != nil && p.track.behind()+1 >= p.gen.s.c.Window
}

// mayFetch reports whether there is nothing to hand out, and room in memory: its
// share is not all but full, or nothing is in hand.
func (p *partition) mayFetch() bool {
	if len(p.buffer) > 0 || p.asked > 0 {
		return false
	}
	return p.held == 0 || p.gen.bytes.Left(p.held) > min(p.gen.bytes.Share(), p.gen.s.c.FetchBytes)/4
}

// full reports whether nothing more is handed out before something is settled.
func (p *partition) full() bool {
	return p.track.first != nil && (!p.room() || len(p.buffer) == 0 && p.asked == 0 && !p.mayFetch())
}

// account brings what is counted of p up to date, and lets fetchers go on for
// which there is room now. s.mu is held.
func (p *partition) account() {
	g, held := p.gen, p.track.bytes+p.buffered+p.asked
	g.number.Move(p.open, p.track.open)
	freed := g.bytes.Move(p.held, held)
	p.held, p.open = held, p.track.open
	p.feed()
	if !freed {
		return
	}
	for _, other := range g.parts {
		other.feed()
	}
}

// feed lets the fetcher look again if it waits and need not.
func (p *partition) feed() {
	if p.starving && p.mayFetch() {
		p.starving = false
		select {
		case p.more <- struct{}{}:
		default:
		}
	}
}

// hand makes a delivery of the next message. s.mu is held.
func (p *partition) hand() *brokers.Delivery {
	r := p.buffer[0]
	p.buffer[0] = record{}
	p.buffer = p.buffer[1:]
	p.buffered -= r.size
	e := p.track.deliver(r.offset, r.size)
	p.account()
	return &brokers.Delivery{Message: r.msg, Lane: p.lane, Stopping: p.gen.stopping, Lost: p.gen.lost, Handle: handle{p, e}}
}

// settle takes note that e is done. s.mu is held.
func (p *partition) settle(e *entry) {
	p.track.done(e)
	p.account()
	p.gen.progress()
}

// rewind has the partition read again from e on. s.mu is held.
func (p *partition) rewind(e *entry) {
	p.track.rewind(e)
	p.buffer, p.buffered, p.at = nil, 0, e.offset
	p.epoch++
	p.account()
}

// stuck tells what p waits for, if it is more than the usual wait.
func (p *partition) stuck() (brokers.Stuck, bool) {
	if p.track.first == nil || !p.windowFull() && time.Since(p.track.since) < p.gen.s.c.StuckAfter {
		return brokers.Stuck{}, false
	}
	return brokers.Stuck{Topic: p.topic, Partition: p.id, Offset: p.track.position(), Behind: p.track.behind(),
		Since: p.track.since, Full: p.full()}, true
}

// portion is what the next fetch asks for.
type portion struct {
	at    int64
	epoch int
	wire  int // bytes of the answer
	size  int // bytes that its messages may have in memory; the first always passes
}

// fetchLoop keeps the buffer filled until ctx is done.
func (p *partition) fetchLoop(ctx context.Context) {
	for n := 0; ctx.Err() == nil; {
		want, ok := p.hungry(ctx)
		if !ok {
			return
		}
		err := p.fill(ctx, want)
		p.forget()
		if err == nil || ctx.Err() != nil {
			n = 0
			continue
		}
		p.gen.s.c.OnError(fmt.Errorf("kafkabroker: fetch %s/%d: %w", p.topic, p.id, err))
		n++
		pause(ctx, min(20*time.Millisecond<<min(n, 6), 500*time.Millisecond))
	}
}

// hungry waits until the buffer is empty and there is room.
func (p *partition) hungry(ctx context.Context) (want portion, ok bool) {
	s := p.gen.s
	for ctx.Err() == nil {
		s.mu.Lock()
		ok := p.mayFetch()
		if ok {
			want = p.reserve()
		}
		p.starving = !ok
		s.mu.Unlock()
		if ok {
			return want, true
		}
		select {
		case <-p.more:
		case <-ctx.Done():
		}
	}
	return portion{}, false
}

// reserve counts what a fetch may bring before it does, or those of all partitions
// together would bring more than there is room for. A partition that had nothing to
// give waits at the broker, maybe for long, so it reserves of its own share alone.
func (p *partition) reserve() portion {
	fetch, budget := p.gen.s.c.FetchBytes, &p.gen.bytes
	size := budget.Left(p.held)
	if p.quiet {
		size = min(size, max(0, budget.Share()-p.held))
	}
	size = max(1, min(size, 2*fetch))
	p.asked = size
	p.account()
	return portion{at: p.at, epoch: p.epoch, wire: max(1, min(fetch, size/p.swell)), size: size}
}

// forget gives back what a fetch had reserved that has ended.
func (p *partition) forget() {
	p.gen.s.mu.Lock()
	defer p.gen.s.mu.Unlock()
	if p.asked != 0 {
		p.asked = 0
		p.account()
	}
}

// fill fetches once and puts the answer into the buffer.
func (p *partition) fill(ctx context.Context, want portion) error {
	s := p.gen.s
	if want.at < 0 {
		return p.resolve(ctx, s.c.Start)
	}
	pg, err := s.fetch(ctx, p.topic, p.id, want)
	if errors.Is(err, kafka.OffsetOutOfRange) {
		return p.outOfRange(ctx, want.at)
	}
	if err == nil && pg.next == want.at && pg.first != noBatch {
		pg.next, err = p.pass(ctx, want.at, pg.first)
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.epoch != want.epoch {
		return nil // a rewind came in between
	}
	p.buffer, p.buffered, p.at, p.asked = pg.records, pg.size, pg.next, 0
	p.quiet = len(pg.records) == 0
	p.learn(want, pg)
	p.account()
	if p.quiet && p.track.first == nil && pg.next > p.track.read {
		p.track.skip(pg.next) // only control records: nobody will settle them
		p.gen.progress()
	}
	if !p.quiet {
		s.wake()
	}
	return nil
}

// learn estimates how much of the wire fills so much memory, so that little is
// fetched that has no room. It forgets slowly: the end of a partition says little.
func (p *partition) learn(want portion, pg page) {
	switch {
	case pg.cut:
		p.swell = min(2*p.swell, 1<<20)
	case len(pg.records) > 0:
		p.swell = max(1, p.swell/2, (pg.size+want.wire-1)/want.wire)
	}
}

// resolve finds the offset at which to begin, and has it committed if it is
// the newest: the group must not begin later than now after a crash.
func (p *partition) resolve(ctx context.Context, start Start) error {
	s := p.gen.s
	at, err := s.offsetOf(ctx, p.topic, p.id, start)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p.at, p.begin, p.track.read = at, at, at
	if start == Newest {
		p.pin = true
		p.gen.progress()
	}
	return nil
}

func (p *partition) outOfRange(ctx context.Context, at int64) error {
	switch p.gen.s.c.OutOfRange {
	case ResetToOldest:
		return p.resolve(ctx, Oldest)
	case ResetToNewest:
		return p.resolve(ctx, Newest)
	}
	p.gen.s.fail(fmt.Errorf("%w: offset %d of %s/%d: retention has deleted messages that group %s had not consumed, or the topic was created anew; "+
		"set the group's offset, or Config.OutOfRange", ErrOutOfRange, at, p.topic, p.id, p.gen.s.c.GroupID))
	<-ctx.Done()
	return nil
}
