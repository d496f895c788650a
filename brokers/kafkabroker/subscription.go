package kafkabroker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/segmentio/kafka-go"
)

// checkSubscription returns what is wrong with what is to be consumed.
func (c Config) checkSubscription() error {
	n := 0
	for _, given := range []bool{len(c.Topics) > 0, c.Pattern != nil, len(c.Partitions) > 0} {
		if given {
			n++
		}
	}
	if n != 1 {
		return fmt.Errorf("kafkabroker: %d of Config.Topics, Config.Pattern and Config.Partitions are set; set one", n)
	}
	for topic, list := range c.Partitions {
		sorted := slices.Sorted(slices.Values(list))
		if topic == "" || len(list) == 0 || sorted[0] < 0 || len(slices.Compact(sorted)) < len(list) {
			return fmt.Errorf("kafkabroker: Config.Partitions: topic %q has the partitions %v; give each once", topic, list)
		}
	}
	return nil
}

// anyTopic stands for the topics that a pattern will match, where settings are
// checked.
const anyTopic = "any"

// named are the topics that are known by name; none with a pattern.
func (c Config) named() []string {
	if c.Partitions != nil {
		return slices.Sorted(maps.Keys(c.Partitions))
	}
	return c.Topics
}

// group are the settings of a member.
func (s *Source) group(topics []string) kafka.ConsumerGroupConfig {
	c := s.c
	return kafka.ConsumerGroupConfig{
		ID: c.GroupID, Brokers: c.Brokers, Topics: topics, Dialer: c.dialer(&s.conns),
		GroupBalancers:    []kafka.GroupBalancer{whole{kafka.RangeGroupBalancer{}, s}, whole{kafka.RoundRobinGroupBalancer{}, s}},
		HeartbeatInterval: c.HeartbeatInterval,
		SessionTimeout:    c.SessionTimeout,
		RebalanceTimeout:  c.RebalanceTimeout,
		JoinGroupBackoff:  joinBackoff,
		StartOffset:       kafka.FirstOffset,
		Timeout:           dialTimeout,
	}
}

// topics are those that are consumed.
func (s *Source) topics(ctx context.Context) ([]string, error) {
	if named := s.c.named(); len(named) > 0 {
		return named, nil
	}
	now, err := s.look(ctx, nil)
	return slices.Sorted(maps.Keys(now)), err
}

func (s *Source) client() *kafka.Client {
	return &kafka.Client{Addr: s.addr, Transport: s.transport, Timeout: 10 * time.Second}
}

// assigned consumes a fixed list of partitions until ctx is done, as one
// generation.
func (s *Source) assigned(ctx context.Context) {
	list := &fixed{s: s, ctx: context.WithoutCancel(ctx)}
	for ctx.Err() == nil {
		assignments, err := list.offsets(ctx)
		if err == nil {
			s.newGeneration(list, assignments).run(ctx)
			return
		}
		if fatal(err) {
			s.fail(fmt.Errorf("kafkabroker: fetch the group's offsets: %w", err))
			return
		}
		if ctx.Err() == nil {
			s.c.OnError(fmt.Errorf("kafkabroker: fetch the group's offsets: %w", err))
		}
		pause(ctx, joinBackoff)
	}
}

// fixed commits offsets for a group without being its member.
type fixed struct {
	s   *Source
	ctx context.Context //nolint:containedctx // committer has none; each commit is bounded
}

// offsets are what is committed for the partitions; kafka.FirstOffset where there
// is nothing.
func (f *fixed) offsets(ctx context.Context) (map[string][]kafka.PartitionAssignment, error) {
	res, err := f.s.client().OffsetFetch(ctx, &kafka.OffsetFetchRequest{GroupID: f.s.c.GroupID, Topics: f.s.c.Partitions})
	if err == nil {
		err = res.Error
	}
	switch {
	case errors.Is(err, kafka.GroupIdNotFound):
		res = &kafka.OffsetFetchResponse{} // the first commit makes it
	case err != nil:
		return nil, err
	}
	assignments := make(map[string][]kafka.PartitionAssignment)
	for topic, wanted := range f.s.c.Partitions {
		committed := make(map[int]int64)
		for _, p := range res.Topics[topic] {
			if p.Error != nil {
				return nil, p.Error
			}
			committed[p.Partition] = p.CommittedOffset
		}
		for _, id := range wanted {
			at, ok := committed[id]
			if !ok || at < 0 {
				at = kafka.FirstOffset
			}
			assignments[topic] = append(assignments[topic], kafka.PartitionAssignment{ID: id, Offset: at})
		}
	}
	return assignments, nil
}

// CommitOffsets implements committer. The broker refuses it if the group has
// members: they would commit for the same partitions.
func (f *fixed) CommitOffsets(offsets map[string]map[int]int64) error {
	ctx, cancel := context.WithTimeout(f.ctx, dialTimeout)
	defer cancel()
	req := &kafka.OffsetCommitRequest{GroupID: f.s.c.GroupID, GenerationID: -1, Topics: make(map[string][]kafka.OffsetCommit)}
	for topic, ps := range offsets {
		for id, at := range ps {
			req.Topics[topic] = append(req.Topics[topic], kafka.OffsetCommit{Partition: id, Offset: at})
		}
	}
	res, err := f.s.client().OffsetCommit(ctx, req)
	if err != nil {
		return err
	}
	for _, ps := range res.Topics {
		for _, p := range ps {
			err = errors.Join(err, p.Error)
		}
	}
	for _, e := range []kafka.Error{kafka.UnknownMemberId, kafka.IllegalGeneration} {
		if errors.Is(err, e) {
			f.s.fail(fmt.Errorf("kafkabroker: group %s has members, so offsets cannot be committed for a fixed list of partitions; give it a group of its own: %w", f.s.c.GroupID, err))
		}
	}
	return err
}
