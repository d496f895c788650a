package consumer

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

func TestRunAcknowledgesAfterTheHandler(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src, release := newScripted(), make(chan struct{})
		b := start(t, src, nil, func(context.Context, *envelope.Message) error { <-release; return nil })
		src.deliver("l", "p0")
		synctest.Wait()
		b.expect() // the handler runs: nothing may be acknowledged
		close(release)
		synctest.Wait()
		b.expect("ack p0")
		if err := b.end(); err != nil {
			t.Fatal(err)
		}
		b.expect("ack p0", "close")
	})
}

func TestRunRetriesInTheLaneAndKeepsOrder(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		var ran []string
		b := start(t, src, nil, func(_ context.Context, m *envelope.Message) error {
			ran = append(ran, m.Position)
			if m.Position == "p0" && len(ran) < 3 {
				return errBoom
			}
			return nil
		})
		src.deliver("l", "p0")
		src.deliver("l", "p1")
		time.Sleep(time.Minute)
		synctest.Wait()
		b.expect("ack p0", "ack p1")
		if want := []string{"p0", "p0", "p0", "p1"}; !slices.Equal(ran, want) {
			t.Errorf("ran %q, want %q", ran, want)
		}
		b.stop()
	})
}

func TestRunDeadLettersWhenAttemptsAreSpent(t *testing.T) {
	for name, nacks := range map[string]bool{"in the lane": false, "by the broker": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				s := newScripted()
				var src brokers.Source = s
				lane := "l"
				if nacks {
					src, lane = nacking{s}, ""
				}
				var runs atomic.Int32
				b := start(t, src, &RunOptions{MaxAttempts: 3}, func(context.Context, *envelope.Message) error {
					runs.Add(1)
					return errBoom
				})
				s.deliver(lane, "p0")
				time.Sleep(time.Hour)
				synctest.Wait()
				if runs.Load() != 3 {
					t.Errorf("the handler ran %d times, want 3", runs.Load())
				}
				b.expectDead("p0 failed 3")
				if nacks {
					b.expect("nack p0", "nack p0", "ack p0")
				} else {
					b.expect("ack p0")
				}
				b.stop()
			})
		})
	}
}

func TestRunDeadLettersAtOnce(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"permanent":         {Permanent(errBoom), "p0 permanent 1"},
		"wrapped permanent": {fmt.Errorf("decode: %w", Permanent(errBoom)), "p0 permanent 1"},
		"no id":             {envelope.ErrNoID, ""},
		"malformed":         {envelope.ErrMalformed, ""},
		"invalid key":       {dedupe.ErrInvalidKey, ""},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				src := newScripted()
				b := start(t, src, nil, func(_ context.Context, m *envelope.Message) error {
					if m.Position == "p0" {
						return c.err
					}
					return nil
				})
				src.deliver("l", "p0")
				src.deliver("l", "p1")
				synctest.Wait() // no time passes: it blocks nothing behind it
				b.expect("ack p0", "ack p1")
				if c.want != "" {
					b.expectDead(c.want)
				} else if len(b.dead) != 1 {
					t.Errorf("dead letters: %q, want one", b.dead)
				}
				b.stop()
			})
		})
	}
}

// The dead-letter hook fails: the delivery must not be acknowledged, and the
// handler must not run again while the hook is tried again.
func TestB52DeadLetterFailureHoldsTheAck(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		var runs atomic.Int32
		b := start(t, src, nil, func(context.Context, *envelope.Message) error {
			runs.Add(1)
			return Permanent(errBoom)
		})
		b.deadErr = func(n int) error {
			switch {
			case n <= 5:
				return errors.New("topic is full")
			case n == 6:
				panic("the hook is broken")
			}
			return nil
		}
		src.deliver("l", "p0")
		synctest.Wait()
		b.expect()
		b.expectDead()
		time.Sleep(time.Hour)
		synctest.Wait()
		b.expect("ack p0")
		b.expectDead("p0 permanent 1")
		if runs.Load() != 1 {
			t.Errorf("the handler ran %d times, want once", runs.Load())
		}
		b.stop()
	})
}

