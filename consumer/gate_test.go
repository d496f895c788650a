package consumer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// world is a run over a store that a test can take away, and whose claims of
// chosen events fail for their data.
type world struct {
	dedupe.Store[*memdedupe.Tx]
	down atomic.Bool
	bad  map[string]bool // by the id of the event

	mu      sync.Mutex
	effects []string
}

func newWorld(bad ...string) *world {
	w := &world{Store: memdedupe.NewStore(nil), bad: map[string]bool{}}
	for _, id := range bad {
		w.bad[id] = true
	}
	return w
}

func (w *world) Once(ctx context.Context, c dedupe.Claim, fn func(context.Context, *memdedupe.Tx) ([]byte, error)) (dedupe.Result, error) {
	if w.down.Load() || w.bad[c.Key.ID] {
		return dedupe.Result{}, fmt.Errorf("%w: claim", dedupe.ErrUnavailable)
	}
	return w.Store.Once(ctx, c, fn)
}

// asked is a world that can be asked how it is.
type asked struct{ *world }

func (w asked) Probe(context.Context) error {
	if w.down.Load() {
		return fmt.Errorf("%w: probe", dedupe.ErrUnavailable)
	}
	return nil
}

func (w *world) handler(st dedupe.Store[*memdedupe.Tx], f func(id string) error) Handler {
	return Wrap("c", st, func(_ context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
		if err := f(m.ID); err != nil {
			return err
		}
		return tx.OnCommit(func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.effects = append(w.effects, m.ID)
		})
	}, nil)
}

func (w *world) done() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.effects)
}

// eventOf is a delivery of an event with this id, which is its key and position, too.
func eventOf(lane, id string) *brokers.Delivery {
	m, err := envelope.Kafka.Encode(&envelope.Message{ID: id, Source: "/s", Type: "t", Topic: "t", Key: []byte(id), Body: []byte("x")}, envelope.Binary)
	if err != nil {
		panic(err)
	}
	m.Position = id
	return &brokers.Delivery{Message: m, Lane: lane, Stopping: make(chan struct{}), Lost: make(chan struct{})}
}

// Whatever one message's handler meets, the others go on at their rate, and it
// ends with the dead letters.
//
// A dependency that one message alone meets is not in the table: nothing
// witnesses against it, and its message waits for as long as it is away.
func TestOneMessagesTroubleStopsNobody(t *testing.T) {
	for name, trouble := range map[string]error{
		"refused":         &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED},
		"reset":           &net.OpError{Op: "read", Err: syscall.ECONNRESET},
		"another store":   fmt.Errorf("query: %w", dedupe.ErrUnavailable),
		"another broker":  fmt.Errorf("publish: %w", brokers.ErrUnavailable),
		"somebody's key":  dedupe.ErrInProgress,
		"marked":          Unavailable(errBoom),
		"ordinary":        errBoom,
		"panics with nil": nil,
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				src, w := newScripted(), newWorld()
				b := startHandler(t, src, &RunOptions{Order: OrderByKey}, w.handler(w, func(id string) error {
					if id == "bad" && trouble == nil {
						panic(errBoom)
					}
					if id == "bad" {
						return trouble
					}
					return nil
				}))
				src.feed <- eventOf("l", "bad")
				for i := range 500 {
					time.Sleep(10 * time.Millisecond)
					src.feed <- eventOf("l", fmt.Sprint("g", i))
				}
				synctest.Wait()
				if w.done() != 500 {
					t.Errorf("%d of 500 others are done, want all, at once", w.done())
				}
				for i := range 3000 { // and others go on, whose success is the witness against it
					time.Sleep(100 * time.Millisecond)
					src.feed <- eventOf("l", fmt.Sprint("h", i))
				}
				synctest.Wait()
				if len(b.dead) != 1 {
					t.Errorf("dead letters: %q, want the bad one", b.dead)
				}
				b.stop()
			})
		})
	}
}

