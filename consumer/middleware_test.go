package consumer

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

var inGroups = RunOptions{Batch: Batch{Max: 6, Wait: time.Second}}

// around is middleware that calls f with the handler inside.
func around(f func(ctx context.Context, h Handler, m *envelope.Message) error) Middleware {
	return func(h Handler) Handler {
		return HandlerFunc(func(ctx context.Context, m *envelope.Message) error { return f(ctx, h, m) })
	}
}

type valueKey struct{}

// In a group every message has its own middleware: its values reach the
// handler, it sees its answer, and none of it takes the group apart.
func TestMiddlewareInAGroup(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		feed(t, src, "l", 6)
		src.event(t, "l", "p6", "2") // a duplicate, in a group of its own
		var mu sync.Mutex
		var saw, values []string
		d := &counting{Driver: memdedupe.NewDriver(nil)}
		h := Wrap("c", dedupe.NewTxStore(d, nil), func(ctx context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
			values = append(values, fmt.Sprint(m.ID, "=", ctx.Value(valueKey{})))
			return nil
		}, nil)
		b := startHandler(t, src, &RunOptions{Batch: inGroups.Batch}, Chain(h, around(func(ctx context.Context, h Handler, m *envelope.Message) error {
			err := h.Handle(context.WithValue(ctx, valueKey{}, m.Position), m)
			mu.Lock()
			defer mu.Unlock()
			saw = append(saw, fmt.Sprint(m.Position, " ", err))
			return err
		})))
		time.Sleep(time.Minute)
		synctest.Wait()
		b.expect(append(acks(6), "ack p6")...)
		slices.Sort(saw)
		if want := []string{"p0 <nil>", "p1 <nil>", "p2 <nil>", "p3 <nil>", "p4 <nil>", "p5 <nil>", "p6 <nil>"}; !slices.Equal(saw, want) {
			t.Errorf("the middleware saw %q, want %q", saw, want)
		}
		if want := []string{"0=p0", "1=p1", "2=p2", "3=p3", "4=p4", "5=p5"}; !slices.Equal(values, want) {
			t.Errorf("the handlers ran with %q, want %q", values, want)
		}
		if got := d.transactions(); !slices.Equal(got, []int{6, 1}) {
			t.Errorf("transactions of %v claims, want 6 and 1", got)
		}
		b.stop()
	})
}

// Whatever middleware does to a message of a group, the others have their
// effect, in order, and nothing is acknowledged without.
func TestMiddlewareThatMisbehavesInAGroup(t *testing.T) {
	var free chan struct{} // of the bubble
	for name, c := range map[string]struct {
		mw   func(ctx context.Context, h Handler, m *envelope.Message) error
		fail func(id string, run int) error
		want []string
		dead []string
	}{
		"answers by itself": {
			mw: func(ctx context.Context, h Handler, m *envelope.Message) error {
				if m.Position == "p2" {
					return nil
				}
				return h.Handle(ctx, m)
			},
			want: []string{"0", "1", "3", "4", "5"},
		},
		"lets in one at a time": {
			mw: func(ctx context.Context, h Handler, m *envelope.Message) error {
				free <- struct{}{}
				defer func() { <-free }()
				return h.Handle(ctx, m)
			},
			want: ids(6),
		},
		"makes nothing of every error": {
			mw:   func(ctx context.Context, h Handler, m *envelope.Message) error { _ = h.Handle(ctx, m); return nil },
			fail: failOnce("2"),
			want: []string{"0", "1", "3", "4", "5"}, // what failed was dropped by it, what was not run was not
		},
		"runs it again": {
			mw: func(ctx context.Context, h Handler, m *envelope.Message) error {
				_ = h.Handle(ctx, m)
				return h.Handle(ctx, m)
			},
			fail: failOnce("2"),
			want: ids(6),
		},
		"panics": {
			mw: func(ctx context.Context, h Handler, m *envelope.Message) error {
				if m.Position == "p2" {
					panic("boom")
				}
				return h.Handle(ctx, m)
			},
			want: []string{"0", "1", "3", "4", "5"},
			dead: []string{"p2 failed 3"},
		},
		"ends its goroutine before": {
			mw: func(ctx context.Context, h Handler, m *envelope.Message) error {
				if m.Position == "p2" && ctx.Value(seatKey{}) != nil {
					runtime.Goexit()
				}
				return h.Handle(ctx, m)
			},
			want: []string{"0", "1", "3", "4", "5", "2"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				src := newScripted()
				free = make(chan struct{}, 1)
				feed(t, src, "l", 6)
				g := startGroups(t, src, RunOptions{Batch: inGroups.Batch, MaxAttempts: 3}, c.fail, around(c.mw))
				time.Sleep(time.Hour)
				synctest.Wait()
				g.wantEffects(c.want...)
				if n := len(src.notes()); n != 6 {
					t.Errorf("settled %q, want all 6", src.notes())
				}
				g.expectDead(c.dead...)
				g.stop()
			})
		})
	}
}

