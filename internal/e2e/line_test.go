package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/kafkabroker"
	"github.com/unecho/unecho/brokers/natsbroker"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
)

// line is the way from a publisher to the workers: a topic of a real broker.
type line struct {
	topic string
	pub   brokers.Publisher
	env   []string // of a worker
	// unsettled is how many messages no worker has settled for good.
	unsettled func() int64
	// source is the worker's, in this process.
	source func(t testing.TB) brokers.Source
	// graves is a topic that create makes, and reader a source of it.
	graves string
	create func(t testing.TB)
	reader func(t testing.TB) brokers.Source
}

func kafkaLine(t *testing.T, partitions int) *line {
	t.Helper()
	addrs, topic := testenv.Kafka(t), testenv.Topic(t, partitions)
	pub, err := kafkabroker.NewPublisher(kafkabroker.PublisherConfig{Brokers: addrs})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pub.Close() })
	graves := testenv.Name("dead-")
	source := func(group, topic string) func(t testing.TB) brokers.Source {
		return func(t testing.TB) brokers.Source {
			s, err := kafkabroker.NewSource(kafkabroker.Config{Brokers: addrs, GroupID: group, Topics: []string{topic}})
			return closing(t, s, err)
		}
	}
	return &line{topic: topic, pub: pub, source: source(topic, topic), graves: graves, reader: source(graves, graves),
		create: func(t testing.TB) {
			if err := kafkabroker.CreateTopic(t.Context(), addrs, graves, 1); err != nil {
				t.Fatal(err)
			}
		},
		env:       []string{"WORKER_KAFKA=" + strings.Join(addrs, ","), "WORKER_TOPIC=" + topic},
		unsettled: func() int64 { return kafkaLag(t, addrs, topic, partitions) }}
}

func natsLine(t *testing.T) *line {
	t.Helper()
	url, name, graves := testenv.NATS(t), testenv.Name("L"), testenv.Name("D")
	nc, err := natsbroker.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	stream(t, js, name)
	pub, err := natsbroker.NewPublisher(nc, natsbroker.PublisherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pub.Close() })
	source := func(durable, stream string) func(t testing.TB) brokers.Source {
		return func(t testing.TB) brokers.Source {
			s, err := natsbroker.NewSource(nc, natsbroker.Config{Stream: stream, Durable: durable, AckWait: 2 * time.Second})
			return closing(t, s, err)
		}
	}
	return &line{topic: name + ".orders", pub: pub, source: source("e2e", name), graves: graves + ".dead", reader: source("reader", graves),
		create: func(t testing.TB) { stream(t, js, graves) },
		env:    []string{"WORKER_NATS=" + url, "WORKER_TOPIC=" + name}, unsettled: func() int64 {
			s, err := js.Stream(t.Context(), name)
			if err != nil {
				t.Fatal(err)
			}
			c, err := s.Consumer(t.Context(), "e2e")
			if err != nil {
				return -1 // not there yet
			}
			return int64(s.CachedInfo().State.LastSeq - c.CachedInfo().AckFloor.Stream) //nolint:gosec // few
		}}
}

// stream makes a stream of a test's own.
func stream(t testing.TB, js jetstream.JetStream, name string) {
	t.Helper()
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}, MaxAge: time.Hour, Storage: jetstream.MemoryStorage}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = js.DeleteStream(context.Background(), name) })
}

// closing closes a source with the test.
func closing(t testing.TB, s brokers.Source, err error) brokers.Source {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// place publishes orders order-0, order-1 and so on.
func (l *line) place(t testing.TB, n int) {
	t.Helper()
	ms := make([]*envelope.Message, n)
	for i := range ms {
		id := fmt.Sprint("order-", i)
		body, err := json.Marshal(map[string]any{"id": id, "customer": i % customers, "seq": i})
		if err != nil {
			t.Fatal(err)
		}
		ms[i] = &envelope.Message{ID: id, Source: "/shop", Type: "order.placed", Topic: l.topic, Key: fmt.Append(nil, i%customers),
			ContentType: "application/json", Body: body}
	}
	if err := l.pub.Publish(t.Context(), ms).Err(); err != nil {
		t.Fatal(err)
	}
}

// each demands one effect of each of n orders.
func (s *shop) each(n int) {
	s.t.Helper()
	for what, sql := range map[string]string{
		"orders with an effect": "select count(distinct order_id) from effects",
		"effects":               "select count(*) from effects",
		"sum of the balances":   "select sum(balance) from customers",
	} {
		if got := s.count(sql); got != n {
			s.t.Errorf("%s: %d, want %d", what, got, n)
		}
	}
}

// worker is the environment of a worker on this line, with the database at url.
func (l *line) worker(url string, more ...string) []string {
	return slices.Concat(l.env, []string{"WORKER_DATABASE=" + url}, more)
}

// onBrokers runs a test on each real broker.
func onBrokers(t *testing.T, run func(t *testing.T, l *line)) {
	t.Run("Kafka", func(t *testing.T) { run(t, kafkaLine(t, 4)) })
	t.Run("NATS", func(t *testing.T) { run(t, natsLine(t)) })
}
