package kafkabroker

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

// transactor is a producer with transactions, which kafka-go has not.
func (f *fixture) transactor(t testing.TB) *kgo.Client {
	t.Helper()
	c, err := kgo.NewClient(kgo.SeedBrokers(f.brokers...), kgo.TransactionalID(f.topic), kgo.DefaultProduceTopic(f.topic),
		kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// write produces values to partition 0 in a transaction, which is left open.
func write(t testing.TB, c *kgo.Client, values ...string) {
	t.Helper()
	if err := c.BeginTransaction(); err != nil {
		t.Fatal(err)
	}
	for _, v := range values {
		if err := c.ProduceSync(t.Context(), &kgo.Record{Value: []byte(v)}).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
}

func end(t testing.TB, c *kgo.Client, how kgo.TransactionEndTry) {
	t.Helper()
	if err := c.EndTransaction(t.Context(), how); err != nil {
		t.Fatal(err)
	}
}

// bodies receives and acknowledges n messages.
func bodies(t testing.TB, s *Source, n int) (got []string) {
	t.Helper()
	for range n {
		d := next(t, s)
		got = append(got, string(d.Message.Body))
		if err := s.Ack(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	return got
}

// nothing demands that nothing comes for a while.
func nothing(t testing.TB, s *Source) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*fetchWait)
	defer cancel()
	if d, err := s.Receive(ctx); err == nil {
		t.Errorf("received %q", d.Message.Body)
	}
}

// What a transaction has written that was aborted has no effect, and what one
// writes that is open has none yet. The markers that end transactions are no
// messages either, and the group's offset comes to lie behind them.
func TestReadCommitted(t *testing.T) {
	both(t, 1, func(t *testing.T, f *fixture) {
		c := f.transactor(t)
		write(t, c, "a1", "a2")
		end(t, c, kgo.TryCommit)
		write(t, c, "x1", "x2", "x3")
		end(t, c, kgo.TryAbort)
		write(t, c, "b1")
		end(t, c, kgo.TryCommit)
		f.produce(t, 1)
		write(t, c, "y1")
		end(t, c, kgo.TryAbort)
		write(t, c, "open1", "open2")

		s := f.source(t, f.config("g"))
		got := bodies(t, s, 4)
		if want := []string{"a1", "a2", "b1"}; !slices.Equal(got[:3], want) {
			t.Errorf("received %q, want %q and what was written without a transaction", got, want)
		}
		nothing(t, s)
		all := f.config("all")
		all.Uncommitted = true
		if got := bodies(t, f.source(t, all), 10); !slices.Contains(got, "x2") || !slices.Contains(got, "open2") {
			t.Errorf("with Uncommitted %q were received", got)
		}
		end(t, c, kgo.TryCommit)
		if got := bodies(t, s, 2); !slices.Equal(got, []string{"open1", "open2"}) {
			t.Errorf("after the commit %q were received", got)
		}
		testenv.Within(t, 10*time.Second, "the group's offset is behind the last marker", func() bool { return f.committed(t, "g", 0) == f.last(t) })
	})
}

// last is the end of partition 0.
func (f *fixture) last(t testing.TB) int64 {
	t.Helper()
	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	c := &kafka.Client{Addr: kafka.TCP(f.brokers...), Transport: tr}
	res, err := c.ListOffsets(t.Context(), &kafka.ListOffsetsRequest{Topics: map[string][]kafka.OffsetRequest{f.topic: {kafka.LastOffsetOf(0)}}})
	if err != nil {
		t.Fatal(err)
	}
	return res.Topics[f.topic][0].LastOffset
}

// A source that begins in the middle of a transaction knows what became of it.
func TestReadCommittedFromTheMiddle(t *testing.T) {
	both(t, 1, func(t *testing.T, f *fixture) {
		c := f.transactor(t)
		write(t, c, "x1", "x2", "x3", "x4")
		end(t, c, kgo.TryAbort)
		write(t, c, "a1")
		end(t, c, kgo.TryCommit)
		s := f.source(t, f.config("g"))
		for at := range int64(5) {
			pg, err := s.fetch(t.Context(), f.topic, 0, portion{at, 0, 1 << 20, 1 << 20})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, r := range pg.records {
				got = append(got, string(r.msg.Body))
			}
			if !slices.Equal(got, []string{"a1"}) {
				t.Errorf("from offset %d: %q", at, got)
			}
		}
	})
}

// Compaction leaves batches whose last records are gone. At the end of a segment
// the broker returns such a batch alone, for every offset in its range, and a
// reader that asks for what follows its last record asks for ever.
func TestCompactedTails(t *testing.T) {
	server := proc.StartKafka(t)
	f := &fixture{brokers: []string{server.Addr}, topic: "compacted"}
	admin(t, f, map[string]string{"cleanup.policy": "compact", "segment.bytes": "1048576", "min.cleanable.dirty.ratio": "0.001", "min.compaction.lag.ms": "0"})
	c, err := kgo.NewClient(kgo.SeedBrokers(f.brokers...), kgo.DefaultProduceTopic(f.topic), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerLinger(50*time.Millisecond),
		kgo.ProducerBatchCompression(kgo.NoCompression()))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	put := func(records ...*kgo.Record) {
		t.Helper()
		if err := c.ProduceSync(t.Context(), records...).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	record := func(key, value string) *kgo.Record { return &kgo.Record{Key: []byte(key), Value: []byte(value)} }
	filler, n := strings.Repeat("x", 200_000), 0
	fill := func(records int) { // they stay, so that segments are not merged
		for range records {
			n++
			put(record(fmt.Sprint("filler", n), filler))
		}
	}
	// The first segment ends with a batch of which only the first record stays.
	fill(5)
	batch := []*kgo.Record{record("keep", "kept")}
	for i := range 20 {
		batch = append(batch, record(fmt.Sprint("k", i), "old"))
	}
	put(batch...)
	fill(3)
	for i := range 20 {
		put(record(fmt.Sprint("k", i), "new"))
	}
	fill(8)
	put(record("end", "end"))
	s := f.source(t, f.config("probe"))
	testenv.Within(t, 60*time.Second, "the batch is compacted, and comes alone", func() bool {
		pg, err := s.fetch(t.Context(), f.topic, 0, portion{5, 0, 1 << 20, 1 << 20})
		return err == nil && len(pg.records) == 1
	})
	seen := map[string]bool{}
	for !seen["end"] {
		d := next(t, s)
		seen[string(d.Message.Key)] = true
		if err := s.Ack(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 20 {
		if !seen[fmt.Sprint("k", i)] {
			t.Errorf("k%d was passed over", i)
		}
	}
	testenv.Within(t, 10*time.Second, "the group's offset is at the end", func() bool { return f.committed(t, "probe", 0) == f.last(t) })
}

// admin creates the topic of f with one partition and settings.
func admin(t testing.TB, f *fixture, settings map[string]string) {
	t.Helper()
	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	c := &kafka.Client{Addr: kafka.TCP(f.brokers...), Transport: tr, Timeout: 10 * time.Second}
	topic := kafka.TopicConfig{Topic: f.topic, NumPartitions: 1, ReplicationFactor: 1}
	for name, value := range settings {
		topic.ConfigEntries = append(topic.ConfigEntries, kafka.ConfigEntry{ConfigName: name, ConfigValue: value})
	}
	res, err := c.CreateTopics(t.Context(), &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{topic}})
	if err != nil || res.Errors[f.topic] != nil {
		t.Fatal(err, res)
	}
}
