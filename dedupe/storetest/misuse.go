package storetest

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/unecho/unecho/dedupe"
)

func misuseCases[S any]() []Case[S] {
	return []Case[S]{
		{"B34 swallowed SQL error", swallowed[S]},
		{"SQL error returned", sqlError[S]},
		{"B34 handler ends the transaction", ended[S]},
		{"B34 handler ends the transaction and fails", endedAndFailed[S]},
		{"B34 scope kept", kept[S]},
	}
}

// swallowed: success that wrote nothing is the worst of all answers.
func swallowed[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 4})
	a := power[Aborter[S]](tb, e.h)
	for range 8 {
		_ = e.fails(claim("1"), e.effectThen("e", func(ctx context.Context, scope S) error {
			if a.Abort(ctx, scope) == nil {
				tb.Error("the statement that should fail did not")
			}
			return nil
		}), dedupe.ErrScope)
	}
	e.noTrace(claim("1"), "e")
}

func sqlError[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 4})
	a := power[Aborter[S]](tb, e.h)
	for range 8 {
		var own error
		_, err := e.h.Store().Once(e.ctx, claim("1"), e.effectThen("e", func(ctx context.Context, scope S) error {
			own = a.Abort(ctx, scope)
			return fmt.Errorf("handler: %w", own)
		}))
		if !errors.Is(err, own) || errors.Is(err, dedupe.ErrUnavailable) || errors.Is(err, dedupe.ErrScope) {
			tb.Errorf("Once: %v, want what the handler returned", err)
		}
	}
	e.noTrace(claim("1"), "e")
}

func ended[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 4})
	for _, end := range power[Ender[S]](tb, e.h).Ends() {
		c := claim(end.Name)
		err := e.fails(c, e.effectThen(end.Name, func(ctx context.Context, scope S) error {
			_ = end.Do(ctx, scope) // whether or not it was refused: the handler does not look
			return nil
		}), dedupe.ErrScope)
		if errors.Is(err, dedupe.ErrUnavailable) || errors.Is(err, dedupe.ErrUnknownOutcome) {
			tb.Errorf("%s: %v: it passes for an outage", end.Name, err)
		}
		e.oneInTheEnd(c, end.Name)
	}
}

// endedAndFailed: the way back from a failure must not stumble over it.
func endedAndFailed[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 4})
	for _, end := range power[Ender[S]](tb, e.h).Ends() {
		c := claim(end.Name)
		err := e.fails(c, e.effectThen(end.Name, func(ctx context.Context, scope S) error {
			_ = end.Do(ctx, scope)
			return errHandler
		}), errHandler)
		if errors.Is(err, dedupe.ErrUnavailable) {
			tb.Errorf("%s: %v: it passes for an outage", end.Name, err)
		}
		e.oneInTheEnd(c, end.Name)
	}
}

// oneInTheEnd: a handler that commits behind the store's back commits the key
// as well, one that rolls back frees it. The redelivery makes it one effect.
func (e *env[S]) oneInTheEnd(c dedupe.Claim, name string) {
	e.tb.Helper()
	before := e.h.Count(e.tb, name)
	res, err := e.h.Store().Once(e.ctx, c, e.effect(name, nil))
	switch {
	case err != nil:
		e.tb.Errorf("%s: the redelivery: %v", name, err)
	case (res.Outcome == dedupe.Duplicate) != (before == 1):
		e.tb.Errorf("%s: the redelivery is a %v although %d effects were committed", name, res.Outcome, before)
	}
	e.wantCount(name, 1)
	e.wantIdle()
}

// kept: a scope that outlives its handler must not reach the next transaction
// on the same connection.
func kept[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 1})
	for _, fail := range [...]error{nil, errHandler} {
		name := fmt.Sprint("kept ", fail)
		var scope S
		_, err := e.h.Store().Once(e.ctx, claim(name), e.effectThen(name, func(_ context.Context, s S) error {
			scope = s
			return fail
		}))
		if !errors.Is(err, fail) {
			tb.Fatalf("Once: %v, want %v", err, fail)
		}
		if e.h.Add(e.ctx, scope, name) == nil && !e.eager { // there, it works in vain
			tb.Error("a scope works after its handler has returned")
		}
		_ = e.fails(claim("other "+name), e.effectThen(name, func(ctx context.Context, _ S) error {
			if e.h.Add(ctx, scope, name) == nil && !e.eager {
				tb.Error("a scope of an earlier handler works in a later one")
			}
			return errHandler
		}), errHandler)
		if want := 1; fail == nil {
			e.wantCount(name, want)
		} else {
			e.wantCount(name, 0)
		}
	}
	e.wantIdle()
}
