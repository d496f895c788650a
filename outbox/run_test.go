package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

func TestIdlePollingIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMemory()
		stop := start(t, NewRelay(s, takes(0), nil))
		time.Sleep(5 * time.Second) // from Poll to MaxPoll
		reads, renews := s.count("read"), s.count("renew")
		time.Sleep(time.Minute)
		reads, renews = s.count("read")-reads, s.count("renew")-renews
		stop()
		if reads < 60*2 || reads > 60*3 {
			t.Errorf("%d reads in an idle minute, MaxPoll is 500 ms less up to a third", reads)
		}
		if renews > 60 || s.count("settle") != 0 {
			t.Errorf("%d renewals and %d settlements in an idle minute", renews, s.count("settle"))
		}
	})
}

// A row is found within MaxPoll, and at once after a Wake.
func TestWake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMemory()
		r := NewRelay(s, takes(0), nil)
		stop := start(t, r)
		defer stop()
		for i := range 20 {
			time.Sleep(10*time.Second + time.Duration(i)*13*time.Millisecond)
			s.add("a")
			if i%2 == 0 {
				time.Sleep(500 * time.Millisecond)
			} else {
				r.Wake()
				r.Wake() // two are as good as one
			}
			synctest.Wait()
			if got := len(s.sent()); got != i+1 {
				t.Fatalf("%d rows sent, want %d", got, i+1)
			}
		}
	})
}

// A row is committed and Wake called while the relay is in a step that cannot
// see it any more: the token ends the pause that follows.
func TestWakeDuringAStepIsNotLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMemory()
		r := NewRelay(s, takes(0), &RelayOptions{Poll: 700 * time.Millisecond, MaxPoll: 700 * time.Millisecond})
		var reads []time.Time
		s.set(func(_ context.Context, op string) error {
			if op == "read" {
				if reads = append(reads, time.Now()); len(reads) == 2 {
					r.Wake()
				}
			}
			return nil
		})
		stop := start(t, r)
		time.Sleep(5 * time.Second)
		stop()
		if first, woken, third := reads[1].Sub(reads[0]), reads[2].Sub(reads[1]), reads[3].Sub(reads[2]); woken != 0 || first == 0 || third == 0 {
			t.Errorf("paused for %v, then %v after a wake in the step, then %v", first, woken, third)
		}
	})
}

// The broker is away for two minutes, and somebody wakes the relay all the time.
func TestB42OutageBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMemory()
		s.add("a", "b", "c")
		var tries []time.Time
		outage, ev := 2*time.Minute, &events{}
		begun := time.Now()
		r := NewRelay(s, publisher(func(_ context.Context, msgs []*envelope.Message) brokers.Results {
			tries = append(tries, time.Now())
			if time.Since(begun) < outage {
				return brokers.Fill(len(msgs), fmt.Errorf("%w: connection refused", brokers.ErrUnavailable))
			}
			return make(brokers.Results, len(msgs))
		}), &RelayOptions{MaxAttempts: 3, Observer: ev})
		stop := start(t, r)
		free := 0
		for time.Since(begun) < outage {
			time.Sleep(10 * time.Millisecond)
			r.Wake()
			if s.rival() {
				free++
			}
		}
		time.Sleep(lease)
		stop()
		var gaps []time.Duration
		for i := range tries[1:] {
			gaps = append(gaps, tries[i+1].Sub(tries[i]))
		}
		if gaps[0] > 50*time.Millisecond || slices.Max(gaps) > lease/2 || gaps[20] < lease/4 {
			t.Errorf("waits of %v, then %v, at most %v", gaps[0], gaps[20], slices.Max(gaps))
		}
		for _, st := range s.settled {
			if st.Action != Sent || st.Row.Attempts != 0 {
				t.Errorf("%s was settled as %v with %d attempts spent", st.Row.Message.ID, st.Action, st.Row.Attempts)
			}
		}
		if !slices.Equal(s.sent(), []string{"a", "b", "c"}) {
			t.Errorf("sent %q", s.sent())
		}
		if free == 0 {
			t.Error("a relay that reaches the broker had no chance to take over")
		}
		if ev.of(StepFailed) != len(tries)-1 {
			t.Errorf("%d failures told of %d", ev.of(StepFailed), len(tries)-1)
		}
	})
}

