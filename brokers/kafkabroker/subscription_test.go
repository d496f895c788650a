package kafkabroker

import (
	"context"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/unecho/unecho/internal/testenv"
)

// put produces values to a partition of a topic.
func (f *fixture) put(t testing.TB, topic string, partition int32, values ...string) {
	t.Helper()
	c, err := kgo.NewClient(kgo.SeedBrokers(f.brokers...), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.MetadataMinAge(50*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, v := range values {
		if err := c.ProduceSync(t.Context(), &kgo.Record{Topic: topic, Partition: partition, Value: []byte(v)}).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
}

// create makes a topic that goes with the test.
func (f *fixture) create(t testing.TB, topic string) {
	t.Helper()
	if err := CreateTopic(t.Context(), f.brokers, topic, 1); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		tr := &kafka.Transport{}
		defer tr.CloseIdleConnections()
		c := &kafka.Client{Addr: kafka.TCP(f.brokers...), Transport: tr}
		_, _ = c.DeleteTopics(context.Background(), &kafka.DeleteTopicsRequest{Topics: []string{topic}})
	})
}

// A pattern finds the topics that there are, and those that come later; what is in
// hand when they do is finished and committed.
func TestPattern(t *testing.T) {
	both(t, 1, func(t *testing.T, f *fixture) {
		prefix := testenv.Name("p-")
		for _, name := range []string{"a", "b"} {
			f.create(t, prefix+name)
			f.put(t, prefix+name, 0, name)
		}
		f.create(t, "not-"+prefix)
		f.put(t, "not-"+prefix, 0, "another")
		c := f.config("g")
		c.Topics, c.Pattern, c.RefreshInterval = nil, regexp.MustCompile(regexp.QuoteMeta(prefix)+"."), 200*time.Millisecond
		s := f.source(t, c)
		got := bodies(t, s, 2)
		if slices.Sort(got); !slices.Equal(got, []string{"a", "b"}) {
			t.Errorf("received %q", got)
		}
		nothing(t, s)
		f.put(t, prefix+"a", 0, "in hand")
		d := next(t, s)
		f.create(t, prefix+"c")
		f.put(t, prefix+"c", 0, "c")
		<-d.Stopping
		if err := s.Ack(t.Context(), d); err != nil {
			t.Errorf("what was in hand when a topic came: %v", err)
		}
		if got := bodies(t, s, 1); got[0] != "c" {
			t.Errorf("received %q", got)
		}
		nothing(t, s)
		if got, err := s.topics(t.Context()); err != nil || !slices.Equal(got, []string{prefix + "a", prefix + "b", prefix + "c"}) {
			t.Errorf("topics %q, %v", got, err)
		}
	})
}

// Kafka's own topics match no pattern, nor does a part of a name.
func TestPatternIsOfWholeNames(t *testing.T) {
	both(t, 1, func(t *testing.T, f *fixture) {
		f.put(t, f.topic, 0, "x")
		bodies(t, f.source(t, f.config("g")), 1) // and there is __consumer_offsets
		for pattern, want := range map[string]bool{".*": true, regexp.QuoteMeta(f.topic): true, regexp.QuoteMeta(f.topic[:len(f.topic)-1]): false, "__.*": false} {
			s := &Source{c: Config{Pattern: regexp.MustCompile(pattern), OnError: func(error) {}}, addr: kafka.TCP(f.brokers...)}
			s.transport = s.conns.transport("test", nil, nil)
			topics, err := s.topics(t.Context())
			if err != nil || slices.Contains(topics, f.topic) != want || slices.ContainsFunc(topics, func(n string) bool { return strings.HasPrefix(n, "__") }) {
				t.Errorf("%q matches %q, %v", pattern, topics, err)
			}
			s.transport.CloseIdleConnections()
		}
	})
}

// A partition that is added is consumed from its beginning.
func TestAddedPartitions(t *testing.T) {
	both(t, 1, func(t *testing.T, f *fixture) {
		c := f.config("g")
		c.RefreshInterval = 200 * time.Millisecond
		s := f.source(t, c)
		f.put(t, f.topic, 0, "first")
		bodies(t, s, 1)
		tr := &kafka.Transport{}
		defer tr.CloseIdleConnections()
		client := &kafka.Client{Addr: kafka.TCP(f.brokers...), Transport: tr}
		if res, err := client.CreatePartitions(t.Context(), &kafka.CreatePartitionsRequest{Topics: []kafka.TopicPartitionsConfig{{Name: f.topic, Count: 2}}}); err != nil || res.Errors[f.topic] != nil {
			t.Fatal(err, res)
		}
		f.put(t, f.topic, 1, "second")
		if got := bodies(t, s, 1); got[0] != "second" {
			t.Errorf("received %q", got)
		}
	})
}

// A fixed list of partitions is consumed from what is committed for the group, by
// nobody's leave.
func TestFixedPartitions(t *testing.T) {
	both(t, 3, func(t *testing.T, f *fixture) {
		c := f.config("fixed")
		c.Topics, c.Partitions = nil, map[string][]int{f.topic: {0, 2}}
		for i, v := range []string{"a", "b", "c"} {
			f.put(t, f.topic, int32(i), v)
		}
		s := f.source(t, c)
		got := bodies(t, s, 2)
		if slices.Sort(got); !slices.Equal(got, []string{"a", "c"}) {
			t.Errorf("received %q", got)
		}
		f.put(t, f.topic, 0, "d", "e")
		d := next(t, s)
		if err := s.Return(t.Context(), d); err != nil {
			t.Fatal(err)
		}
		if got := bodies(t, s, 1); got[0] != "d" {
			t.Errorf("received %q after d was returned", got)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if got := bodies(t, f.source(t, c), 1); got[0] != "e" {
			t.Errorf("the next source begins with %q", got)
		}
	})
}

// Where the group has members, a fixed list of partitions cannot be committed, and
// says so instead of beginning anew at every start.
func TestFixedPartitionsOfAGroupWithMembers(t *testing.T) {
	f := openReal(t, 1)
	f.put(t, f.topic, 0, "a")
	bodies(t, f.source(t, f.config("g")), 1)
	c := f.config("g")
	c.Topics, c.Partitions, c.Start = nil, map[string][]int{f.topic: {0}}, Oldest
	s := f.source(t, c)
	f.put(t, f.topic, 0, "b", "c")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for {
		d, err := s.Receive(ctx)
		if err != nil {
			if !strings.Contains(err.Error(), "has members") {
				t.Errorf("Receive: %v", err)
			}
			return
		}
		if err := s.Ack(ctx, d); err != nil {
			t.Fatal(err)
		}
		f.put(t, f.topic, 0, "more")
	}
}

func TestSubscriptionErrors(t *testing.T) {
	for want, c := range map[string]Config{
		"0 of Config.Topics":                {},
		"2 of Config.Topics":                {Topics: []string{"t"}, Pattern: regexp.MustCompile("t")},
		`topic "t" has the partitions []`:   {Partitions: map[string][]int{"t": nil}},
		`topic "t" has the partitions [1 1`: {Partitions: map[string][]int{"t": {1, 1}}},
		`topic "t" has the partitions [-1`:  {Partitions: map[string][]int{"t": {-1}}},
	} {
		c.Brokers, c.GroupID = []string{"x"}, "g"
		if _, err := NewSource(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}
