package kafkabroker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
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

// group are the settings of a member.
func (c Config) group(topics []string) kafka.ConsumerGroupConfig {
	return kafka.ConsumerGroupConfig{
		ID: c.GroupID, Brokers: c.Brokers, Topics: topics, Dialer: c.dialer(),
		GroupBalancers:    []kafka.GroupBalancer{kafka.RangeGroupBalancer{}, kafka.RoundRobinGroupBalancer{}},
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
	switch {
	case s.c.Pattern != nil:
		return s.match(ctx)
	case s.c.Partitions != nil:
		return slices.Sorted(maps.Keys(s.c.Partitions)), nil
	}
	return s.c.Topics, nil
}

// match asks the broker for the topics that the pattern matches.
func (s *Source) match(ctx context.Context) ([]string, error) {
	res, err := s.client().Metadata(ctx, &kafka.MetadataRequest{})
	if err != nil {
		return nil, err
	}
	var topics []string
	for _, t := range res.Topics {
		if t.Error == nil && !t.Internal && !strings.HasPrefix(t.Name, "__") && s.c.Pattern.FindString(t.Name) == t.Name && t.Name != "" {
			topics = append(topics, t.Name)
		}
	}
	slices.Sort(topics)
	return topics, nil
}

func (s *Source) client() *kafka.Client {
	return &kafka.Client{Addr: s.addr, Transport: s.transport, Timeout: 10 * time.Second}
}

// matching waits until the pattern matches something; nil if ctx was done first.
func (s *Source) matching(ctx context.Context) []string {
	for {
		topics, err := s.match(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			s.c.OnError(fmt.Errorf("kafkabroker: look for topics: %w", err))
		case len(topics) > 0:
			return topics
		}
		pause(ctx, s.c.RefreshInterval)
	}
}

// watch returns when the pattern matches other topics, or ctx is done. That a topic
// is gone is believed when it was not seen twice: a broker that has just been started
// may not know of all.
func (s *Source) watch(ctx context.Context, topics []string) {
	for missed := 0; ctx.Err() == nil; {
		pause(ctx, s.c.RefreshInterval)
		now, err := s.match(ctx)
		switch {
		case err != nil || len(now) == 0:
			continue
		case slices.Equal(now, topics):
			missed = 0
		case slices.ContainsFunc(now, func(t string) bool { return !slices.Contains(topics, t) }):
			return
		default:
			if missed++; missed > 1 {
				return
			}
		}
	}
}

// sizes are how many partitions the topics of a member have; none is a topic that
// is not there. A change is a rebalance.
//
// kafka-go can watch for that, and must not:
//
//	the group is joined while a topic is missing, and nobody gets its partitions
//	the topic is created
//	kafka-go counts for the first time, and sees no change from then on
//
// and as long as the topic is missing it joins again and again without a pause,
// which disturbs the topics that are there. Here what is known is older than the
// join, always.
type sizes struct {
	s      *Source
	topics []string
	known  map[string]int // nil if nobody could be asked
}

// ask counts; nil if that is not possible now.
func (z *sizes) ask(ctx context.Context) map[string]int {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	res, err := z.s.client().Metadata(ctx, &kafka.MetadataRequest{Topics: z.topics})
	if err != nil {
		return nil
	}
	n := make(map[string]int)
	for _, t := range res.Topics {
		switch {
		case t.Error == nil:
			n[t.Name] = len(t.Partitions)
		case !errors.Is(t.Error, kafka.UnknownTopicOrPartition):
			return nil // such as without a leader yet
		}
	}
	return n
}

// watch returns when the sizes have changed, which ends the generation, or when
// that has ended. That something is gone is believed when it was seen twice: a broker
// that has just been started may not know of all.
func (z *sizes) watch(ctx context.Context) {
	for missed := 0; ctx.Err() == nil; {
		pause(ctx, z.s.c.RefreshInterval)
		now := z.ask(ctx)
		switch {
		case now == nil:
			continue
		case z.known != nil && maps.Equal(now, z.known):
			missed = 0
			continue
		case shrunk(z.known, now):
			if missed++; missed < 2 {
				continue
			}
		}
		z.known = now
		return
	}
}

func shrunk(before, now map[string]int) bool {
	for topic, n := range before {
		if now[topic] < n {
			return true
		}
	}
	return false
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
