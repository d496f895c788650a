package storetest

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/unecho/unecho/dedupe"
)

func batchMisuseCases[S any]() []Case[S] {
	return []Case[S]{
		{"batch: B34 swallowed SQL error", batchSwallowed[S]},
		{"batch: B34 handler ends the transaction", batchEnded[S]},
		{"batch: B35 lost races are run again", batchRunAgain[S]},
	}
}

// eachThen is each's handler, and then what the case does to the scope.
func (e *env[S]) eachThen(claims []dedupe.Claim, then func(ctx context.Context, scope S) error) func(context.Context, S, []int) ([][]byte, error) {
	return func(ctx context.Context, scope S, fresh []int) ([][]byte, error) {
		replies, err := e.addEach(claims)(ctx, scope, fresh)
		return replies, errors.Join(err, then(ctx, scope))
	}
}

func batchSwallowed[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 2})
	b := e.batching()
	a := power[Aborter[S]](tb, e.h)
	claims := []dedupe.Claim{claim("1"), claim("2")}
	for range 3 {
		if _, err := b.OnceEach(e.ctx, claims, e.eachThen(claims, func(ctx context.Context, scope S) error {
			_ = a.Abort(ctx, scope)
			return nil
		})); !errors.Is(err, dedupe.ErrScope) {
			tb.Errorf("OnceEach: %v, want ErrScope", err)
		}
	}
	e.noTrace(claim("1"), "1")
	e.wantCount("2", 0)
}

// batchEnded: a handler that commits behind the store's back commits all keys as
// well, one that rolls back frees them.
func batchEnded[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 2})
	b := e.batching()
	for _, end := range power[Ender[S]](tb, e.h).Ends() {
		claims := []dedupe.Claim{claim(end.Name + " 1"), claim(end.Name + " 2")}
		_, err := b.OnceEach(e.ctx, claims, e.eachThen(claims, func(ctx context.Context, scope S) error {
			_ = end.Do(ctx, scope)
			return nil
		}))
		if !errors.Is(err, dedupe.ErrScope) || errors.Is(err, dedupe.ErrUnavailable) || errors.Is(err, dedupe.ErrUnknownOutcome) {
			tb.Errorf("%s: %v, want ErrScope", end.Name, err)
		}
		for _, c := range claims {
			e.oneInTheEnd(c, c.Key.ID)
		}
	}
}

func batchRunAgain[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 2})
	b := e.batching()
	r := power[Retrier](tb, e.h)
	claims := []dedupe.Claim{claim("1"), claim("2")}
	failures := 0
	answers, err := b.OnceEach(e.ctx, claims, e.eachThen(claims, func(context.Context, S) error {
		if failures++; failures <= 2 {
			return fmt.Errorf("handler: %w", r.Lost())
		}
		return nil
	}))
	if err != nil {
		tb.Fatal(err)
	}
	e.wantOutcomes(answers, dedupe.Processed, dedupe.Processed)
	e.wantRuns(3)
	e.wantCount("1", 1)
	e.wantCount("2", 1)
	e.wantIdle()
}
