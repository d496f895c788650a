package kafkabroker

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/unecho/unecho/brokers"
)

// generation is our share of the group's partitions between two rebalances.
// Its fields are guarded by Source.mu.
type generation struct {
	s         *Source
	k         committer
	parts     []*partition
	draining  bool
	stopping  chan struct{}
	lost      chan struct{}
	moved     chan struct{} // a token: something was settled
	committed map[*partition]int64
}

// committer commits offsets for the group, as long as the partitions are ours. It
// is a *kafka.Generation, where they are those of a member.
type committer interface {
	CommitOffsets(offsets map[string]map[int]int64) error
}

// partition is one partition of a generation.
type partition struct {
	gen    *generation
	topic  string
	id     int
	track  tracker
	buffer []record // fetched and not handed out
	at     int64    // where to fetch on; negative until it is resolved
	epoch  int      // rises with a rewind, so that a fetch under way is dropped
	begin  int64    // where this group begins, if it had committed nothing
	pin    bool     // commit begin although nothing was consumed
}

func (s *Source) newGeneration(k committer, assignments map[string][]kafka.PartitionAssignment) *generation {
	g := &generation{s: s, k: k, stopping: make(chan struct{}), lost: make(chan struct{}),
		moved: make(chan struct{}, 1), committed: make(map[*partition]int64)}
	for topic, assigned := range assignments {
		for _, a := range assigned {
			p := &partition{gen: g, topic: topic, id: a.ID, at: a.Offset}
			p.track.read = a.Offset
			if a.Offset >= 0 {
				g.committed[p] = a.Offset
			}
			g.parts = append(g.parts, p)
		}
	}
	return g
}

// run is the life of the generation. kafka-go joins the next one only after
// it has returned. The order of the end is what keeps offsets right:
//
//  1. Nothing is fetched or handed out any more, and waiting deliveries are
//     told to stop.
//  2. Handlers that run finish, within the bound.
//  3. What they did is committed, still as this generation.
//  4. From now on nothing can be settled; what is open is lost, and the next
//     owner starts from the committed offset.
func (g *generation) run(ctx context.Context) {
	s := g.s
	if ctx.Err() != nil {
		// It ended before it began. kafka-go does not wait for us then, so the
		// next one may be ours already.
		return
	}
	s.mu.Lock()
	s.gen = g
	s.wake()
	s.mu.Unlock()

	fetching, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var fetchers sync.WaitGroup
	for _, p := range g.parts {
		fetchers.Go(func() { p.fetchLoop(fetching) })
	}
	g.commitLoop(ctx)

	s.mu.Lock()
	g.draining = true
	close(g.stopping)
	s.mu.Unlock()
	cancel()
	fetchers.Wait()
	g.drain()
	g.commit()

	s.mu.Lock()
	s.gen = nil
	close(g.lost)
	s.wake()
	s.mu.Unlock()
}

// progress notes that something was settled. s.mu is held.
func (g *generation) progress() {
	select {
	case g.moved <- struct{}{}:
	default:
	}
}

// commitLoop commits progress until ctx is done.
func (g *generation) commitLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.moved:
		}
		t := time.NewTimer(g.s.c.CommitInterval)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
		if !g.commit() {
			g.s.mu.Lock()
			g.progress() // try again
			g.s.mu.Unlock()
		}
	}
}

// drain waits until no delivery is being worked on, or the bound is over.
func (g *generation) drain() {
	t := time.NewTimer(g.s.c.drain())
	defer t.Stop()
	for !g.idle() {
		select {
		case <-g.moved:
		case <-t.C:
			return
		}
	}
}

// idle reports whether there is nothing to wait for. After Close there never
// is: what is unsettled then comes back.
func (g *generation) idle() bool {
	g.s.mu.Lock()
	defer g.s.mu.Unlock()
	if g.s.closed {
		return true
	}
	for _, p := range g.parts {
		if !p.track.idle() {
			return false
		}
	}
	return true
}

