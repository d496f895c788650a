package kafkabroker

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/brokertest"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
)

// both runs a test on the emulated Kafka and on the real one.
func both(t *testing.T, partitions int, f func(t *testing.T, f *fixture)) {
	t.Run("emulated", func(t *testing.T) { f(t, openFake(t, partitions)) })
	t.Run("real", func(t *testing.T) { f(t, openReal(t, partitions)) })
}

func (f *fixture) produce(t testing.TB, n int) {
	t.Helper()
	var msgs []*envelope.Message
	for i := range n {
		msgs = append(msgs, brokertest.Event(f.topic, "k", i))
	}
	if err := f.Publisher(t).Publish(t.Context(), msgs).Err(); err != nil {
		t.Fatal(err)
	}
}

func next(t testing.TB, s *Source) *brokers.Delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	d, err := s.Receive(ctx)
	if err != nil {
		t.Fatalf("receive: %v", err)
	}
	return d
}

// committed asks the broker for the group's offset of a partition; -1 is none.
func (f *fixture) committed(t testing.TB, group string, partition int) int64 {
	t.Helper()
	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	c := &kafka.Client{Addr: kafka.TCP(f.brokers...), Transport: tr}
	res, err := c.OffsetFetch(t.Context(), &kafka.OffsetFetchRequest{GroupID: f.topic + group, Topics: map[string][]int{f.topic: {partition}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range res.Topics[f.topic] {
		return p.CommittedOffset
	}
	return -1 // the group does not exist yet
}

// B17: A holds a delivery while B joins. What A then acknowledges must not
// touch the group's offset, which B may have moved on by now.
func TestB17StaleAckMovesNothing(t *testing.T) {
	both(t, 1, func(t *testing.T, f *fixture) {
		f.produce(t, 20)
		c := f.config("g")
		a := f.source(t, c)
		held := next(t, a)
		b := f.source(t, c) // ends A's generation, when the drain's bound is over
		select {
		case <-held.Stopping:
		case <-time.After(20 * time.Second):
			t.Fatal("Stopping is not closed")
		}
		select {
		case <-held.Lost:
			t.Fatal("lost before the bound of the drain is over")
		default:
		}
		select {
		case <-held.Lost:
		case <-time.After(20 * time.Second):
			t.Fatal("Lost is not closed")
		}
		if err := a.Ack(t.Context(), held); !errors.Is(err, brokers.ErrLost) {
			t.Errorf("ack after the generation has ended: %v, want ErrLost", err)
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		for range 20 {
			if err := b.Ack(t.Context(), next(t, b)); err != nil {
				t.Fatal(err)
			}
		}
		testenv.Within(t, 10*time.Second, "offset 20 is committed", func() bool { return f.committed(t, "g", 0) == 20 })
		if err := a.Ack(t.Context(), held); !errors.Is(err, brokers.ErrLost) {
			t.Errorf("ack after close: %v, want ErrLost", err)
		}
		if got := f.committed(t, "g", 0); got != 20 {
			t.Errorf("a stale ack moved the group's offset to %d", got)
		}
	})
}

// A handler that runs when the generation ends may finish, and what it did is
// committed before the partition goes to somebody else.
func TestDrainCommitsWhatFinishes(t *testing.T) {
	both(t, 1, func(t *testing.T, f *fixture) {
		f.produce(t, 3)
		c := f.config("g")
		c.CommitInterval = time.Hour // only the drain commits
		a := f.source(t, c)
		d := next(t, a)
		second := next(t, a)
		b := f.source(t, c)
		<-d.Stopping
		if err := a.Ack(t.Context(), d); err != nil {
			t.Fatalf("ack during the drain: %v", err)
		}
		if err := a.Return(t.Context(), second); err != nil {
			t.Fatalf("return during the drain: %v", err)
		}
		<-d.Lost // at once: nothing is left to wait for
		if got := f.committed(t, "g", 0); got != 1 {
			t.Errorf("offset %d is committed after the drain, want 1", got)
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		if got := next(t, b).Message.Position; !strings.HasSuffix(got, "/0/1") {
			t.Errorf("the next owner begins at %s, want offset 1", got)
		}
	})
}

// B19: a group that begins at the newest message pins that position at once.
// What is produced while it is down after that is not lost.
func TestB19NewestIsPinned(t *testing.T) {
	both(t, 1, func(t *testing.T, f *fixture) {
		f.produce(t, 2)
		c := f.config("g")
		c.Start = Newest
		s := f.source(t, c)
		testenv.Within(t, 20*time.Second, "the position is committed", func() bool { return f.committed(t, "g", 0) == 2 })
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		f.produce(t, 1)
		if got := next(t, f.source(t, c)).Message.Position; !strings.HasSuffix(got, "/0/2") {
			t.Errorf("received %s first, want offset 2", got)
		}
	})
}

// An offset that is not in the log is said, or reset if that was asked for.
func TestOffsetOutOfRange(t *testing.T) {
	both(t, 1, func(t *testing.T, f *fixture) {
		f.produce(t, 2)
		gone := func(group string) Config {
			tr := &kafka.Transport{}
			defer tr.CloseIdleConnections()
			c := &kafka.Client{Addr: kafka.TCP(f.brokers...), Transport: tr}
			res, err := c.OffsetCommit(t.Context(), &kafka.OffsetCommitRequest{GroupID: f.topic + group, GenerationID: -1,
				Topics: map[string][]kafka.OffsetCommit{f.topic: {{Partition: 0, Offset: 1000}}}})
			if err != nil {
				t.Fatal(err)
			}
			if err := res.Topics[f.topic][0].Error; err != nil {
				t.Fatal(err)
			}
			return f.config(group)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		_, err := f.source(t, gone("fail")).Receive(ctx)
		if !errors.Is(err, ErrOutOfRange) || !strings.Contains(err.Error(), "1000") {
			t.Errorf("receive: %v, want ErrOutOfRange that names the offset", err)
		}
		c := gone("reset")
		c.OutOfRange = ResetToOldest
		if got := next(t, f.source(t, c)).Message.Position; !strings.HasSuffix(got, "/0/0") {
			t.Errorf("received %s first, want offset 0", got)
		}
	})
}

// A window that is full names what it waits for, and holds up its own
// partition only.
func TestB16WindowNamesTheStuckOffset(t *testing.T) {
	f := openFake(t, 2)
	c := f.config("g")
	c.Window = 4
	s := f.source(t, c)
	p := f.Publisher(t)
	var msgs []*envelope.Message
	for i := range 40 {
		msgs = append(msgs, brokertest.Event(f.topic, string(rune('a'+i%8)), i))
	}
	if err := p.Publish(t.Context(), msgs).Err(); err != nil {
		t.Fatal(err)
	}
	stuck, rest := next(t, s), 0
	for rest < 40 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		d, err := s.Receive(ctx)
		cancel()
		if err != nil {
			break
		}
		rest++
		if err := s.Ack(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	got := s.Stuck()
	if len(got) != 1 || got[0].Offset != 0 || got[0].Behind != 3 || !strings.HasPrefix(stuck.Lane, got[0].Topic) {
		t.Errorf("stuck: %+v", got)
	}
	if rest < 4 || rest == 39 {
		t.Errorf("%d others were received: the other partition must go on and this one must not", rest)
	}
}

// Close is bounded although nobody answers.
func TestCloseWithoutABroker(t *testing.T) {
	s, err := NewSource(Config{Brokers: []string{"127.0.0.1:1"}, GroupID: "g", Topics: []string{"t"}})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Close() }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("Close does not return")
	}
}

func TestPublishWithoutABroker(t *testing.T) {
	p, err := NewPublisher(PublisherConfig{Brokers: []string{"127.0.0.1:1"}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	res := p.Publish(ctx, []*envelope.Message{brokertest.Event("t", "k", 0)})
	if !errors.Is(res[0], brokers.ErrUnavailable) {
		t.Errorf("publish to nobody: %v, want ErrUnavailable", res[0])
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

func TestClassify(t *testing.T) {
	for _, c := range []struct{ err, want error }{
		{kafka.UnknownTopicOrPartition, brokers.ErrNoRoute},
		{kafka.NotLeaderForPartition, brokers.ErrUnavailable},
		{kafka.NotEnoughReplicas, brokers.ErrUnavailable},
		{kafka.NotEnoughReplicasAfterAppend, brokers.ErrUnknown},
		{kafka.RequestTimedOut, brokers.ErrUnknown},
		{kafka.MessageSizeTooLarge, brokers.ErrRejected},
		{kafka.TopicAuthorizationFailed, brokers.ErrRejected},
		{kafka.InvalidTopic, brokers.ErrRejected},
		{context.DeadlineExceeded, brokers.ErrUnknown},
		{errors.New("EOF"), brokers.ErrUnknown},
	} {
		if got := classify(c.err); !errors.Is(got, c.want) || !errors.Is(got, c.err) {
			t.Errorf("classify(%v) = %v, want %v", c.err, got, c.want)
		}
	}
	if classify(nil) != nil {
		t.Error("no error became one")
	}
}

// Keys go where the Java client puts them: vectors of its murmur2.
func TestPartitionOfKeyIsThatOfTheJavaClient(t *testing.T) {
	p := &Publisher{}
	ids := make([]int, 1000)
	for i := range ids {
		ids[i] = i
	}
	for key, hash := range map[string]int32{"21": -973932308, "foobar": -790332482, "a-little-bit-long-string": -985981536,
		"a-little-bit-longer-string": -1486304829, "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971} {
		if got, want := p.partitionOf("t", []byte(key), ids), int(hash&0x7fffffff)%1000; got != want {
			t.Errorf("key %q goes to %d, want %d", key, got, want)
		}
	}
}
