package consumertest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/brokertest"
	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/consumertest"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// everything is what may go wrong, often.
var everything = consumertest.Chaos{Duplicate: .3, LoseAck: .3, Crash: .2, Late: 50 * time.Millisecond, Reorder: true}

// chaotic is a broker with n keyed events in a topic "t" of 4 partitions.
func chaotic(tb testing.TB, c consumertest.Chaos, n int) *membroker.Broker {
	tb.Helper()
	b := membroker.New()
	b.CreateTopic("t", 4)
	b.SetFaults(c.Faults(tb))
	for i := range n {
		publish(tb, b, &envelope.Message{ID: fmt.Sprint(i), Source: "/s", Type: "t", Topic: "t", Key: fmt.Append(nil, "k", i%5), Body: fmt.Append(nil, i)})
	}
	return b
}

func publish(tb testing.TB, b *membroker.Broker, ms ...*envelope.Message) {
	tb.Helper()
	if err := b.Publisher().Publish(tb.Context(), ms).Err(); err != nil {
		tb.Fatal(err)
	}
}

// seen is what a run has shown.
type seen struct {
	mu         sync.Mutex
	deliveries []string       // positions, as they came
	runs       []string       // ids, as handlers began
	effects    []string       // ids, as they were committed
	steps      map[string]int // of the observer
}

func (s *seen) add(to *[]string, what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	*to = append(*to, what)
}

// Observe implements consumer.Observer.
func (s *seen) Observe(_ context.Context, e consumer.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := string(e.Step)
	switch {
	case e.Step == consumer.StepReceive:
		s.deliveries = append(s.deliveries, e.Position)
	case e.Step == consumer.StepDecide && e.Err == nil:
		name = e.Outcome.String()
	case e.Step == consumer.StepAck && errors.Is(e.Err, brokers.ErrLost):
		name = "lost"
	}
	s.steps[name]++
}

// drained runs a right handler over a broker.
func drained(tb testing.TB, b *membroker.Broker, o consumer.RunOptions) *seen {
	tb.Helper()
	s := &seen{steps: map[string]int{}}
	h := consumer.Wrap("c", memdedupe.NewStore(nil), func(_ context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
		s.add(&s.runs, m.ID)
		return tx.OnCommit(func() { s.add(&s.effects, m.ID) })
	}, nil)
	o.Observer = s
	if dead := consumertest.Drain(tb, b, "t", "g", h, &consumertest.DrainOptions{Run: o, Within: time.Hour}); len(dead) > 0 {
		tb.Errorf("%d dead letters, the first is %v", len(dead), dead[0].Err)
	}
	return s
}

// Whatever goes wrong, each event has one effect; and everything does go wrong.
func TestDrainThroughEverything(t *testing.T) {
	for _, concurrency := range []int{1, 8} {
		synctest.Test(t, func(t *testing.T) {
			b := chaotic(t, everything, 200)
			s := drained(t, b, consumer.RunOptions{Concurrency: concurrency})
			unique := slices.Compact(slices.Sorted(slices.Values(s.effects)))
			if len(s.effects) != 200 || len(unique) != 200 {
				t.Errorf("%d effects of %d events, want 200", len(s.effects), len(unique))
			}
			if b.Len("t") == 200 {
				t.Error("no message was stored twice")
			}
			if s.steps["duplicate"] == 0 || s.steps["lost"] == 0 {
				t.Errorf("%v: no duplicates, or no lost claims", s.steps)
			}
			if backwards(s.deliveries) == 0 {
				t.Error("nothing came again that was behind something else")
			}
		})
	}
}

// backwards counts the deliveries that came before what was before them.
func backwards(positions []string) (n int) {
	last := map[string]int{}
	for _, p := range positions {
		partition, offset := p[:strings.LastIndexByte(p, '/')], 0
		_, _ = fmt.Sscan(p[len(partition)+1:], &offset)
		if before, ok := last[partition]; ok && offset < before {
			n++
		}
		last[partition] = offset
	}
	return n
}

