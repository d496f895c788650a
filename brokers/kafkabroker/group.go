package kafkabroker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/segmentio/kafka-go"
)

const (
	// joinBackoff is the wait after a join that failed.
	joinBackoff = 200 * time.Millisecond
	// leaveTimeout bounds one try to leave for a lost member id.
	leaveTimeout = 2 * time.Second
)

// generations joins the group again and again until ctx is done.
func (s *Source) generations(ctx context.Context) {
	var member string // of the last generation, until it is known to have left
	for ctx.Err() == nil {
		gen, err := s.group.Next(ctx)
		switch {
		case ctx.Err() != nil || errors.Is(err, kafka.ErrGroupClosed):
			return
		case err == nil:
			member = gen.MemberID
			g := s.newGeneration(gen)
			gen.Start(g.run)
		case errors.Is(err, kafka.RebalanceInProgress):
			// The member is alive and joins again by itself.
		case fatal(err):
			s.fail(fmt.Errorf("kafkabroker: join the group: %w", err))
			return
		default:
			s.c.OnError(fmt.Errorf("kafkabroker: join the group: %w", err))
			member = s.leaveLost(ctx, member)
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

// leaveLost leaves the group for a member id that kafka-go has lost. After a
// broken connection it joins as a new member, while the coordinator has the
// old one on its list and waits for it to time out: without this, consumption
// comes back one session time-out after the broker. It is tried until it is
// answered; kafka-go waits for us meanwhile, and could do nothing before.
// It returns "" when the id is gone.
func (s *Source) leaveLost(ctx context.Context, member string) string {
	if member == "" {
		return ""
	}
	one, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	c := &kafka.Client{Addr: s.addr, Transport: s.transport, Timeout: leaveTimeout}
	res, err := c.LeaveGroup(one, &kafka.LeaveGroupRequest{GroupID: s.c.GroupID, Members: []kafka.LeaveGroupRequestMember{{ID: member}}})
	if err != nil {
		return member
	}
	// kafka-go decodes the answer in the wrong order: Error is always nil, and
	// the code is in the low bits of Throttle.
	switch code := kafka.Error(int16(res.Throttle.Milliseconds())); code {
	case 0, kafka.UnknownMemberId:
		return ""
	default:
		return member
	}
}
