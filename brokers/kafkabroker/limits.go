package kafkabroker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/segmentio/kafka-go"
)

// ErrDeadLetterLimit: a topic of dead letters takes less than a topic that is
// consumed, and the headers that say why a message is there. The greatest messages
// will be refused by it.
var ErrDeadLetterLimit = errors.New("kafkabroker: dead letters may not fit")

// deadLetterRoom is what the smallest form of a dead letter has beside the message,
// at most.
const deadLetterRoom = 256

// checkDeadLetters tells of topics of dead letters that cannot take what may be
// consumed.
func (s *Source) checkDeadLetters(ctx context.Context, consumed topology) {
	if len(s.c.DeadLetterTopics) == 0 {
		return
	}
	topics := slices.Clone(s.c.DeadLetterTopics)
	for topic := range consumed {
		topics = append(topics, topic)
	}
	limits, err := s.limits(ctx, topics)
	if err != nil {
		if ctx.Err() == nil {
			s.c.OnError(fmt.Errorf("kafkabroker: compare the limits of Config.DeadLetterTopics with those of what is consumed: %w", err))
		}
		return
	}
	for _, dead := range s.c.DeadLetterTopics {
		for topic := range consumed {
			if need := limits[topic] + deadLetterRoom; limits[dead] < need {
				s.c.OnError(fmt.Errorf("%w: topic %s takes %d bytes (max.message.bytes), dead-letter topic %s takes %d; allow it at least %d, "+
					"or name another place by consumer.FirstDeadLetter", ErrDeadLetterLimit, topic, limits[topic], dead, limits[dead], need))
			}
		}
	}
}

// limits returns the max.message.bytes of topics.
func (s *Source) limits(ctx context.Context, topics []string) (map[string]int, error) {
	req := &kafka.DescribeConfigsRequest{}
	for _, topic := range topics {
		req.Resources = append(req.Resources, kafka.DescribeConfigRequestResource{
			ResourceType: kafka.ResourceTypeTopic, ResourceName: topic, ConfigNames: []string{"max.message.bytes"},
		})
	}
	res, err := s.client().DescribeConfigs(ctx, req)
	if err != nil {
		return nil, err
	}
	limits := make(map[string]int)
	for _, r := range res.Resources {
		if r.Error != nil {
			return nil, fmt.Errorf("describe topic %s: %w", r.ResourceName, r.Error)
		}
		for _, e := range r.ConfigEntries {
			if limits[r.ResourceName], err = strconv.Atoi(e.ConfigValue); err != nil {
				return nil, fmt.Errorf("topic %s: %s is %q", r.ResourceName, e.ConfigName, e.ConfigValue)
			}
		}
	}
	return limits, nil
}