// commit sends the positions that have moved. It reports false if that should
// be tried again; a generation that is over is not worth it.
func (g *generation) commit() bool {
	offsets, moved := g.positions()
	if len(moved) == 0 {
		return true
	}
	err := g.k.CommitOffsets(offsets)
	if err == nil {
		g.s.mu.Lock()
		defer g.s.mu.Unlock()
		for p, offset := range moved {
			g.committed[p] = offset
		}
		return true
	}
	g.s.c.OnError(fmt.Errorf("kafkabroker: commit offsets: %w", err))
	var over kafka.Error
	return errors.As(err, &over) && !over.Temporary() || errors.Is(err, net.ErrClosed)
}

// positions returns what is to be committed: never below what was.
func (g *generation) positions() (offsets map[string]map[int]int64, moved map[*partition]int64) {
	g.s.mu.Lock()
	defer g.s.mu.Unlock()
	offsets, moved = make(map[string]map[int]int64), make(map[*partition]int64)
	for _, p := range g.parts {
		at := p.track.position()
		was, known := g.committed[p]
		if at < 0 || known && at <= was || !known && !p.pin && at == p.begin {
			continue
		}
		if offsets[p.topic] == nil {
			offsets[p.topic] = make(map[int]int64)
		}
		offsets[p.topic][p.id], moved[p] = at, at
	}
	return offsets, moved
}

// room reports whether another message may be handed out.
func (p *partition) room(c *Config) bool {
	return len(p.track.open) == 0 || len(p.track.open) < c.Window && p.track.bytes < c.WindowBytes
}

// hand makes a delivery of the next message. s.mu is held.
func (p *partition) hand() *brokers.Delivery {
	r := p.buffer[0]
	p.buffer[0] = record{}
	p.buffer = p.buffer[1:]
	e := p.track.deliver(r.offset, r.size)
	return &brokers.Delivery{Message: r.msg, Lane: fmt.Sprintf("%s/%d", p.topic, p.id),
		Stopping: p.gen.stopping, Lost: p.gen.lost, Handle: handle{p, e}}
}

// rewind has the partition read again from e on. s.mu is held.
func (p *partition) rewind(e *entry) {
	p.track.rewind(e)
	p.buffer, p.at = nil, e.offset
	p.epoch++
}

// fetchLoop keeps the buffer filled until ctx is done.
func (p *partition) fetchLoop(ctx context.Context) {
	for n := 0; ctx.Err() == nil; {
		at, epoch, ok := p.hungry(ctx)
		if !ok {
			return
		}
		err := p.fill(ctx, at, epoch)
		if err == nil || ctx.Err() != nil {
			n = 0
			continue
		}
		p.gen.s.c.OnError(fmt.Errorf("kafkabroker: fetch %s/%d: %w", p.topic, p.id, err))
		n++
		pause(ctx, min(20*time.Millisecond<<min(n, 6), 500*time.Millisecond))
	}
}

// hungry waits until the buffer is empty.
func (p *partition) hungry(ctx context.Context) (at int64, epoch int, ok bool) {
	s := p.gen.s
	for {
		s.mu.Lock()
		at, epoch, ok = p.at, p.epoch, len(p.buffer) == 0
		changed := s.changed
		s.mu.Unlock()
		if ok && ctx.Err() == nil {
			return at, epoch, true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return 0, 0, false
		}
	}
}

// fill fetches once and puts the answer into the buffer.
func (p *partition) fill(ctx context.Context, at int64, epoch int) error {
	s := p.gen.s
	if at < 0 {
		return p.resolve(ctx, s.c.Start)
	}
	pg, err := s.fetch(ctx, p.topic, p.id, at, s.c.FetchBytes)
	if errors.Is(err, kafka.OffsetOutOfRange) {
		return p.outOfRange(ctx, at)
	}
	if err == nil && pg.next == at && pg.first != noBatch {
		pg.next, err = p.pass(ctx, at, pg.first)
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.epoch != epoch {
		return nil // a rewind came in between
	}
	p.buffer, p.at = pg.records, pg.next
	if len(pg.records) == 0 && len(p.track.open) == 0 && pg.next > p.track.read {
		p.track.skip(pg.next) // only control records: nobody will settle them
		p.gen.progress()
	}
	if len(pg.records) > 0 {
		s.wake()
	}
	return nil
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

// pause waits for d, less a random part of up to a half, or until ctx is done.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d - rand.N(d/2+1))
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