// An outage of an hour spends nobody's attempts, is met by one probe at a
// time, and stops fetching.
func TestB42OutageMakesNoDeadLetters(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		var down atomic.Bool
		var calls, inside, most atomic.Int32
		down.Store(true)
		b := start(t, src, &RunOptions{MaxAttempts: 2, Concurrency: 8, MaxInFlight: 8}, func(context.Context, *envelope.Message) error {
			most.Store(max(most.Load(), inside.Add(1)))
			defer inside.Add(-1)
			calls.Add(1)
			time.Sleep(time.Millisecond)
			if down.Load() {
				return fmt.Errorf("insert: %w", dedupe.ErrUnavailable)
			}
			return nil
		})
		for i := range 50 {
			src.deliver("", fmt.Sprint("p", i))
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		calls.Store(0)
		most.Store(0)
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := calls.Load(); n < 3000 || n > 7500 {
			t.Errorf("%d calls in an hour of outage, want a probe every half to a whole second", n)
		}
		if most.Load() != 1 {
			t.Errorf("%d probes at once, want 1", most.Load())
		}
		if n := len(src.feed); n < 42 {
			t.Errorf("%d messages left to fetch, want at least 42: consumption did not pause", n)
		}
		b.expect()
		down.Store(false)
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := len(src.notes()); n != 50 {
			t.Errorf("%d settled after the outage, want 50", n)
		}
		b.expectDead()
		b.stop()
	})
}

func TestRunWaitsForAnotherHolder(t *testing.T) {
	for _, err := range []error{dedupe.ErrInProgress, dedupe.ErrUnknownOutcome, dedupe.ErrContention} {
		bubble(t, func(t *testing.T) {
			src := newScripted()
			var runs atomic.Int32
			b := start(t, src, &RunOptions{MaxAttempts: 2}, func(context.Context, *envelope.Message) error {
				if runs.Add(1) <= 20 {
					return fmt.Errorf("once: %w", err)
				}
				return nil
			})
			src.deliver("l", "p0")
			synctest.Wait()
			b.expect()
			time.Sleep(time.Hour)
			synctest.Wait()
			b.expect("ack p0")
			b.expectDead()
			b.stop()
		})
	}
}

func TestRunSurvivesPanics(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		var last error
		b := start(t, src, &RunOptions{MaxAttempts: 2, DeadLetter: func(_ context.Context, f *Failure) error { last = f.Err; return nil }},
			func(_ context.Context, m *envelope.Message) error {
				if m.Position == "p0" {
					panic(errBoom)
				}
				return nil
			})
		src.deliver("l", "p0")
		src.deliver("l", "p1")
		time.Sleep(time.Minute)
		synctest.Wait()
		b.expect("ack p0", "ack p1")
		var p *PanicError
		if !errors.As(last, &p) || !errors.Is(last, errBoom) || !strings.Contains(string(p.Stack), "TestRunSurvivesPanics") {
			t.Errorf("dead letter's error is %v, want a PanicError with the stack", last)
		}
		b.stop()
	})
}

// A handler that ends its goroutine is no reason for the lane to stand still.
func TestRunSurvivesGoexit(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		b := start(t, src, nil, func(_ context.Context, m *envelope.Message) error {
			if m.Position == "p0" {
				runtime.Goexit()
			}
			return nil
		})
		src.deliver("l", "p0")
		src.deliver("l", "p1")
		synctest.Wait()
		b.expect("return p0", "ack p1")
		b.stop()
	})
}

func TestB51HandlerThatAlwaysTimesOutIsDeadLettered(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		b := start(t, src, &RunOptions{MaxAttempts: 3, HandlerTimeout: time.Second}, func(ctx context.Context, _ *envelope.Message) error {
			<-ctx.Done()
			return ctx.Err()
		})
		src.deliver("l", "p0")
		time.Sleep(time.Hour)
		synctest.Wait()
		b.expect("ack p0")
		b.expectDead("p0 failed 3")
		b.stop()
	})
}