// SIGTERM in the middle of a publish: it is finished and recorded, the lease
// is free, and nothing new is begun.
func TestR13StopFinishesTheBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMemory()
		s.add("a", "b", "c")
		r := NewRelay(s, takes(5*time.Second), &RelayOptions{Batch: 2})
		stop := start(t, r)
		time.Sleep(time.Second)
		begun := time.Now()
		stop()
		if !slices.Equal(s.sent(), []string{"a", "b"}) {
			t.Errorf("sent %q, want the batch in hand", s.sent())
		}
		if !s.rival() || s.count("release") != 1 {
			t.Error("the lease was not released")
		}
		if took := time.Since(begun); took != 4*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}

// A publish that hangs is cut, with time left to record what was answered and
// to release the lease; a store that hangs is not waited for beyond the grace.
func TestR13StopEndsWithinTheGrace(t *testing.T) {
	const grace = 4 * time.Second
	stopped := func(t *testing.T, s *memory, p publisher) time.Duration {
		r := NewRelay(s, p, &RelayOptions{Grace: grace, PublishTimeout: time.Hour})
		stop := start(t, r)
		time.Sleep(time.Second)
		begun := time.Now()
		stop()
		return time.Since(begun)
	}
	t.Run("publish hangs", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newMemory()
			s.add("a", "b")
			took := stopped(t, s, func(ctx context.Context, _ []*envelope.Message) brokers.Results {
				<-ctx.Done()
				return brokers.Results{nil, brokers.ErrUnknown}
			})
			if took != grace*3/4 {
				t.Errorf("it took %v", took)
			}
			if !slices.Equal(s.sent(), []string{"a"}) || !s.rival() {
				t.Errorf("sent %q, lease free %v: what was acknowledged was not recorded", s.sent(), s.rival())
			}
		})
	})
	for _, op := range []string{"read", "settle", "release", "acquire"} {
		t.Run(op+" hangs", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newMemory()
				s.add("a", "b")
				s.set(hanging(op))
				if took := stopped(t, s, takes(0)); took > grace {
					t.Errorf("it took %v", took)
				}
			})
		})
	}
}

// Run with a context that is done already does nothing.
func TestRunIsStoppedBeforeItStarts(t *testing.T) {
	s := newMemory()
	s.add("a")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := NewRelay(s, takes(0), nil).Run(ctx); err != nil || len(s.calls) != 0 {
		t.Errorf("%v, calls %v", err, s.calls)
	}
}

// The store fails, or hangs, for a minute, at each of its calls.
func TestRunOutlivesTheStore(t *testing.T) {
	for _, op := range []string{"acquire", "read", "settle", "renew"} {
		for how, before := range map[string]func(context.Context, string) error{"fails": failing(op), "hangs": hanging(op)} {
			t.Run(op+" "+how, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s, ev := newMemory(), &events{}
					s.add("a")
					s.set(before)
					stop := start(t, NewRelay(s, takes(2*time.Second), &RelayOptions{StoreTimeout: 5 * time.Second, Observer: ev}))
					time.Sleep(time.Minute)
					tries := s.count(op)
					s.set(nil)
					time.Sleep(5*time.Second + 2*lease)
					s.add("b")
					time.Sleep(lease)
					stop()
					got := slices.Compact(s.sent())
					if !slices.Equal(got, []string{"a", "b"}) {
						t.Errorf("sent %q", got)
					}
					if op != "renew" && (tries < 60/9 || tries > 60 || ev.of(StepFailed) == 0) {
						t.Errorf("%d tries in a minute, %d failures told", tries, ev.of(StepFailed))
					}
				})
			})
		}
	}
}

// R6: the settlement is stored and its answer lost. Nothing is settled a
// second time that is not there any more, and the relay goes on.
func TestR6LostAnswerOfASettle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMemory()
		s.add("a", "b")
		lost := 0
		s.after = func() error {
			if lost++; lost == 1 {
				return errStore
			}
			return nil
		}
		stop := start(t, NewRelay(s, takes(0), &RelayOptions{Batch: 1}))
		time.Sleep(lease)
		stop()
		if !slices.Equal(s.sent(), []string{"a", "b"}) {
			t.Errorf("sent %q", s.sent())
		}
	})
}

