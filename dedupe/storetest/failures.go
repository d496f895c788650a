package storetest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
)

var errHandler = errors.New("the handler's own error")

func failureCases[S any]() []Case[S] {
	return []Case[S]{
		{"handler error", handlerError[S]},
		{"handler panic", handlerPanic[S]},
		{"handler Goexit", handlerGoexit[S]},
		{"handler context ends", contextEnds[S]},
		{"context ends after the work", contextEndsLate[S]},
		{"context done before", contextDone[S]},
		{"store unreachable", unreachable[S]},
		{"store lost while the handler runs", lostMidway[S]},
	}
}

// noTrace checks that what went before left nothing, and that the key is free.
func (e *env[S]) noTrace(c dedupe.Claim, name string) {
	e.tb.Helper()
	e.wantCount(name, 0)
	e.wantIdle()
	e.once(c, e.effect(name, nil), dedupe.Processed)
	e.wantCount(name, 1)
	e.once(c, e.no("it was done"), dedupe.Duplicate)
	e.wantIdle()
}

func handlerError[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 2})
	for i := range 20 {
		err := fmt.Errorf("run %d: %w", i, errHandler)
		_ = e.fails(claim("1"), e.effectThen("e", func(context.Context, S) error { return err }), errHandler)
	}
	e.wantRuns(20)
	e.noTrace(claim("1"), "e")
}

func handlerPanic[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 2})
	for range 2 {
		func() {
			defer func() {
				v := recover()
				if err, _ := v.(error); !errors.Is(err, errHandler) {
					tb.Errorf("recovered %v, want the handler's panic", v)
				}
			}()
			_, err := e.h.Store().Once(e.ctx, claim("1"), e.effectThen("e", func(context.Context, S) error { panic(errHandler) }))
			tb.Errorf("Once returned %v, its handler was to panic", err)
		}()
	}
	e.noTrace(claim("1"), "e")
}

func handlerGoexit[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 2})
	for range 2 {
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, err := e.h.Store().Once(e.ctx, claim("1"), e.effectThen("e", func(context.Context, S) error {
				runtime.Goexit()
				return nil
			}))
			tb.Errorf("Once returned %v, its handler was to end the goroutine", err)
		}()
		<-done
	}
	e.noTrace(claim("1"), "e")
}

func contextEnds[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 2})
	wait := e.effectThen("e", func(ctx context.Context, _ S) error {
		<-ctx.Done()
		return fmt.Errorf("work: %w", ctx.Err())
	})
	ctx, cancel := context.WithCancel(e.ctx)
	time.AfterFunc(10*time.Millisecond, cancel)
	if _, err := e.h.Store().Once(ctx, claim("1"), wait); !errors.Is(err, context.Canceled) {
		tb.Errorf("Once: %v, want context.Canceled", err)
	}
	ctx, cancel = context.WithTimeout(e.ctx, 500*time.Millisecond)
	defer cancel()
	_, err := e.h.Store().Once(ctx, claim("1"), wait)
	if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, dedupe.ErrUnavailable) {
		tb.Errorf("Once: %v, want context.DeadlineExceeded, and not as an outage: it is the handler that is slow", err)
	}
	e.noTrace(claim("1"), "e")
}

// contextEndsLate: once the handler has succeeded, the end of its context is no
// reason to undo it; and whatever the store does, its answer has to be true.
func contextEndsLate[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	ctx, cancel := context.WithCancel(e.ctx)
	res, err := e.h.Store().Once(ctx, claim("1"), e.effectThen("e", func(context.Context, S) error {
		cancel()
		return nil
	}))
	if err != nil || res.Outcome != dedupe.Processed {
		tb.Fatalf("Once: %v, %v; want processed", res.Outcome, err)
	}
	e.wantCount("e", 1)
	e.once(claim("1"), e.no("it was done"), dedupe.Duplicate)
}

func contextDone[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	if _, err := e.h.Store().Once(ctx, claim("1"), e.no("the context was done")); !errors.Is(err, context.Canceled) {
		tb.Errorf("Once: %v, want context.Canceled", err)
	}
	e.noTrace(claim("1"), "e")
}

func unreachable[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	b := power[Breaker](tb, e.h)
	e.once(claim("0"), e.effect("e", nil), dedupe.Processed)
	b.Break()
	for range 3 {
		e.out(claim("0"), e.no("the store is unreachable"))
		e.out(claim("1"), e.no("the store is unreachable"))
	}
	b.Mend()
	e.within("the store is back", func() bool {
		_, err := e.h.Store().Once(e.ctx, claim("1"), e.effect("e", nil))
		return err == nil
	})
	e.once(claim("0"), e.no("it was done"), dedupe.Duplicate)
	e.wantCount("e", 2)
	e.wantIdle()
}

// out is fails with ErrUnavailable. An eager store sends all that it has on a
// connection that may be dead, and cannot know whether it arrived.
func (e *env[S]) out(c dedupe.Claim, fn handler[S]) {
	e.tb.Helper()
	res, err := e.h.Store().Once(e.ctx, c, fn)
	if !errors.Is(err, dedupe.ErrUnavailable) && (!e.eager || !errors.Is(err, dedupe.ErrUnknownOutcome)) {
		e.tb.Errorf("Once: %v, %v, want %v", res.Outcome, err, dedupe.ErrUnavailable)
	}
}

// lostMidway: the handler's error is the outage's, whatever it makes of it.
func lostMidway[S any](tb testing.TB, open Open[S]) {
	e := startHolding(tb, open, Settings{})
	b := power[Breaker](tb, e.h)
	for name, wrap := range map[string]func(error) error{
		"wrapped":   func(err error) error { return fmt.Errorf("handler: %w", err) },
		"formatted": func(err error) error { return fmt.Errorf("handler: %v", err) }, //nolint:errorlint // what handlers do
		"own error": func(error) error { return errHandler },
	} {
		c := claim(name)
		_ = e.fails(c, e.effectThen(name, func(ctx context.Context, scope S) error {
			b.Break()
			err := e.h.Add(ctx, scope, name)
			if err == nil {
				tb.Error("a statement succeeded on a connection that was cut")
			}
			return wrap(err)
		}), dedupe.ErrUnavailable)
		b.Mend()
		e.within("the store is back", func() bool {
			_, err := e.h.Store().Once(e.ctx, c, e.effect(name, nil))
			return err == nil
		})
		e.wantCount(name, 1)
	}
	e.wantIdle()
}