// What Receive, Ack and the group see is the same for one seed, and another for
// another one.
func TestChaosIsReproducible(t *testing.T) {
	run := func(seed uint64) (s *seen) {
		synctest.Test(t, func(t *testing.T) {
			c := everything
			c.Seed = seed
			s = drained(t, chaotic(t, c, 60), consumer.RunOptions{Concurrency: 1, MaxInFlight: 1})
		})
		return s
	}
	a, again, other := run(7), run(7), run(8)
	if !slices.Equal(a.deliveries, again.deliveries) || !slices.Equal(a.effects, again.effects) {
		t.Errorf("two runs of one seed:\n%q\n%q", a.deliveries, again.deliveries)
	}
	if slices.Equal(a.deliveries, other.deliveries) {
		t.Error("two seeds make one run")
	}
}

// Each kind of fault shows by itself, and none of them without being asked for.
func TestEachFaultAlone(t *testing.T) {
	for name, c := range map[string]struct {
		chaos consumertest.Chaos
		shows func(b *membroker.Broker, s *seen, took time.Duration) bool
	}{
		"nothing": {consumertest.Chaos{}, func(b *membroker.Broker, s *seen, took time.Duration) bool {
			return b.Len("t") == 50 && len(s.deliveries) == 50 && took == 0
		}},
		"duplicate": {consumertest.Chaos{Duplicate: 1}, func(b *membroker.Broker, s *seen, _ time.Duration) bool {
			return b.Len("t") == 100 && len(s.deliveries) == 100 && s.steps["duplicate"] == 50
		}},
		"lost acknowledgement": {consumertest.Chaos{LoseAck: 1}, func(_ *membroker.Broker, s *seen, _ time.Duration) bool {
			return s.steps["lost"] == 0 && len(s.deliveries) >= 50*4 && len(s.runs) == 50
		}},
		"crash": {consumertest.Chaos{Crash: 1, Forget: -1}, func(_ *membroker.Broker, s *seen, _ time.Duration) bool {
			return s.steps["lost"] > 0 && len(s.deliveries) >= 50*4
		}},
		"late": {consumertest.Chaos{Late: time.Hour}, func(_ *membroker.Broker, s *seen, took time.Duration) bool {
			return len(s.deliveries) == 50 && took > time.Hour
		}},
		"reorder": {consumertest.Chaos{Reorder: true}, func(_ *membroker.Broker, s *seen, _ time.Duration) bool {
			return len(s.deliveries) == 50 && backwards(s.deliveries) == 0 && !takesTurns(s.deliveries)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, start := chaotic(t, c.chaos, 50), time.Now()
				s := &seen{steps: map[string]int{}}
				h := consumer.Wrap("c", memdedupe.NewStore(nil), func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
					s.add(&s.runs, m.ID)
					return nil
				}, nil)
				consumertest.Drain(t, b, "t", "g", h, &consumertest.DrainOptions{Within: 100 * time.Hour,
					Run: consumer.RunOptions{Concurrency: 1, MaxInFlight: 1, Observer: s}})
				if !c.shows(b, s, time.Since(start)) {
					t.Errorf("%d stored, %d delivered, %d runs, %v, in %v", b.Len("t"), len(s.deliveries), len(s.runs), s.steps, time.Since(start))
				}
			})
		})
	}
}

// takesTurns reports whether the first partitions come one after the other.
func takesTurns(positions []string) bool {
	for i, p := range positions[:8] {
		if p[:4] != positions[i%4][:4] {
			return false
		}
	}
	return true
}

// recording is a test that fails, whose words another one reads.
type recording struct {
	testing.TB
	mu       sync.Mutex
	errors   []string
	logs     []string
	cleanups []func()
}

func (r *recording) note(to *[]string, what string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	*to = append(*to, what)
}

