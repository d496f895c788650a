package natsbroker

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/unecho/unecho/brokers"
)

// Horizon implements brokers.Retaining: a message can come again as long as the
// stream keeps it, since the consumer delivers without a limit. A stream without
// a MaxAge keeps it for ever.
func (s *Source) Horizon(ctx context.Context) (brokers.Horizon, error) {
	stream, err := s.js.Stream(ctx, s.c.Stream)
	switch {
	case err == nil:
	case errors.Is(err, jetstream.ErrStreamNotFound), errors.Is(err, nats.ErrNoResponders), errors.Is(err, nats.ErrTimeout),
		errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, context.DeadlineExceeded), !s.reachable():
		return brokers.Horizon{}, fmt.Errorf("natsbroker: stream %s: %w: %w", s.c.Stream, brokers.ErrUnavailable, err)
	default:
		return brokers.Horizon{}, fmt.Errorf("natsbroker: stream %s: %w", s.c.Stream, err)
	}
	age := stream.CachedInfo().Config.MaxAge
	if age == 0 {
		return brokers.Horizon{For: brokers.Forever, Why: fmt.Sprintf("stream %s has no MaxAge, so its messages can come again for ever", s.c.Stream)}, nil
	}
	return brokers.Horizon{For: age, Why: fmt.Sprintf("MaxAge of stream %s is %v, and they can come again for as long", s.c.Stream, age)}, nil
}
