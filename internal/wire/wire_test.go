// Package wire shows that one event is one event on every broker and in every
// mode: what a real Kafka and a real NATS make of it has one identity and one
// content.
package wire

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/kafkabroker"
	"github.com/unecho/unecho/brokers/natsbroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// way is a topic of a broker, and a mode in which events are written to it.
type way struct {
	name, topic string
	pub         brokers.Publisher
	source      func(t *testing.T) brokers.Source
}

// ways are all brokers in all modes.
func ways(t *testing.T) (all []*way) {
	t.Helper()
	for name, mode := range map[string]envelope.Mode{"binary": envelope.Binary, "structured": envelope.Structured} {
		all = append(all, kafka(t, name, mode), nats(t, name, mode))
	}
	return all
}

func kafka(t *testing.T, name string, mode envelope.Mode) *way {
	t.Helper()
	addrs, topic := testenv.Kafka(t), testenv.Topic(t, 1)
	p, err := kafkabroker.NewPublisher(kafkabroker.PublisherConfig{Brokers: addrs, Mode: mode})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return &way{name: "Kafka " + name, topic: topic, pub: p, source: func(t *testing.T) brokers.Source {
		s, err := kafkabroker.NewSource(kafkabroker.Config{Brokers: addrs, GroupID: topic, Topics: []string{topic}})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}}
}

func nats(t *testing.T, name string, mode envelope.Mode) *way {
	t.Helper()
	nc, err := natsbroker.Connect(testenv.NATS(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	stream := testenv.Name("W")
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: stream, Subjects: []string{stream + ".>"}, MaxAge: time.Hour, Storage: jetstream.MemoryStorage}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = js.DeleteStream(context.Background(), stream) })
	p, err := natsbroker.NewPublisher(nc, natsbroker.PublisherConfig{Mode: mode})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return &way{name: "NATS " + name, topic: stream + ".events", pub: p, source: func(t *testing.T) brokers.Source {
		s, err := natsbroker.NewSource(nc, natsbroker.Config{Stream: stream, Durable: "wire", MaxAckPending: 1})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}}
}

// told is what a consumer has made of what came.
type told struct {
	mu       sync.Mutex
	outcomes map[dedupe.Outcome]int
	keys     map[string]bool
	dead     []string // reasons
	bodies   [][]byte // of dead letters
	handled  []string // ids
}

// consume handles all that is on a way, until the event "last" was handled.
func (w *way) consume(t *testing.T, st dedupe.Store[*memdedupe.Tx], last string) *told {
	t.Helper()
	got := &told{outcomes: map[dedupe.Outcome]int{}, keys: map[string]bool{}}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	h := consumer.Wrap("wire", st, func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
		got.mu.Lock()
		defer got.mu.Unlock()
		got.handled = append(got.handled, m.ID)
		return nil
	}, nil)
	err := consumer.Run(ctx, w.source(t), h, &consumer.RunOptions{AcceptShortRetention: true, MaxAttempts: 3,
		DeadLetter: func(_ context.Context, f *consumer.Failure) error {
			got.mu.Lock()
			defer got.mu.Unlock()
			got.dead, got.bodies = append(got.dead, f.Reason), append(got.bodies, slices.Clone(f.Message.Body))
			return nil
		},
		Observer: consumer.ObserverFunc(func(_ context.Context, e consumer.Event) {
			got.mu.Lock()
			defer got.mu.Unlock()
			switch {
			case e.Step == consumer.StepDecide && e.Err == nil:
				got.outcomes[e.Outcome]++
				got.keys[e.KeyHash] = true
			case e.Step == consumer.StepAck && slices.Contains(got.handled, last):
				cancel()
			}
		})})
	if err != nil {
		t.Fatalf("%s: %v", w.name, err)
	}
	if !slices.Contains(got.handled, last) {
		t.Fatalf("%s: the last event did not come: handled %q, dead letters %q", w.name, got.handled, got.dead)
	}
	return got
}

func (w *way) publish(t *testing.T, m *envelope.Message) error {
	t.Helper()
	m = m.Clone()
	m.Topic = w.topic
	return w.pub.Publish(t.Context(), []*envelope.Message{m}).Err()
}

// event is the least that an event has, with more.
func event(id string, more ...func(m *envelope.Message)) *envelope.Message {
	m := &envelope.Message{ID: id, Source: "/wire", Type: "test.event", ContentType: "application/json", Body: []byte(`{"n":1}`)}
	for _, f := range more {
		f(m)
	}
	return m
}

