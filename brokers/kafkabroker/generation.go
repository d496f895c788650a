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

	"github.com/unecho/unecho/brokers/internal/fair"
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
	bytes     fair.Budget // of what is in hand: delivered and not settled, or fetched
	number    fair.Budget // of what is delivered and not settled
}

// committer commits offsets for the group, as long as the partitions are ours. It
// is a *kafka.Generation, where they are those of a member.
type committer interface {
	CommitOffsets(offsets map[string]map[int]int64) error
}

func (s *Source) newGeneration(k committer, assignments map[string][]kafka.PartitionAssignment) *generation {
	g := &generation{s: s, k: k, stopping: make(chan struct{}), lost: make(chan struct{}),
		moved: make(chan struct{}, 1), committed: make(map[*partition]int64)}
	for topic, assigned := range assignments {
		for _, a := range assigned {
			p := newPartition(g, topic, a.ID, a.Offset)
			if a.Offset >= 0 {
				g.committed[p] = a.Offset
			}
			g.parts = append(g.parts, p)
		}
	}
	g.bytes = fair.New(s.c.WindowBytes, len(g.parts))
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
	g.number = fair.New(s.share, len(g.parts))
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

// pause waits for d, less a random part of up to a half, or until ctx is done.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d - rand.N(d/2+1))
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