// Claims that fail for what is in them are their messages' own, also alone.
func TestStoreErrorByDataIsOneMessages(t *testing.T) {
	for name, others := range map[string]int{"among others": 400, "alone": 0} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				src, w := newScripted(), newWorld("bad0", "bad1", "bad2")
				b := startHandler(t, src, &RunOptions{Order: OrderByKey, MaxAttempts: 3}, w.handler(asked{w}, func(string) error { return nil }))
				for i := range 3 {
					src.feed <- eventOf("l", fmt.Sprint("bad", i))
				}
				for i := range others {
					time.Sleep(10 * time.Millisecond)
					src.feed <- eventOf("l", fmt.Sprint("g", i))
				}
				synctest.Wait()
				if w.done() != others {
					t.Errorf("%d of %d others are done, want all, at once", w.done(), others)
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				slices.Sort(b.dead)
				want := []string{"bad0 " + ReasonOwnOutage + " 3", "bad1 " + ReasonOwnOutage + " 3", "bad2 " + ReasonOwnOutage + " 3"}
				if !slices.Equal(b.dead, want) {
					t.Errorf("dead letters: %q, want %q", b.dead, want)
				}
				b.stop()
			})
		})
	}
}

// A real outage spends nobody's attempts: of many in flight, of a single one, that
// comes and goes, and whether the store can be asked or not.
func TestRealOutageSpendsNothing(t *testing.T) {
	for _, messages := range []int{1, 40} {
		for _, canBeAsked := range []bool{true, false} {
			for name, phase := range map[string]time.Duration{"long": 10 * time.Minute, "flapping": time.Second} {
				rounds := map[string]int{"long": 3, "flapping": 20}[name]
				t.Run(fmt.Sprint(messages, " messages, asked ", canBeAsked, ", ", name), func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						src, w := newScripted(), newWorld()
						var st dedupe.Store[*memdedupe.Tx] = w
						if canBeAsked {
							st = asked{w}
						}
						b := startHandler(t, src, &RunOptions{Order: OrderByKey, MaxAttempts: 1}, w.handler(st, func(string) error { return nil }))
						for n := range rounds {
							w.down.Store(true)
							for i := range messages {
								src.feed <- eventOf("l", fmt.Sprint(n, "/", i))
							}
							time.Sleep(phase)
							w.down.Store(false)
							if phase > time.Minute {
								time.Sleep(2 * time.Second)
								synctest.Wait()
								if w.done() != (n+1)*messages {
									t.Fatalf("%d done 2 s after outage %d, want %d", w.done(), n, (n+1)*messages)
								}
							} else {
								time.Sleep(phase)
							}
						}
						time.Sleep(5 * time.Second)
						synctest.Wait()
						if w.done() != rounds*messages {
							t.Errorf("%d done, want %d", w.done(), rounds*messages)
						}
						b.expectDead()
						b.stop()
					})
				})
			}
		}
	}
}

// Of two databases behind a Route one is away: its messages wait, and those of the
// other one go on.
func TestOneOfTwoStores(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src, a, z := newScripted(), newWorld(), newWorld()
		a.down.Store(true)
		other := func(id string) *brokers.Delivery {
			d := eventOf("l", id)
			d.Message.Header.Set("ce_type", []byte("z"))
			return d
		}
		none := func(string) error { return nil }
		b := startHandler(t, src, &RunOptions{Order: OrderByKey, MaxAttempts: 1},
			Route(map[string]Handler{"t": a.handler(asked{a}, none), "z": z.handler(asked{z}, none)}, nil))
		for i := range 200 {
			src.feed <- eventOf("l", fmt.Sprint("a", i))
			src.feed <- other(fmt.Sprint("z", i))
			time.Sleep(10 * time.Millisecond)
		}
		synctest.Wait()
		if z.done() != 200 || a.done() != 0 {
			t.Errorf("%d of the other store are done, want 200; %d of the one that is away", z.done(), a.done())
		}
		time.Sleep(time.Hour)
		a.down.Store(false)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if a.done() != 200 {
			t.Errorf("%d of 200 are done 2 s after it is back", a.done())
		}
		b.expectDead()
		b.stop()
	})
}