// B54: handlers finish under a context that has not ended, what has not
// started is handed back, and the source is closed last.
func TestB54DrainFinishesWhatRuns(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		b := start(t, src, &RunOptions{Grace: 5 * time.Second}, func(ctx context.Context, _ *envelope.Message) error {
			select {
			case <-time.After(3 * time.Second):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		src.deliver("l", "p0")
		src.deliver("l", "p1")
		synctest.Wait()
		begin := time.Now()
		if err := b.end(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took != 3*time.Second {
			t.Errorf("the drain took %v, want the 3 s that the handler needed", took)
		}
		b.expect("ack p0", "return p1", "close")
		b.expectDead()
	})
}

// A handler that outlasts the grace is cancelled and handed back: it has not
// failed, so it is no step towards the dead letters.
func TestDrainCancelsAfterTheGrace(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		b := start(t, src, &RunOptions{Grace: time.Second, MaxAttempts: 1}, func(ctx context.Context, _ *envelope.Message) error {
			<-ctx.Done()
			return ctx.Err()
		})
		src.deliver("l", "p0")
		synctest.Wait()
		if err := b.end(); err != nil {
			t.Fatal(err)
		}
		b.expect("return p0", "close")
		b.expectDead()
	})
}

func TestDrainNamesAStuckHandler(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src, release := newScripted(), make(chan struct{})
		b := start(t, src, &RunOptions{Grace: time.Second}, func(context.Context, *envelope.Message) error { <-release; return nil })
		src.deliver("l", "p0")
		synctest.Wait()
		if err := b.end(); !errors.Is(err, ErrHandlerStuck) {
			t.Errorf("Run returned %v, want ErrHandlerStuck", err)
		}
		close(release)
	})
}

// A drain during a back-off does not wait it out.
func TestDrainEndsBackoffs(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		b := start(t, src, &RunOptions{Backoff: Backoff{Min: time.Hour, Max: time.Hour}}, func(context.Context, *envelope.Message) error { return errBoom })
		src.deliver("l", "p0")
		synctest.Wait()
		begin := time.Now()
		b.stop()
		if took := time.Since(begin); took != 0 {
			t.Errorf("the drain took %v, want none", took)
		}
		b.expect("return p0", "close")
	})
}

func TestStoppingReturnsWhatHasNotStarted(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src, release := newScripted(), make(chan struct{})
		b := start(t, src, nil, func(context.Context, *envelope.Message) error { <-release; return nil })
		stopping := make(chan struct{})
		for i := range 3 {
			src.feed <- &brokers.Delivery{Message: &envelope.Message{Position: fmt.Sprint("p", i)}, Lane: "l", Stopping: stopping}
		}
		synctest.Wait()
		close(stopping)
		synctest.Wait()
		b.expect() // p0 runs, and may finish
		close(release)
		synctest.Wait()
		b.expect("ack p0", "return p1", "return p2")
		b.stop()
	})
}

func TestLostCancelsAndDoesNotAcknowledge(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		var ended error
		b := start(t, src, &RunOptions{MaxAttempts: 1}, func(ctx context.Context, _ *envelope.Message) error {
			<-ctx.Done()
			ended = context.Cause(ctx)
			return ctx.Err()
		})
		lost := make(chan struct{})
		d := &brokers.Delivery{Message: &envelope.Message{Position: "p0"}, Lane: "l", Lost: lost}
		src.feed <- d
		synctest.Wait()
		close(lost)
		synctest.Wait()
		if !errors.Is(ended, brokers.ErrLost) {
			t.Errorf("the handler's context ended with %v, want ErrLost", ended)
		}
		b.expect("return p0")
		b.expectDead()
		b.stop()
	})
}

