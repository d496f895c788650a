package consumertest

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

// World is what a handler works in.
type World[S any] struct {
	// Store is where the keys are. It holds none at the beginning.
	Store dedupe.Store[S]
	// Handler is what is tested, as it is given to consumer.Wrap.
	Handler func(ctx context.Context, scope S, m *envelope.Message) error
	// State describes, as a text, everything that the handler may have changed:
	// what is committed, and what it did elsewhere. Two runs that differ in
	// nothing that matters have equal texts.
	State func(tb testing.TB) string
	// Options are those of consumer.Wrap; nil is their default.
	Options *consumer.Options
	// Name is the consumer's, which takes part in every key and in what is
	// derived from it. Defaults to "explore".
	Name string
}

// wrap makes the handler, on a store that stands for w.Store.
func (w World[S]) wrap(st dedupe.Store[S]) consumer.Handler {
	name := w.Name
	if name == "" {
		name = "explore"
	}
	return consumer.Wrap(name, Watch(st), w.Handler, w.Options)
}

// Boundary is a place at which a process may end.
type Boundary string

// The boundaries, in the order in which a delivery passes them.
const (
	// BeforeClaim: the delivery has arrived.
	BeforeClaim Boundary = "before the claim"
	// BeforeHandler: the key is claimed, and nothing is done.
	BeforeHandler Boundary = "before the handler"
	// AfterHandler: the handler has returned, and nothing is committed.
	AfterHandler Boundary = "after the handler, before the commit"
	// AfterCommit: all is committed, and nobody has heard of it. It stands for
	// all ends from here on, whether the acknowledgement was not sent yet or did
	// not arrive: the process is gone with all that it knew, and the event comes
	// again. One that arrived is like it, too, for Explore delivers everything
	// again. An acknowledgement that gets lost while the process lives on meets
	// what it remembers; that is the run which delivers every event twice.
	AfterCommit Boundary = "after the commit, before the acknowledgement"
)

// Boundaries are all of them.
func Boundaries() []Boundary {
	return []Boundary{BeforeClaim, BeforeHandler, AfterHandler, AfterCommit}
}

// errEnd is the end of a process.
var errEnd = errors.New("consumertest: the process ends here")

var errPassed = errors.New("the boundary was not met: is it a duplicate of another event?")

// Explore runs a handler over events, in order, and then again and again: each
// time the process ends at one boundary of one event, and everything is delivered
// again. It fails tb, naming the place, where the state in the end is not that of
// the run without a fault, and where a redelivery does not succeed. The handler
// must succeed on all events when nothing is wrong.
//
// setup makes the world anew for each run: there are four for each event, and
// two more. What it opens goes with its tb.
func Explore[S any](tb testing.TB, setup func(tb testing.TB) World[S], events ...*envelope.Message) {
	tb.Helper()
	want, ok := undisturbed(tb, setup, events, 1)
	if !ok {
		return
	}
	if got, ok := undisturbed(tb, setup, events, 2); ok && got != want {
		tb.Errorf("consumertest: every event delivered twice, the state is\n%s\nonce it is\n%s", got, want)
	}
	for i := range events {
		for _, at := range Boundaries() {
			w := setup(tb)
			got, err := interrupted(tb, w, events, i, at)
			switch {
			case err != nil:
				tb.Errorf("consumertest: the process ended at event %d, %s, and the redelivery fails: %v", i, at, err)
			case got != want:
				tb.Errorf("consumertest: the process ended at event %d, %s; after the redelivery the state is\n%s\nwithout it is\n%s", i, at, got, want)
			}
		}
	}
}

// undisturbed delivers every event so many times.
func undisturbed[S any](tb testing.TB, setup func(tb testing.TB) World[S], events []*envelope.Message, times int) (state string, ok bool) {
	tb.Helper()
	w := setup(tb)
	h := w.wrap(w.Store)
	for i, m := range events {
		for range times {
			if err := h.Handle(tb.Context(), m.Clone()); err != nil {
				tb.Errorf("consumertest: event %d, without any fault: %v", i, err)
				return "", false
			}
		}
	}
	return w.State(tb), true
}

// interrupted ends the process at a boundary of one event, and starts it again.
func interrupted[S any](tb testing.TB, w World[S], events []*envelope.Message, nth int, at Boundary) (state string, err error) {
	tb.Helper()
	st := &ending[S]{inner: w.Store, at: at}
	first := w.wrap(st)
	for i, m := range events[:nth+1] {
		st.now = i == nth
		err := live(func() error { return first.Handle(tb.Context(), m.Clone()) })
		switch {
		case i < nth && err != nil:
			return "", fmt.Errorf("event %d: %w", i, err)
		case i == nth && !errors.Is(err, errEnd):
			return "", fmt.Errorf("event %d: %w", i, errors.Join(errPassed, err))
		}
	}
	again := w.wrap(w.Store)
	for i, m := range events {
		if err := again.Handle(tb.Context(), m.Clone()); err != nil {
			return "", fmt.Errorf("event %d: %w", i, err)
		}
	}
	return w.State(tb), nil
}

// live runs a process, and returns errEnd if that is how it ended.
func live(run func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			if v != any(errEnd) {
				panic(v)
			}
			err = errEnd
		}
	}()
	return run()
}

// ending is a store whose process ends at a boundary.
type ending[S any] struct {
	inner dedupe.Store[S]
	at    Boundary
	now   bool // in this claim
}

// Once implements dedupe.Store. In the handler's scope the process ends by a
// panic, which leaves what a dead process does: no error says that the handler
// has failed, so a transaction is rolled back, and a lease does not become free
// but unknown, as if it had run out.
func (e *ending[S]) Once(ctx context.Context, c dedupe.Claim, fn func(ctx context.Context, scope S) ([]byte, error)) (dedupe.Result, error) {
	if !e.now {
		return e.inner.Once(ctx, c, fn)
	}
	if e.at == BeforeClaim {
		return dedupe.Result{}, errEnd
	}
	res, err := e.inner.Once(ctx, c, func(ctx context.Context, scope S) ([]byte, error) {
		if e.at == BeforeHandler {
			panic(errEnd)
		}
		reply, err := fn(ctx, scope)
		if err == nil && e.at == AfterHandler {
			panic(errEnd)
		}
		return reply, err
	})
	if err == nil {
		return dedupe.Result{}, errEnd
	}
	return res, err
}