// The outage of a dependency holds those that meet it and spends nothing, as long
// as nobody who needs it gets through.
func TestDependencyHoldsThoseThatNeedIt(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src, w := newScripted(), newWorld()
		var down atomic.Bool
		down.Store(true)
		b := startHandler(t, src, &RunOptions{Order: OrderByKey, MaxAttempts: 1}, w.handler(w, func(id string) error {
			if id[0] == 'd' && down.Load() {
				return Dependency("billing-api").Unavailable(errBoom)
			}
			return nil
		}))
		for i := range 300 {
			src.feed <- eventOf("l", fmt.Sprint("d", i))
			src.feed <- eventOf("l", fmt.Sprint("g", i))
			time.Sleep(20 * time.Millisecond)
		}
		synctest.Wait()
		if w.done() != 300 {
			t.Errorf("%d done, want the 300 that do not need it", w.done())
		}
		time.Sleep(time.Hour)
		down.Store(false)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if w.done() != 600 {
			t.Errorf("%d done, want all", w.done())
		}
		b.expectDead()
		b.stop()
	})
}

// In groups a message that fails waits aside, with those of its key, and the others
// of its lane go on.
func TestGroupGoesOnBesideOneThatFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		var mu sync.Mutex
		var order []string
		var boom atomic.Bool
		boom.Store(true)
		st := memdedupe.NewStore(nil)
		h := Wrap("c", st, func(_ context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
			if m.ID == "k0" && boom.Load() {
				return errBoom
			}
			return tx.OnCommit(func() {
				mu.Lock()
				defer mu.Unlock()
				order = append(order, m.ID)
			})
		}, nil)
		b := startHandler(t, src, &RunOptions{Order: OrderByKey, Batch: Batch{Max: 8}, Concurrency: 1, MaxAttempts: -1}, h)
		for i := range 100 {
			d := eventOf("l", fmt.Sprint("g", i))
			if i%20 == 0 {
				d = eventOf("l", fmt.Sprint("k", i/20))
				d.Message.Key = []byte("k")
			}
			src.feed <- d
		}
		time.Sleep(50 * time.Millisecond)
		synctest.Wait()
		mu.Lock()
		if len(order) != 95 {
			t.Errorf("%d are done beside the one that fails, want 95", len(order))
		}
		mu.Unlock()
		boom.Store(false)
		time.Sleep(time.Minute)
		synctest.Wait()
		if want := []string{"k0", "k1", "k2", "k3", "k4"}; len(order) != 100 || !slices.Equal(order[95:], want) {
			t.Errorf("%d are done, the key's in the order %q, want %q", len(order), order[min(95, len(order)):], want)
		}
		b.stop()
	})
}

// A user's judgement is asked for what handlers return, and not for what the store
// says.
func TestClassifyOption(t *testing.T) {
	o := &RunOptions{Classify: func(err error) Class {
		if errors.Is(err, errBoom) {
			return ClassPermanent
		}
		if errors.Is(err, dedupe.ErrUnavailable) {
			t.Errorf("asked for what the store says: %v", err)
		}
		return ClassNone
	}}
	for _, c := range []struct {
		err  error
		want Class
	}{
		{nil, ClassNone},
		{errBoom, ClassPermanent},
		{ofHandler(errBoom), ClassPermanent},
		{errors.New("other"), ClassFailed},
		{fmt.Errorf("%w: %w", dedupe.ErrUnavailable, ofHandler(errBoom)), ClassUnavailable},
		{dedupe.ErrUnavailable, ClassUnavailable},
		{dedupe.ErrInProgress, ClassInProgress},
		{envelope.ErrNoID, ClassMalformed},
	} {
		if got := o.classify(c.err); got != c.want {
			t.Errorf("%v is %q, want %q", c.err, got, c.want)
		}
	}
}
