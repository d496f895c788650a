package kafkabroker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/segmentio/kafka-go"
)

// topology says how many partitions the topics have that are consumed and are
// there.
//
// The group is joined with those alone. When one of the topics that its members name
// is missing, the client gives nobody a partition of any topic:
//
//	a topic is deleted, or is not there yet
//	the group is shared out anew, and the member that does it asks for the partitions
//	  of all topics
//	the answer names the missing one, and kafka-go forgets what else it says
//
// And kafka-go can watch for changes, and must not: it counts for the first time
// after the join, so what has changed between is never seen, and as long as a topic is
// missing it joins again and again without a pause. Here what is known is older than
// the join, always.
type topology map[string]int

// look asks the broker. A topic of which it does not say how many partitions it
// has, such as one that may not be described any more, is as it was before, and the
// others are as they are.
func (s *Source) look(ctx context.Context, before topology) (topology, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	res, err := s.client().Metadata(ctx, &kafka.MetadataRequest{Topics: s.c.named()})
	if err != nil {
		return nil, fmt.Errorf("kafkabroker: look for topics: %w", err)
	}
	now, trouble := make(topology), make(map[string]error)
	for _, t := range res.Topics {
		if !s.c.consumes(t) {
			continue
		}
		if t.Error == nil {
			now[t.Name] = len(t.Partitions)
			continue
		}
		trouble[t.Name] = t.Error
		if n, ok := before[t.Name]; ok && !errors.Is(t.Error, kafka.UnknownTopicOrPartition) {
			now[t.Name] = n
		}
	}
	s.tell(trouble)
	if before == nil { // at the start: a mistake rather than an accident
		for topic, err := range trouble {
			if errors.Is(err, kafka.TopicAuthorizationFailed) {
				s.fail(fmt.Errorf("kafkabroker: topic %s: %w", topic, err))
			}
		}
	}
	return now, nil
}

// consumes reports whether a topic is one of those that are asked for.
func (c Config) consumes(t kafka.Topic) bool {
	if c.Pattern == nil {
		return true
	}
	return t.Name != "" && !t.Internal && !strings.HasPrefix(t.Name, "__") && c.Pattern.FindString(t.Name) == t.Name
}

// tell passes on what is wrong with topics, once as long as it is the same.
func (s *Source) tell(trouble map[string]error) {
	s.mu.Lock()
	told := s.told
	s.told = make(map[string]string, len(trouble))
	for topic, err := range trouble {
		s.told[topic] = err.Error()
	}
	s.mu.Unlock()
	for topic, err := range trouble {
		if told[topic] != err.Error() {
			s.c.OnError(fmt.Errorf("kafkabroker: topic %s: %w", topic, err))
		}
	}
}

// present waits until there is one of the topics; nil if ctx was done first.
func (s *Source) present(ctx context.Context) topology {
	for ctx.Err() == nil && !s.failed() {
		now, err := s.look(ctx, nil)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			s.c.OnError(err)
		case len(now) > 0:
			return now
		}
		pause(ctx, s.c.RefreshInterval)
	}
	return nil
}

// change returns what is there instead of known, as soon as it is not the same, or
// known when ctx is done. That something is gone is believed when it was seen
// twice: a broker that has just been started may not know of all.
func (s *Source) change(ctx context.Context, known topology, same func(a, b topology) bool) topology {
	for missed := 0; ctx.Err() == nil; {
		pause(ctx, s.c.RefreshInterval)
		now, err := s.look(ctx, known)
		switch {
		case err != nil || len(now) == 0:
			continue
		case same(known, now):
			missed = 0
			continue
		case shrunk(known, now):
			if missed++; missed < 2 {
				continue
			}
		}
		return now
	}
	return known
}

func sameTopics(a, b topology) bool {
	return maps.EqualFunc(a, b, func(int, int) bool { return true })
}

func samePartitions(a, b topology) bool { return maps.Equal(a, b) }

func shrunk(before, now topology) bool {
	for topic, n := range before {
		if now[topic] < n {
			return true
		}
	}
	return false
}

// whole is a balancer that looks by itself when the client gives it nothing to share
// out: members that have not heard of it yet name a topic that is gone.
type whole struct {
	kafka.GroupBalancer
	s *Source
}

// AssignGroups implements kafka.GroupBalancer.
func (w whole) AssignGroups(members []kafka.GroupMember, partitions []kafka.Partition) kafka.GroupMemberAssignments {
	if len(partitions) == 0 {
		partitions = w.s.partitionsOf(members)
	}
	return w.GroupBalancer.AssignGroups(members, partitions)
}

// partitionsOf returns those of all topics that members name and that are there.
func (s *Source) partitionsOf(members []kafka.GroupMember) (partitions []kafka.Partition) {
	var topics []string
	for _, m := range members {
		topics = append(topics, m.Topics...)
	}
	slices.Sort(topics)
	topics = slices.Compact(topics)
	tr := s.conns.transport(s.c.ClientID, s.c.TLS, s.c.SASL, topics...)
	defer tr.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	res, err := (&kafka.Client{Addr: s.addr, Transport: tr, Timeout: dialTimeout}).Metadata(ctx, &kafka.MetadataRequest{Topics: topics})
	if err != nil {
		s.c.OnError(fmt.Errorf("kafkabroker: look for the partitions of the group: %w", err))
		return nil
	}
	for _, t := range res.Topics {
		if t.Error == nil {
			partitions = append(partitions, t.Partitions...)
		}
	}
	return partitions
}