// A publisher that hangs is cut off; what it acknowledged before is recorded,
// and the rest is no one's fault.
func TestPublishTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMemory()
		s.add("a", "b")
		r := NewRelay(s, publisher(func(ctx context.Context, _ []*envelope.Message) brokers.Results {
			<-ctx.Done()
			return brokers.Results{nil, fmt.Errorf("%w: %w", brokers.ErrUnknown, ctx.Err())}
		}), nil)
		begun := time.Now()
		if n, err := r.Step(t.Context()); n != 2 || err != nil || time.Since(begun) != 10*time.Second {
			t.Errorf("step: %d, %v after %v", n, err, time.Since(begun))
		}
		if !slices.Equal(s.sent(), []string{"a"}) || s.settled[1].Counted {
			t.Errorf("settled %+v", s.settled)
		}
	})
}

func TestWrongNumberOfResults(t *testing.T) {
	for _, n := range []int{0, 1, 3} {
		s := newMemory()
		s.add("a", "b")
		r := NewRelay(s, publisher(func(context.Context, []*envelope.Message) brokers.Results { return make(brokers.Results, n) }), nil)
		_, err := r.Step(t.Context())
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%d results for 2 messages", n)) {
			t.Errorf("%d results: %v", n, err)
		}
		if len(s.settled) != 0 {
			t.Errorf("%d results: %d rows were settled", n, len(s.settled))
		}
	}
}

// pruning is a memory that can prune.
type pruning struct {
	*memory
	old  int
	fail bool
}

func (p *pruning) Prune(_ context.Context, age time.Duration, limit int) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls["prune"]++
	if age != 24*time.Hour {
		return 0, fmt.Errorf("asked for an age of %v", age)
	}
	if p.fail {
		return 0, errStore
	}
	n := min(p.old, limit)
	p.old -= n
	return n, nil
}

// B50: what is old is deleted although there is always something to publish,
// and deleting does not keep rows from being published.
func TestB50PruningHasItsTurnUnderLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &pruning{memory: newMemory(), old: 100_000}
		r := NewRelay(p, publisher(func(_ context.Context, msgs []*envelope.Message) brokers.Results {
			time.Sleep(20 * time.Millisecond)
			p.add("next")
			return make(brokers.Results, len(msgs))
		}), nil)
		p.add("first")
		stop := start(t, r)
		time.Sleep(10 * time.Second)
		if p.old != 0 {
			t.Errorf("%d old rows are left", p.old)
		}
		n := p.count("prune")
		p.fail = true
		time.Sleep(5 * time.Minute)
		stop()
		if n := p.count("prune") - n; n < 4 || n > 6 {
			t.Errorf("pruned %d times in five minutes", n)
		}
		if got := len(p.sent()); got < 15_000 {
			t.Errorf("%d rows were sent meanwhile", got)
		}
	})
}

func TestPruningCanBeSwitchedOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &pruning{memory: newMemory(), old: 1}
		stop := start(t, NewRelay(p, takes(0), &RelayOptions{Retain: -1}))
		time.Sleep(time.Hour)
		stop()
		if n := p.count("prune"); n != 0 {
			t.Errorf("pruned %d times", n)
		}
	})
}

func TestNewRelayPanics(t *testing.T) {
	for name, f := range map[string]func(){
		"store":     func() { NewRelay(nil, takes(0), nil) },
		"publisher": func() { NewRelay(newMemory(), nil, nil) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("no %s: no panic", name)
				}
			}()
			f()
		}()
	}
}

func TestErrorsStayMatchable(t *testing.T) {
	s := newMemory()
	s.set(failing("acquire"))
	if _, err := NewRelay(s, takes(0), nil).Step(t.Context()); !errors.Is(err, errStore) || !strings.HasPrefix(err.Error(), "outbox: acquire: ") {
		t.Errorf("step: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.set(func(ctx context.Context, _ string) error { return ctx.Err() })
	if _, err := NewRelay(s, takes(0), nil).Step(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("step: %v", err)
	}
}
