package kafkabroker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/segmentio/kafka-go"
)

const (
	// joinBackoff is the wait after a join that failed.
	joinBackoff = 200 * time.Millisecond
	// leaveTimeout bounds one try to leave for a lost member id, and
	// leavePause is the wait before the next.
	leaveTimeout = 2 * time.Second
	leavePause   = 100 * time.Millisecond
)

// consume is the life of the source: it consumes what it is to, until ctx is done.
func (s *Source) consume(ctx context.Context) {
	if s.c.Partitions != nil {
		s.assigned(ctx)
		return
	}
	first := s.present(ctx)
	var checks sync.WaitGroup
	checks.Go(func() { s.checkDeadLetters(ctx, first) })
	defer checks.Wait()
	for known := first; ctx.Err() == nil && !s.failed(); {
		while, changed := context.WithCancel(ctx)
		next := make(chan topology, 1)
		go func() {
			defer changed()
			next <- s.change(while, known, sameTopics)
		}()
		s.member(while, known)
		changed()
		known = <-next
	}
}

// member is a member of the group with the topics that are there, until ctx is done.
func (s *Source) member(ctx context.Context, known topology) {
	group, err := kafka.NewConsumerGroup(s.group(slices.Sorted(maps.Keys(known))))
	if err != nil {
		s.fail(fmt.Errorf("kafkabroker: %w", err))
		return
	}
	s.generations(ctx, group, known)
	if err := group.Close(); err != nil {
		s.c.OnError(fmt.Errorf("kafkabroker: leave the group: %w", err))
	}
}

// generations joins the group again and again until ctx is done.
func (s *Source) generations(ctx context.Context, group *kafka.ConsumerGroup, known topology) {
	var member string // of the last generation
	leaver := &leaver{s: s}
	defer leaver.stop()
	for ctx.Err() == nil {
		gen, err := group.Next(ctx)
		switch {
		case ctx.Err() != nil || errors.Is(err, kafka.ErrGroupClosed):
			return
		case err == nil:
			leaver.stop()
			member = gen.MemberID
			g := s.newGeneration(gen, gen.Assignments)
			gen.Start(g.run)
			// It ends the generation; kafka-go waits for it before the next one.
			gen.Start(func(ctx context.Context) { known = s.change(ctx, known, samePartitions) })
		case errors.Is(err, kafka.RebalanceInProgress):
			// The member is alive and joins again by itself.
		case fatal(err):
			s.fail(fmt.Errorf("kafkabroker: join the group: %w", err))
			return
		default:
			s.c.OnError(fmt.Errorf("kafkabroker: join the group: %w", err))
			leaver.start(ctx, member)
			member = ""
		}
	}
}

// fatal reports errors that waiting does not mend.
func fatal(err error) bool {
	for _, e := range []kafka.Error{kafka.GroupAuthorizationFailed, kafka.TopicAuthorizationFailed, kafka.SASLAuthenticationFailed,
		kafka.UnsupportedSASLMechanism, kafka.InvalidSessionTimeout, kafka.InconsistentGroupProtocol, kafka.InvalidGroupId} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// leaver leaves the group for a member id that kafka-go has lost. After a
// broken connection it joins as a new member, while the coordinator has the
// old one on its list and waits for it to time out: without this, consumption
// comes back one session time-out after the broker.
//
// It goes on beside the joins, not between them: the last join before the
// broker serves again is one that blocks, until the old member is gone.
type leaver struct {
	s      *Source
	cancel context.CancelFunc
	done   chan struct{}
}

// start leaves for member until that is answered or stop is called. An empty
// member, or one while another is being left, changes nothing.
func (l *leaver) start(ctx context.Context, member string) {
	if member == "" || l.cancel != nil {
		return
	}
	ctx, l.cancel = context.WithCancel(ctx)
	l.done = make(chan struct{})
	go func() {
		defer close(l.done)
		for ctx.Err() == nil && !l.s.leave(ctx, member) {
			pause(ctx, leavePause)
		}
	}()
}

// stop ends it and waits for the end. A new generation means that the old
// member is gone, whoever saw to it.
func (l *leaver) stop() {
	if l.cancel == nil {
		return
	}
	l.cancel()
	<-l.done
	l.cancel = nil
}

// leave asks once, and reports whether the member is gone.
func (s *Source) leave(ctx context.Context, member string) bool {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	c := &kafka.Client{Addr: s.addr, Transport: s.transport, Timeout: leaveTimeout}
	res, err := c.LeaveGroup(ctx, &kafka.LeaveGroupRequest{GroupID: s.c.GroupID, Members: []kafka.LeaveGroupRequestMember{{ID: member}}})
	if err != nil {
		return false
	}
	// kafka-go decodes the answer in the wrong order: Error is always nil, and
	// the code is in the low bits of Throttle.
	code := kafka.Error(int16(res.Throttle.Milliseconds()))
	return code == 0 || code == kafka.UnknownMemberId
}
