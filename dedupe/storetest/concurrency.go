package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
)

func concurrencyCases[S any]() []Case[S] {
	cases := []Case[S]{
		{"in progress", inProgress[S]},
		{"waits for the owner's commit", waitsForCommit[S]},
		{"runs after the owner's rollback", runsAfterRollback[S]},
		{"B14 first writers race", firstWritersRace[S]},
		{"many keys at once", manyAtOnce[S]},
	}
	for _, conns := range [...]int{8, 2} {
		cases = append(cases, Case[S]{fmt.Sprintf("B24 32 copies on %d connections", conns),
			func(tb testing.TB, open Open[S]) { copies(tb, open, conns) }})
	}
	return cases
}

// owner starts a claim whose handler has written an effect and then waits for
// what release is sent.
func (e *env[S]) owner(c dedupe.Claim, name string) (release chan<- error, done <-chan error) {
	e.tb.Helper()
	return e.holding(func(hold func(context.Context, S) error) error {
		_, err := e.h.Store().Once(e.ctx, c, e.effectThen(name, hold))
		return err
	})
}

// holding starts a claim, and waits until its handler is at hold, where it waits
// for what release is sent.
func (e *env[S]) holding(claim func(hold func(context.Context, S) error) error) (release chan<- error, done <-chan error) {
	e.tb.Helper()
	running, rel, ended := make(chan struct{}), make(chan error), make(chan error, 1)
	go func() {
		ended <- claim(func(ctx context.Context, _ S) error {
			close(running)
			select {
			case err := <-rel:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	select {
	case <-running:
	case err := <-ended:
		e.tb.Fatalf("the owner's claim: %v", err)
	}
	return rel, ended
}

// inProgress: running now is not done. It must not be acknowledged.
func inProgress[S any](tb testing.TB, open Open[S]) {
	e := startHolding(tb, open, Settings{Wait: 30 * time.Millisecond})
	release, done := e.owner(claim("1"), "e")
	for range 3 {
		began := time.Now()
		_ = e.fails(claim("1"), e.no("another one is at work on it"), dedupe.ErrInProgress)
		if took := time.Since(began); took > 10*time.Second {
			tb.Errorf("a claim waited %v, want about 30 ms", took)
		}
	}
	_ = e.fails(claimOf(claim("1").Key, "other content"), e.no("another one is at work on it"), dedupe.ErrInProgress)
	release <- nil
	if err := <-done; err != nil {
		tb.Fatalf("the owner: %v", err)
	}
	e.once(claim("1"), e.no("it was done"), dedupe.Duplicate)
	e.wantCount("e", 1)
	e.wantIdle()
}

type answer struct {
	res dedupe.Result
	err error
}

// waiter starts a copy while the owner runs, and gives it time to begin to wait.
func (e *env[S]) waiter(c dedupe.Claim, fn handler[S]) <-chan answer {
	got := make(chan answer, 1)
	go func() {
		res, err := e.h.Store().Once(e.ctx, c, fn)
		got <- answer{res, err}
	}()
	select {
	case a := <-got:
		e.tb.Errorf("a copy was answered %v, %v while the owner was at work", a.res.Outcome, a.err)
		got <- a
	case <-time.After(20 * time.Millisecond): // it waits; if not yet, the case is only easier
	}
	return got
}

func waitsForCommit[S any](tb testing.TB, open Open[S]) {
	e := startHolding(tb, open, Settings{})
	release, done := e.owner(claim("1"), "e")
	got := e.waiter(claim("1"), e.no("another one has done it"))
	release <- nil
	if a := <-got; a.err != nil || a.res.Outcome != dedupe.Duplicate {
		tb.Errorf("the copy: %v, %v; want duplicate", a.res.Outcome, a.err)
	}
	if err := <-done; err != nil {
		tb.Errorf("the owner: %v", err)
	}
	e.wantCount("e", 1)
}

func runsAfterRollback[S any](tb testing.TB, open Open[S]) {
	e := startHolding(tb, open, Settings{})
	release, done := e.owner(claim("1"), "e")
	got := e.waiter(claim("1"), e.effect("e", []byte("second")))
	release <- errHandler
	if a := <-got; a.err != nil || a.res.Outcome != dedupe.Processed || string(a.res.Reply) != "second" {
		tb.Errorf("the copy: %v, %q, %v; want processed, \"second\"", a.res.Outcome, a.res.Reply, a.err)
	}
	if err := <-done; !errors.Is(err, errHandler) {
		tb.Errorf("the owner: %v, want its own error", err)
	}
	e.wantCount("e", 1)
	e.wantRuns(2)
}

// firstWritersRace: two contents of one key at once. One is done, the other is
// a conflict.
func firstWritersRace[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	for i := range 10 {
		k := claim(fmt.Sprint("race ", i)).Key
		var counts [4]atomic.Int64
		var wg sync.WaitGroup
		for _, body := range [...]string{"a", "b"} {
			wg.Go(func() { counts[e.settle(claimOf(k, body), e.effect("e", nil))].Add(1) })
		}
		wg.Wait()
		if counts[dedupe.Processed].Load() != 1 || counts[dedupe.Conflict].Load() != 1 {
			tb.Errorf("%d processed and %d conflicts, want one of each", counts[dedupe.Processed].Load(), counts[dedupe.Conflict].Load())
		}
	}
	e.wantCount("e", 10)
	if n := e.h.Conflicts(tb); n != 10 {
		tb.Errorf("%d conflicts are recorded, want 10", n)
	}
}

// settle claims again until there is an outcome, as redeliveries do.
func (e *env[S]) settle(c dedupe.Claim, fn handler[S]) dedupe.Outcome {
	for e.ctx.Err() == nil {
		res, err := e.h.Store().Once(e.ctx, c, fn)
		switch {
		case err == nil:
			return res.Outcome
		case errors.Is(err, errHandler), errors.Is(err, dedupe.ErrInProgress), errors.Is(err, dedupe.ErrUnavailable):
			// come back later: an exhausted pool is an outage too
		case errors.Is(err, e.ctx.Err()):
		default:
			e.tb.Errorf("Once: %v, want an outcome or a reason to come back later", err)
			return 0
		}
	}
	e.tb.Errorf("no outcome within %v", patience)
	return 0
}

// copies is B24: at most one at work at any time, one effect in the end.
func copies[S any](tb testing.TB, open Open[S], conns int) {
	e := startHolding(tb, open, Settings{Conns: conns, Wait: 200 * time.Millisecond})
	var inside, most, runs atomic.Int64
	work := e.effectThen("e", func(ctx context.Context, _ S) error {
		defer inside.Add(-1)
		if n := inside.Add(1); n > 1 {
			most.Store(n)
		}
		select {
		case <-time.After(100 * time.Millisecond): // so that the others pile up
		case <-ctx.Done():
		}
		if runs.Add(1) == 1 {
			return errHandler
		}
		return nil
	})
	var outcomes [4]atomic.Int64
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() { outcomes[e.settle(claim("1"), work)].Add(1) })
	}
	wg.Wait()
	if n := most.Load(); n > 0 {
		tb.Errorf("%d handlers were at work on one key at a time", n)
	}
	if p, d := outcomes[dedupe.Processed].Load(), outcomes[dedupe.Duplicate].Load(); p != 1 || d != 31 {
		tb.Errorf("%d processed and %d duplicates, want 1 and 31", p, d)
	}
	if n := runs.Load(); n != 2 {
		tb.Errorf("the handler ran %d times, want 2: one failure, one success", n)
	}
	e.wantCount("e", 1)
	e.wantIdle()
}

func manyAtOnce[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 4})
	var wg sync.WaitGroup
	var processed atomic.Int64
	for worker := range 8 {
		wg.Go(func() {
			for i := range 20 {
				id := fmt.Sprint("k", (i+worker*5)%40) // each key comes to several workers
				if e.settle(claim(id), e.effect(id, nil)) == dedupe.Processed {
					processed.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if n := processed.Load(); n != 40 {
		tb.Errorf("%d keys were processed, want 40", n)
	}
	for i := range 40 {
		e.wantCount(fmt.Sprint("k", i), 1)
	}
	e.wantIdle()
}
