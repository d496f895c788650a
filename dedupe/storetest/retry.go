package storetest

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/unecho/unecho/dedupe"
)

func retryCases[S any]() []Case[S] {
	return []Case[S]{
		{"B35 lost races are run again", runAgain[S]},
		{"B35 lost races are bounded", runAgainBounded[S]},
	}
}

// runAgain: each run has a transaction of its own. Three runs in one make three
// effects.
func runAgain[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 2})
	r := power[Retrier](tb, e.h)
	var failures int
	e.once(claim("1"), e.effectThen("e", func(context.Context, S) error {
		if failures++; failures <= 2 {
			return fmt.Errorf("handler: %w", r.Lost())
		}
		return nil
	}), dedupe.Processed)
	e.wantRuns(3)
	e.wantCount("e", 1)
	e.once(claim("1"), e.no("it was done"), dedupe.Duplicate)
	e.wantIdle()
}

func runAgainBounded[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 2})
	r := power[Retrier](tb, e.h)
	lost := r.Lost()
	err := e.fails(claim("1"), e.effectThen("e", func(context.Context, S) error { return lost }), dedupe.ErrContention)
	if !errors.Is(err, lost) {
		tb.Errorf("Once: %v, want it to wrap %v", err, lost)
	}
	if n := e.runs.Load(); n < 2 || n > 20 {
		tb.Errorf("the handler ran %d times, want a few", n)
	}
	e.noTrace(claim("1"), "e")
}