func failOnce(culprit string) func(id string, run int) error {
	return func(id string, run int) error {
		if id == culprit && run == 1 {
			return errBoom
		}
		return nil
	}
}

// The time-out is one handler's, and what the middleware's context ends with ends
// the handler.
func TestTimeoutOfOneHandlerInAGroup(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src, control := newScripted(), &Control{}
		feed(t, src, "l", 6)
		o := RunOptions{Batch: inGroups.Batch, HandlerTimeout: time.Minute, MaxAttempts: 1, Control: control}
		g := startGroups(t, src, o, func(id string, _ int) error {
			time.Sleep(50 * time.Second)
			if h := control.Health(); h.Running != 1 || h.Live() != nil {
				t.Errorf("in %s: %+v", id, h)
			}
			return nil
		})
		time.Sleep(time.Hour)
		synctest.Wait()
		g.wantEffects(ids(6)...)
		g.stop()
	})
	bubble(t, func(t *testing.T) {
		src := newScripted()
		for i := range 3 {
			src.event(t, "l", fmt.Sprint("p", i), fmt.Sprint(i))
		}
		h := Wrap("c", memdedupe.NewStore(nil), func(ctx context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
			if m.ID == "1" {
				<-ctx.Done()
				return context.Cause(ctx)
			}
			return nil
		}, nil)
		b := startHandler(t, src, &RunOptions{Batch: inGroups.Batch, HandlerTimeout: time.Minute, MaxAttempts: 2}, Chain(h, around(func(ctx context.Context, h Handler, m *envelope.Message) error {
			ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
			defer cancel()
			return h.Handle(ctx, m)
		})))
		began := time.Now()
		for len(src.notes()) < 3 {
			time.Sleep(time.Second)
			synctest.Wait()
		}
		if took := time.Since(began); took > 30*time.Second {
			t.Errorf("the end of the middleware's context took %v to reach the handler", took)
		}
		b.expectDead("p1 failed 2")
		b.stop()
	})
}

// Events of several types in one lane are handled in order, and those of one type
// that follow each other in one transaction.
func TestRouteInGroups(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		d := &counting{Driver: memdedupe.NewDriver(nil)}
		var effects []string
		handler := func(_ context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
			if m.ID == "7" {
				return Permanent(errBoom)
			}
			return tx.OnCommit(func() { effects = append(effects, m.ID) })
		}
		st := dedupe.NewTxStore(d, nil)
		h := Route(map[string]Handler{"a": Wrap("a", st, handler, nil), "b": Chain(Wrap("b", st, handler, nil))}, &RouteOptions{Ignore: []string{"x"}})
		for i, typ := range strings.Split("aabbxbabbaua", "") {
			m, err := envelope.Kafka.Encode(&envelope.Message{ID: fmt.Sprint(i), Source: "/s", Type: typ, Topic: "t"}, envelope.Binary)
			if err != nil {
				t.Fatal(err)
			}
			m.Position = fmt.Sprint("p", i)
			src.feed <- &brokers.Delivery{Message: m, Lane: "l", Stopping: make(chan struct{}), Lost: make(chan struct{})}
		}
		b := startHandler(t, src, &RunOptions{Batch: Batch{Max: 20, Wait: time.Second}}, h)
		time.Sleep(time.Minute)
		synctest.Wait()
		b.expect(acks(12)...)
		if want := []string{"0", "1", "2", "3", "5", "6", "8", "9", "11"}; !slices.Equal(effects, want) {
			t.Errorf("effects %q, want %q", effects, want)
		}
		b.expectDead("p7 permanent 1", "p10 unrouted_type 0")
		if got := d.transactions(); got[0] != 2 || got[1] != 2 {
			t.Errorf("transactions of %v claims, want two of 2 at the beginning", got)
		}
		b.stop()
	})
}

// ErrNotRun is told from a failure by errors.Is.
func TestErrNotRunIsWhatMiddlewareSees(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		feed(t, src, "l", 3)
		var mu sync.Mutex
		notRun := 0
		g := startGroups(t, src, inGroups, failOnce("0"), around(func(ctx context.Context, h Handler, m *envelope.Message) error {
			err := h.Handle(ctx, m)
			if errors.Is(err, ErrNotRun) {
				mu.Lock()
				notRun++
				mu.Unlock()
			}
			return err
		}))
		time.Sleep(time.Minute)
		synctest.Wait()
		g.wantEffects(ids(3)...)
		if notRun != 2 {
			t.Errorf("the middleware saw ErrNotRun %d times, want 2", notRun)
		}
		g.stop()
	})
}
