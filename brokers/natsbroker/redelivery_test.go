package natsbroker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/brokertest"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

func (f *fixture) produce(t testing.TB, n int) {
	t.Helper()
	var msgs []*envelope.Message
	for i := range n {
		msgs = append(msgs, brokertest.Event(f.Topic(), "k", i))
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

func (f *fixture) js(t testing.TB) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(f.connect(t))
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// B20: a handler that takes three times AckWait runs once for each message,
// with one replica and with two.
func TestB20SlowHandlersRunOnce(t *testing.T) {
	url := embedded(t)
	for _, replicas := range []int{1, 2} {
		t.Run(fmt.Sprint(replicas, " replicas"), func(t *testing.T) {
			f := open(t, url)
			f.ackWait = 300 * time.Millisecond
			f.produce(t, 6)
			var mu sync.Mutex
			runs := map[string]int{}
			all := make(chan struct{})
			h := consumer.HandlerFunc(func(_ context.Context, m *envelope.Message) error {
				mu.Lock()
				runs[m.Position]++
				mu.Unlock()
				time.Sleep(3 * f.ackWait) // the work
				mu.Lock()
				defer mu.Unlock()
				if len(runs) == 6 {
					select {
					case <-all:
					default:
						close(all)
					}
				}
				return nil
			})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, replicas)
			for range replicas {
				s := f.source(t, f.config("g"))
				go func() {
					done <- consumer.Run(ctx, s, h, &consumer.RunOptions{DeadLetter: consumer.Discard, Concurrency: 2})
				}()
			}
			select {
			case <-all:
			case <-time.After(30 * time.Second):
				t.Error("not all were handled")
			}
			cancel()
			for range replicas {
				if err := <-done; err != nil {
					t.Error(err)
				}
			}
			for pos, n := range runs {
				if n != 1 {
					t.Errorf("%s was handled %d times", pos, n)
				}
			}
		})
	}
}

// B21: worker 1 stalls past AckWait, worker 2 has the redelivery. What worker 1
// then says must not settle it: when worker 2 fails, it comes a third time.
func TestB21LateAnswersSettleNothing(t *testing.T) {
	f := open(t, embedded(t))
	f.ackWait = 400 * time.Millisecond
	f.produce(t, 1)
	one := f.source(t, f.config("g"))
	first := next(t, one)
	one.stop() // neither heartbeats nor pulls: it has stalled
	two := f.source(t, f.config("g"))
	second := next(t, two)
	if second.Attempt != 2 {
		t.Fatalf("attempt %d, want the redelivery", second.Attempt)
	}
	for what, err := range map[string]error{
		"ack":    one.Ack(t.Context(), first),
		"nack":   one.Nack(t.Context(), first, 0),
		"return": one.Return(t.Context(), first),
	} {
		if !errors.Is(err, brokers.ErrLost) {
			t.Errorf("late %s: %v, want ErrLost", what, err)
		}
	}
	if err := one.Close(); err != nil {
		t.Fatal(err)
	}
	if err := two.Nack(t.Context(), second, 0); err != nil {
		t.Fatal(err)
	}
	if third := next(t, two); third.Attempt != 3 {
		t.Errorf("attempt %d, want 3", third.Attempt)
	}
}

func TestDeletedConsumer(t *testing.T) {
	f := open(t, embedded(t))
	f.produce(t, 1)
	s := f.source(t, f.config("g"))
	if err := s.Ack(t.Context(), next(t, s)); err != nil {
		t.Fatal(err)
	}
	c := f.config("strict")
	c.FailIfDeleted = true
	strict := f.source(t, c)
	if err := strict.Ack(t.Context(), next(t, strict)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"g", "strict"} {
		if err := f.js(t).DeleteConsumer(t.Context(), f.stream, name); err != nil {
			t.Fatal(err)
		}
	}
	if d := next(t, s); d.Attempt != 1 { // created again: from the oldest on
		t.Errorf("attempt %d", d.Attempt)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := strict.Receive(ctx); !errors.Is(err, ErrDeleted) {
		t.Errorf("receive from a deleted consumer: %v, want ErrDeleted", err)
	}
}

func TestBackOffIsRefused(t *testing.T) {
	f := open(t, embedded(t))
	_, err := f.js(t).CreateConsumer(t.Context(), f.stream, jetstream.ConsumerConfig{Durable: "g", AckPolicy: jetstream.AckExplicitPolicy,
		BackOff: []time.Duration{time.Second}, MaxDeliver: 2})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := f.source(t, f.config("g")).Receive(ctx); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("receive: %v, want an error that says BackOff", err)
	}
}

func TestStreamThatAppearsLater(t *testing.T) {
	f := open(t, embedded(t))
	js := f.js(t)
	if err := js.DeleteStream(t.Context(), f.stream); err != nil {
		t.Fatal(err)
	}
	waiting := make(chan struct{})
	var once sync.Once
	c := f.config("g")
	c.OnError = func(error) { once.Do(func() { close(waiting) }) }
	s := f.source(t, c)
	<-waiting
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: f.stream, Subjects: []string{f.stream + ".>"}}); err != nil {
		t.Fatal(err)
	}
	f.produce(t, 1)
	next(t, s)
}

// Close is bounded although the server is gone. What was not acknowledged comes
// back; what was may, if the client could not send that after its reconnect.
func TestCloseWithoutAServer(t *testing.T) {
	server := proc.StartNATS(t)
	f := open(t, server.URL)
	f.produce(t, 3)
	s := f.source(t, f.config("g"))
	p := f.Publisher(t)
	d := next(t, s)
	server.Kill()
	testenv.Within(t, 10*time.Second, "the client notices", func() bool { return !s.nc.IsConnected() })
	res := p.Publish(t.Context(), []*envelope.Message{brokertest.Event(f.Topic(), "k", 9)})
	if !errors.Is(res[0], brokers.ErrUnavailable) {
		t.Errorf("publish without a server: %v, want ErrUnavailable", res[0])
	}
	_ = s.Ack(t.Context(), d) // nil or not: it waits in the client's buffer
	begin := time.Now()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("Close took %v", took)
	}
	server.Restart()
	s = f.source(t, f.config("g"))
	seen := map[string]bool{d.Message.Position: true}
	for len(seen) < 3 {
		seen[next(t, s).Message.Position] = true
	}
}
