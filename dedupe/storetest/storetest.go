package storetest

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/unecho/unecho/dedupe"
)

// Case is one thing that a store must do. Run fails tb if it does not.
type Case[S any] struct {
	Name string
	Run  func(tb testing.TB, open Open[S])
}

// Cases returns the suite.
func Cases[S any]() []Case[S] {
	var all []Case[S]
	for _, group := range [...][]Case[S]{
		basicCases[S](), keyCases[S](), failureCases[S](), concurrencyCases[S](),
		misuseCases[S](), unknownCases[S](), retryCases[S](), conflictCases[S](), replyCases[S](), expiryCases[S](), adminCases[S](), batchCases[S](),
		batchKeyCases[S](), batchMisuseCases[S](), placeCases[S](),
	} {
		all = append(all, group...)
	}
	return all
}

// Run runs the suite as subtests, and checks that none leaves a goroutine.
func Run[S any](t *testing.T, open Open[S]) {
	t.Helper()
	for _, c := range Cases[S]() {
		t.Run(c.Name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			t.Cleanup(func() { // the first one, so it runs after those of open
				if err := goleak.Find(before); err != nil {
					t.Errorf("goroutines are left: %v", err)
				}
			})
			c.Run(t, open)
		})
	}
}

// patience is the deadline of a case, and of every claim in it.
const patience = 30 * time.Second

// env is what a case works with.
type env[S any] struct {
	tb   testing.TB
	h    Harness[S]
	ctx  context.Context
	runs atomic.Int64 // of handlers made by effect

	eager bool     // see Eager
	none  []string // effects that must not be committed
}

func start[S any](tb testing.TB, open Open[S], s Settings) *env[S] {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	tb.Cleanup(cancel)
	e := &env[S]{tb: tb, h: open(tb, s), ctx: ctx}
	_, e.eager = e.h.(Eager)
	return e
}

// startHolding is start for a case in which a handler holds its key while
// others want it; a store that holds nothing skips it.
func startHolding[S any](tb testing.TB, open Open[S], s Settings) *env[S] {
	tb.Helper()
	e := start(tb, open, s)
	if e.eager {
		tb.Skip("n/a: the store claims a key only when its handler has returned")
	}
	return e
}

// handler is the function of dedupe.Store.Once.
type handler[S any] = func(ctx context.Context, scope S) ([]byte, error)

// effect returns a handler that writes one effect and returns reply.
func (e *env[S]) effect(name string, reply []byte) handler[S] {
	return func(ctx context.Context, scope S) ([]byte, error) {
		e.runs.Add(1)
		if err := e.h.Add(ctx, scope, name); err != nil {
			return nil, err
		}
		return reply, nil
	}
}

// effectThen returns a handler that writes one effect and then does as told.
func (e *env[S]) effectThen(name string, then func(ctx context.Context, scope S) error) handler[S] {
	add := e.effect(name, nil)
	return func(ctx context.Context, scope S) ([]byte, error) {
		if _, err := add(ctx, scope); err != nil {
			return nil, err
		}
		return nil, then(ctx, scope)
	}
}

// once fails the case at once unless the claim ends with want.
func (e *env[S]) once(c dedupe.Claim, fn handler[S], want dedupe.Outcome) dedupe.Result {
	e.tb.Helper()
	res, err := e.h.Store().Once(e.ctx, c, fn)
	e.wantNone()
	if err != nil {
		e.tb.Fatalf("Once: %v, want %v", err, want)
	}
	if res.Outcome != want {
		e.tb.Fatalf("Once: %v, want %v", res.Outcome, want)
	}
	return res
}

// fails fails the case unless the claim ends with an error that matches want.
func (e *env[S]) fails(c dedupe.Claim, fn handler[S], want error) error {
	e.tb.Helper()
	res, err := e.h.Store().Once(e.ctx, c, fn)
	e.wantNone()
	switch {
	case err == nil:
		e.tb.Errorf("Once: %v, want the error %q", res.Outcome, want)
	case !errors.Is(err, want):
		e.tb.Errorf("Once: %v, want an error that matches %q", err, want)
	case res.Outcome != 0 || res.Reply != nil:
		e.tb.Errorf("Once: a result, %v, beside an error", res.Outcome)
	}
	return err
}

// wantNone checks that what handlers have contributed that must not run, and do
// in an eager store, has had no effect.
func (e *env[S]) wantNone() {
	e.tb.Helper()
	for _, name := range e.none {
		e.wantCount(name, 0)
	}
}

func (e *env[S]) wantCount(name string, want int) {
	e.tb.Helper()
	if n := e.h.Count(e.tb, name); n != want {
		e.tb.Errorf("%d effects %q are committed, want %d", n, name, want)
	}
}

func (e *env[S]) wantRuns(want int64) {
	e.tb.Helper()
	if n := e.runs.Load(); n != want && (!e.eager || n < want) {
		e.tb.Errorf("the handler ran %d times, want %d", n, want)
	}
}

// wantIdle checks that no connection is held, where the store has any.
func (e *env[S]) wantIdle() {
	e.tb.Helper()
	p, ok := e.h.(Pooled)
	if !ok {
		return
	}
	e.within("all connections are back in the pool", func() bool { return p.InUse() == 0 })
}

// within polls until ok, and fails the case at once when the patience is over.
func (e *env[S]) within(what string, ok func() bool) {
	e.tb.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-e.ctx.Done():
			e.tb.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// claim is a claim of an event, by id, whose content is its id.
func claim(id string) dedupe.Claim {
	return claimOf(dedupe.Key{Tenant: "acme", Consumer: "billing", Source: "/orders", ID: id}, id)
}

func claimOf(k dedupe.Key, body string) dedupe.Claim {
	return dedupe.Claim{Key: k, Fingerprint: dedupe.Fingerprint(k, []byte("order.placed"), []byte(body))}
}

// no is a handler that must not run.
func (e *env[S]) no(why string) handler[S] {
	if e.eager { // it may run, and the effect must not be
		name := "none, because " + why
		e.none = append(e.none, name)
		return func(ctx context.Context, scope S) ([]byte, error) { return nil, e.h.Add(ctx, scope, name) }
	}
	return func(context.Context, S) ([]byte, error) {
		e.tb.Errorf("the handler ran although %s", why)
		return nil, nil
	}
}

// power returns a power of the harness, or ends the case as one that does not
// apply.
func power[P any](tb testing.TB, h any) P {
	tb.Helper()
	p, ok := h.(P)
	if !ok {
		name, _, _ := strings.Cut(reflect.TypeFor[P]().Name(), "[")
		tb.Skipf("n/a: the harness is no %s", name)
	}
	return p
}
