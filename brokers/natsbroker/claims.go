package natsbroker

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/unecho/unecho/brokers"
)

// claim is a delivery as we hold it.
type claim struct {
	msg  *nats.Msg
	d    *brokers.Delivery
	beat time.Time // the server counts from then or later; under Source.mu
	lost chan struct{}

	mu      sync.Mutex
	settled bool // no heartbeat may be sent any more
}

// heartbeats keeps the claims alive, and lets go of those for which that
// failed for too long.
func (s *Source) heartbeats() {
	tick := time.NewTicker(s.c.AckWait / 10)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			return
		}
		s.lose()
		s.beat()
	}
}

// lose drops the claims that the server may have given to somebody else:
// those that wait are never started.
func (s *Source) lose() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for c := range s.open {
		if s.expired(c, now) {
			s.drop(c)
		}
	}
	s.buffer = slices.DeleteFunc(s.buffer, func(c *claim) bool { return !s.open[c] })
}

// drop lets go of a claim that is gone. s.mu is held.
func (s *Source) drop(c *claim) {
	delete(s.open, c)
	close(c.lost)
	s.wake()
}

// expired reports whether the server may have given c to somebody else.
func (s *Source) expired(c *claim, now time.Time) bool {
	return now.Sub(c.beat) > s.c.AckWait-s.c.AckWait/10
}

// due returns the claims whose last heartbeat is a third of AckWait ago.
func (s *Source) due() []*claim {
	s.mu.Lock()
	defer s.mu.Unlock()
	var due []*claim
	for c := range s.open {
		if !s.mute && time.Since(c.beat) >= s.c.AckWait/3 && !s.expired(c, time.Now()) {
			due = append(due, c)
		}
	}
	return due
}

// inProgress sends a heartbeat, but never behind the answer: the server would
// wait for AckWait again instead of the delay of a nak. That it could not be
// sent shows in the ping behind it.
func (c *claim) inProgress() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.settled {
		_ = c.msg.InProgress()
	}
}

// settle keeps heartbeats back from now on.
func (c *claim) settle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.settled = true
}

// beat sends a heartbeat for every claim that is due, and believes them when
// the server has answered a ping behind them. The time from which the server
// counts is that of sending, at the earliest. Without any it pings all the
// same, so that it is known how old a message can be that comes next.
func (s *Source) beat() {
	if !s.nc.IsConnected() {
		return
	}
	due, sent := s.due(), time.Now()
	for _, c := range due {
		c.inProgress()
	}
	ctx, cancel := context.WithTimeout(s.ctx, s.c.AckWait/5)
	defer cancel()
	if s.nc.FlushWithContext(ctx) != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pong = sent
	for _, c := range due {
		if s.open[c] {
			c.beat = sent
		}
	}
	select {
	case s.ponged <- struct{}{}:
	default:
	}
}
