package kafkabroker

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/unecho/unecho/brokers"
)

// Horizon implements brokers.Retaining: a record can come again as long as the
// topic keeps it, by its retention.ms; for ever if that is -1, or if the topic is
// only compacted. It needs the right to describe the topics' configuration. What
// a segment keeps longer than that, because younger records are in it, is not
// counted.
//
// With a Pattern it is about the topics that there are, and says nothing if
// there is none.
func (s *Source) Horizon(ctx context.Context) (brokers.Horizon, error) {
	req := &kafka.DescribeConfigsRequest{}
	topics, err := s.topics(ctx)
	if err != nil {
		return brokers.Horizon{}, fmt.Errorf("kafkabroker: look for topics: %w: %w", brokers.ErrUnavailable, err)
	}
	if len(topics) == 0 {
		return brokers.Horizon{}, nil
	}
	for _, topic := range topics {
		req.Resources = append(req.Resources, kafka.DescribeConfigRequestResource{
			ResourceType: kafka.ResourceTypeTopic, ResourceName: topic, ConfigNames: []string{"retention.ms", "cleanup.policy"},
		})
	}
	res, err := s.client().DescribeConfigs(ctx, req)
	if err != nil {
		return brokers.Horizon{}, fmt.Errorf("kafkabroker: describe the topics: %w: %w", brokers.ErrUnavailable, err)
	}
	var longest brokers.Horizon
	for _, r := range res.Resources {
		h, err := horizonOf(r)
		if err != nil {
			return brokers.Horizon{}, err
		}
		if longest.Why == "" || h.For > longest.For {
			longest = h
		}
	}
	return longest, nil
}

func horizonOf(r kafka.DescribeConfigResponseResource) (brokers.Horizon, error) {
	if r.Error != nil {
		c := notSent(r.Error)
		if errors.Is(c, brokers.ErrUnavailable) || errors.Is(c, brokers.ErrNoRoute) { // a topic may come later
			return brokers.Horizon{}, fmt.Errorf("kafkabroker: describe topic %s: %w: %w", r.ResourceName, brokers.ErrUnavailable, r.Error)
		}
		return brokers.Horizon{}, fmt.Errorf("kafkabroker: describe topic %s (it takes the right to describe configurations): %w", r.ResourceName, r.Error)
	}
	policy, retention := "delete", int64(-1)
	for _, e := range r.ConfigEntries {
		switch e.ConfigName {
		case "cleanup.policy":
			policy = e.ConfigValue
		case "retention.ms":
			ms, err := strconv.ParseInt(e.ConfigValue, 10, 64)
			if err != nil {
				return brokers.Horizon{}, fmt.Errorf("kafkabroker: topic %s: retention.ms is %q", r.ResourceName, e.ConfigValue)
			}
			retention = ms
		}
	}
	if !strings.Contains(policy, "delete") || retention < 0 || retention > int64(brokers.Forever/time.Millisecond) {
		return brokers.Horizon{For: brokers.Forever, Why: fmt.Sprintf("topic %s keeps its records for ever (cleanup.policy %s, retention.ms %d), so they can come again for ever", r.ResourceName, policy, retention)}, nil
	}
	age := time.Duration(retention) * time.Millisecond
	return brokers.Horizon{For: age, Why: fmt.Sprintf("retention.ms of topic %s is %v, and its records can come again for as long", r.ResourceName, age)}, nil
}