// events are those that every broker carries in every mode.
func events() map[string]*envelope.Message {
	all := map[string]*envelope.Message{
		"plain":            event("plain"),
		"a null body":      event("e0", func(m *envelope.Message) { m.Body, m.ContentType = nil, "" }),
		"an empty body":    event("e1", func(m *envelope.Message) { m.Body, m.ContentType = []byte{}, "" }),
		"text":             event("e2", func(m *envelope.Message) { m.Body, m.ContentType = []byte("ä\n\t\"x\""), "text/plain; charset=utf-8" }),
		"bytes":            event("e3", func(m *envelope.Message) { m.Body, m.ContentType = all256(), "application/octet-stream" }),
		"bytes of no type": event("e4", func(m *envelope.Message) { m.Body, m.ContentType = all256(), "" }),
		"a JSON string":    event("e5", func(m *envelope.Message) { m.Body = []byte(`"x"`) }),
		"a JSON number":    event("e6", func(m *envelope.Message) { m.Body = []byte(`12345678901234567890.10`) }),
		"a JSON parameter": event("e7", func(m *envelope.Message) { m.ContentType = "application/json; charset=utf-8" }),
		"everything": event("e8", func(m *envelope.Message) {
			m.Subject, m.DataSchema, m.Time = "sub/ject", "https://example.org/s", time.Date(2026, 1, 2, 3, 4, 5, 678_000_000, time.UTC)
			m.Extensions = map[string]string{"correlationid": "c", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1,b=2"}
			m.Key = []byte("customer-1")
		}),
		"an odd subject": event("e9", func(m *envelope.Message) { m.Subject = `a "quoted" 100% ü` }),
		"a long id":      event(strings.Repeat("i", 1024)),
		"64 KiB":         event("e10", func(m *envelope.Message) { m.Body = []byte(`{"x":"` + strings.Repeat("y", 64<<10) + `"}`) }),
	}
	for i, id := range []string{"é", "%20", `a"b`, "a b", "a/b:c", "😀", "a,b;c=d", "+", "A", "a"} {
		all[fmt.Sprint("an odd id ", i)] = event(id)
	}
	return all
}

func all256() []byte {
	b := make([]byte, 256)
	for i := range b {
		b[i] = byte(i)
	}
	return b
}

// Whatever the way, an event is the one that came by the first: no second effect,
// and no conflict.
func TestOneEventOnEveryWay(t *testing.T) {
	st := memdedupe.NewStore(nil)
	table := events()
	for i, w := range ways(t) {
		for name, m := range table {
			if err := w.publish(t, m); err != nil {
				t.Errorf("%s: %s: %v", w.name, name, err)
			}
		}
		last := fmt.Sprint("last ", i)
		if err := w.publish(t, event(last)); err != nil {
			t.Fatal(err)
		}
		got := w.consume(t, st, last)
		want := map[dedupe.Outcome]int{dedupe.Processed: 1, dedupe.Duplicate: len(table)}
		if i == 0 {
			want = map[dedupe.Outcome]int{dedupe.Processed: len(table) + 1}
		}
		if fmt.Sprint(got.outcomes) != fmt.Sprint(want) || len(got.keys) != len(table)+1 || len(got.dead) > 0 {
			t.Errorf("%s: %v with %d keys and the dead letters %q, want %v and %d keys", w.name, got.outcomes, len(got.keys), got.dead, want, len(table)+1)
		}
	}
}

// B13: an id that a broker would change is refused by all publishers alike, and nothing
// of it is sent.
func TestB13OddIDsAreRefusedAlike(t *testing.T) {
	st := memdedupe.NewStore(nil)
	for i, w := range ways(t) {
		for _, id := range []string{"", " a", "a ", "a\nb", "a\tb", "a\r\nEvil: 1", "a\x00", "\x7f", "\xff", "   "} {
			m := event(id)
			if err := w.publish(t, m); !errors.Is(err, brokers.ErrRejected) {
				t.Errorf("%s: id %q: %v, want ErrRejected", w.name, id, err)
			}
		}
		last := fmt.Sprint("last ", i)
		if err := w.publish(t, event(last)); err != nil {
			t.Fatal(err)
		}
		if got := w.consume(t, st, last); len(got.handled) != 1 || len(got.dead) != 0 {
			t.Errorf("%s: handled %q, dead letters %q", w.name, got.handled, got.dead)
		}
	}
}