func (r *recording) Failed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.errors) > 0
}
func (r *recording) Helper()           {}
func (r *recording) Error(args ...any) { r.note(&r.errors, fmt.Sprint(args...)) }
func (r *recording) Errorf(format string, args ...any) {
	r.note(&r.errors, fmt.Sprintf(format, args...))
}
func (r *recording) Logf(format string, args ...any) { r.note(&r.logs, fmt.Sprintf(format, args...)) }
func (r *recording) Cleanup(f func())                { r.cleanups = append(r.cleanups, f) }

func (r *recording) clean() {
	for _, f := range slices.Backward(r.cleanups) {
		f()
	}
}

// A test that fails is told the seed, and one that passes is not.
func TestSeedIsPrintedOnFailure(t *testing.T) {
	for _, fails := range []bool{true, false} {
		r := &recording{TB: t}
		consumertest.Chaos{}.Faults(r)
		if fails {
			r.Error("some assertion")
		}
		r.clean()
		if told := len(r.logs) == 1 && strings.Contains(r.logs[0], "Chaos.Seed: "); told != fails {
			t.Errorf("fails: %v, the log is %q", fails, r.logs)
		}
	}
}

// What does not end within the deadline is told, and nothing of it is left.
func TestDrainFailsAtItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &recording{TB: t}
		b := chaotic(t, consumertest.Chaos{}, 3)
		stuck := consumer.HandlerFunc(func(ctx context.Context, _ *envelope.Message) error { <-ctx.Done(); return ctx.Err() })
		consumertest.Drain(r, b, "t", "g", stuck, nil)
		if len(r.errors) != 1 || !strings.Contains(r.errors[0], "not everything is settled within 1m0s") || !strings.Contains(r.errors[0], "hold 3 messages") {
			t.Errorf("told %q", r.errors)
		}
	})
}

// A run that cannot start is told at once.
func TestDrainTellsWhatRunReturns(t *testing.T) {
	r, b := &recording{TB: t}, chaotic(t, consumertest.Chaos{}, 1)
	h := consumer.HandlerFunc(func(context.Context, *envelope.Message) error { return nil })
	consumertest.Drain(r, b, "t", "g", h, &consumertest.DrainOptions{Run: consumer.RunOptions{Batch: consumer.Batch{Max: 2}}})
	if len(r.errors) != 1 || !strings.Contains(r.errors[0], "Batch.Max") {
		t.Errorf("told %q", r.errors)
	}
}

// Dead letters are returned, behind the hook of the options.
func TestDrainReturnsDeadLetters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, hooked := chaotic(t, consumertest.Chaos{}, 3), 0
		h := consumer.HandlerFunc(func(_ context.Context, m *envelope.Message) error {
			if string(m.Body) == "1" {
				return consumer.Permanent(errors.New("no"))
			}
			return nil
		})
		dead := consumertest.Drain(t, b, "t", "g", h, &consumertest.DrainOptions{Run: consumer.RunOptions{
			DeadLetter: func(context.Context, *consumer.Failure) error {
				if hooked++; hooked == 1 {
					return errors.New("not yet")
				}
				return nil
			}}})
		if len(dead) != 1 || string(dead[0].Message.Body) != "1" || hooked != 2 {
			t.Errorf("%d dead letters by %d calls", len(dead), hooked)
		}
	})
}

// fixture is a membroker under faults, for the suite of the adapters.
type fixture struct {
	b *membroker.Broker
}

func (f *fixture) Topic() string        { return "t" }
func (f *fixture) MissingTopic() string { return "missing" }
func (f *fixture) Oversize() int        { return membroker.MaxMessage + 1 }
func (f *fixture) NullBody()            {}
func (f *fixture) Source(t testing.TB, group string) brokers.Source {
	s := f.b.Source("t", group)
	t.Cleanup(func() { _ = s.Close() })
	return s
}
func (f *fixture) Publisher(testing.TB) brokers.Publisher  { return f.b.Publisher() }
func (f *fixture) Revoke(_ testing.TB, src brokers.Source) { f.b.Rebalance("t", "g") }