func TestConcurrencyIsBoundedAndLanesAreSerial(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		var mu sync.Mutex
		inLane := map[string]int{}
		now, most := 0, 0
		b := start(t, src, &RunOptions{Concurrency: 4}, func(_ context.Context, m *envelope.Message) error {
			lane, _, _ := strings.Cut(m.Position, "/")
			mu.Lock()
			now++
			inLane[lane]++
			most = max(most, now)
			if inLane[lane] > 1 {
				t.Errorf("%d handlers at once in lane %s", inLane[lane], lane)
			}
			mu.Unlock()
			time.Sleep(time.Second)
			mu.Lock()
			now--
			inLane[lane]--
			mu.Unlock()
			return nil
		})
		for i := range 60 {
			lane := fmt.Sprint("l", i%6)
			src.deliver(lane, fmt.Sprintf("%s/%d", lane, i))
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if most != 4 {
			t.Errorf("%d handlers at once, want 4", most)
		}
		if n := len(src.notes()); n != 60 {
			t.Errorf("%d settled, want 60", n)
		}
		b.stop()
	})
}

func TestMaxInFlightBoundsWhatIsReceived(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src, release := newScripted(), make(chan struct{})
		b := start(t, src, &RunOptions{Concurrency: 2, MaxInFlight: 5}, func(context.Context, *envelope.Message) error { <-release; return nil })
		for i := range 20 {
			src.deliver("l", fmt.Sprint("p", i))
		}
		synctest.Wait()
		if n := len(src.feed); n != 15 {
			t.Errorf("%d left to receive, want 15", n)
		}
		close(release)
		b.stop()
	})
}

func TestReceiveErrorEndsRun(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		b := start(t, src, nil, func(context.Context, *envelope.Message) error { return nil })
		src.deliver("l", "p0")
		synctest.Wait()
		src.end <- errBoom
		if err := <-b.done; !errors.Is(err, errBoom) {
			t.Errorf("Run returned %v, want %v", err, errBoom)
		}
		b.expect("ack p0", "close")
	})
}

// An acknowledgement that fails loses nothing and is not tried for ever.
func TestAckFailureLeavesTheRestToRedelivery(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		src.ackErr = errBoom
		b := start(t, src, nil, func(context.Context, *envelope.Message) error { return nil })
		src.deliver("l", "p0")
		src.deliver("l", "p1")
		synctest.Wait()
		b.expect("ack p0", "ack p1")
		b.stop()
	})
}

func TestRunRefusesToStart(t *testing.T) {
	h := HandlerFunc(func(context.Context, *envelope.Message) error { return nil })
	for name, f := range map[string]func() error{
		"no source":      func() error { return Run(t.Context(), nil, h, &RunOptions{DeadLetter: Discard}) },
		"no handler":     func() error { return Run(t.Context(), newScripted(), nil, &RunOptions{DeadLetter: Discard}) },
		"no options":     func() error { return Run(t.Context(), newScripted(), h, nil) },
		"no dead letter": func() error { return Run(t.Context(), newScripted(), h, &RunOptions{}) },
	} {
		if err := f(); err == nil {
			t.Errorf("%s: Run started", name)
		}
	}
}

// A message whose key another one holds comes back when the lease ends, however
// long its back-off has become.
func TestComesBackWhenTheLeaseEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src, began := newScripted(), time.Now()
		const lease = 31 * time.Second // behind the 8th try, at about 20 s
		var ended time.Duration
		b := start(t, src, nil, func(context.Context, *envelope.Message) error {
			if left := lease - time.Since(began); left > 0 {
				return fmt.Errorf("wrapped: %w", &dedupe.HeldError{Left: left})
			}
			ended = time.Since(began)
			return nil
		})
		src.deliver("l", "p0")
		time.Sleep(time.Hour)
		synctest.Wait()
		if ended < lease || ended > lease+10*time.Millisecond {
			t.Errorf("handled after %v, the lease ended after %v", ended, lease)
		}
		b.stop()
	})
}