// A broker that is late and reorders is still a broker: it passes the whole
// suite. One that loses and repeats passes what at least once means; the other
// cases say that nothing was lost or repeated, and are right to fail.
func TestChaosIsABroker(t *testing.T) {
	atLeastOnce := []string{"every event is received, in the order of its key", "two sources of a group share the work",
		"two groups get everything", "close with deliveries in hand", "receive after close", "publish after close"}
	for name, c := range map[string]consumertest.Chaos{
		"late and reordered": {Late: 100 * time.Microsecond, Reorder: true},
		"everything":         {LoseAck: .05, Crash: .01, Late: 100 * time.Microsecond, Reorder: true},
	} {
		t.Run(name, func(t *testing.T) {
			for _, bc := range brokertest.Cases() {
				if c.LoseAck > 0 && !slices.Contains(atLeastOnce, bc.Name) {
					continue
				}
				t.Run(bc.Name, func(t *testing.T) { bc.Func(t, &fixture{chaotic(t, c, 0)}) })
			}
		})
	}
}

// What a handler is worth that remembers in its process, shows when something
// comes again.
func TestChaosFindsWhatIsWrong(t *testing.T) {
	for name, handle := range map[string]func(effects func(string)) consumer.Handler{
		"no deduplication": func(effect func(string)) consumer.Handler {
			return consumer.HandlerFunc(func(_ context.Context, m *envelope.Message) error { effect(m.Position); return nil })
		},
		"effect outside the scope": func(effect func(string)) consumer.Handler {
			return consumer.Wrap("c", memdedupe.NewStore(nil), func(ctx context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
				effect(m.ID)
				time.Sleep(time.Millisecond) // a crash elsewhere comes in between
				return ctx.Err()
			}, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &seen{}
				consumertest.Drain(t, chaotic(t, everything, 300), "t", "g", handle(func(id string) { s.add(&s.effects, id) }), &consumertest.DrainOptions{Within: time.Hour})
				if unique := slices.Compact(slices.Sorted(slices.Values(s.effects))); len(unique) == len(s.effects) {
					t.Errorf("%d effects, none twice", len(s.effects))
				}
			})
		})
	}
}

// Every delivery may be lost, repeated or late, and the total is right.
func ExampleDrain() {
	var t testing.TB = exampleTB{} // of your test
	broker := membroker.New()
	broker.CreateTopic("orders", 2)
	broker.SetFaults(consumertest.Chaos{Seed: 1, Duplicate: .5, LoseAck: .5, Crash: .1, Reorder: true}.Faults(t))
	for i := range 10 {
		_ = broker.Publisher().Publish(t.Context(), []*envelope.Message{
			{ID: fmt.Sprint(i), Source: "/shop", Type: "order.placed", Topic: "orders", Key: fmt.Append(nil, i)}})
	}
	var placed atomic.Int32
	h := consumer.Wrap("billing", memdedupe.NewStore(nil), func(_ context.Context, tx *memdedupe.Tx, _ *envelope.Message) error {
		return tx.OnCommit(func() { placed.Add(1) })
	}, nil)
	consumertest.Drain(t, broker, "orders", "billing", h, nil)
	fmt.Println(placed.Load())
	// Output: 10
}

// exampleTB stands for the test that an example does not have.
type exampleTB struct{ testing.TB }

func (exampleTB) Helper()                   {}
func (exampleTB) Cleanup(func())            {}
func (exampleTB) Context() context.Context  { return context.Background() }
func (exampleTB) Failed() bool              { return false }
func (exampleTB) Error(args ...any)         { fmt.Println(args...) }
func (exampleTB) Errorf(f string, a ...any) { fmt.Printf(f+"\n", a...) }
