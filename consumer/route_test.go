package consumer

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

func event(t *testing.T, typ, id, body string) *envelope.Message {
	t.Helper()
	m, err := envelope.Kafka.Encode(&envelope.Message{ID: id, Source: "/s", Type: typ, Topic: "x", Body: []byte(body)}, envelope.Binary)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// What nobody handles leaves no key, whatever becomes of it: a version that
// handles it gets it as new.
func TestRouteWritesNoKeyForWhatIsNotHandled(t *testing.T) {
	d := memdedupe.NewDriver(nil)
	var ran []string
	wrap := func(name string) Handler {
		return Wrap("orders", dedupe.NewTxStore(d, nil), func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
			ran = append(ran, name+" "+m.ID)
			return nil
		}, nil)
	}
	keys := func() int {
		page, err := d.Admin().List(t.Context(), dedupe.Filter{State: dedupe.StateDone})
		if err != nil {
			t.Fatal(err)
		}
		return len(page.Entries)
	}
	strict := Route(map[string]Handler{"order.placed": wrap("placed"), "order.paid": wrap("paid")}, &RouteOptions{Ignore: []string{"order.viewed"}})
	lax := Route(map[string]Handler{"order.placed": wrap("placed")}, &RouteOptions{Unrouted: UnroutedIgnores})
	for _, tc := range []struct {
		h       Handler
		typ, id string
		want    Class
		keys    int
	}{
		{strict, "order.placed", "1", ClassNone, 1},
		{strict, "order.placed", "1", ClassNone, 1},
		{strict, "order.paid", "2", ClassNone, 2},
		{strict, "order.viewed", "3", ClassNone, 2},
		{strict, "order.lost", "4", ClassPermanent, 2},
		{strict, "Order.Placed", "5", ClassPermanent, 2},
		{lax, "order.lost", "4", ClassNone, 2},
		{lax, "order.paid", "2", ClassNone, 2},
	} {
		err := tc.h.Handle(t.Context(), event(t, tc.typ, tc.id, "{}"))
		if Classify(err) != tc.want || tc.want == ClassPermanent && (!errors.Is(err, ErrUnroutedType) || reason(tc.want, err) != ReasonUnrouted) {
			t.Errorf("%s %s: %v (%s), want %q", tc.typ, tc.id, err, Classify(err), tc.want)
		}
		if n := keys(); n != tc.keys {
			t.Errorf("%s %s: %d keys, want %d", tc.typ, tc.id, n, tc.keys)
		}
	}
	if err := Route(map[string]Handler{"order.lost": wrap("lost")}, nil).Handle(t.Context(), event(t, "order.lost", "4", "{}")); err != nil {
		t.Fatal(err)
	}
	if want := []string{"placed 1", "paid 2", "lost 4"}; !slices.Equal(ran, want) {
		t.Errorf("ran %q, want %q", ran, want)
	}
	if err := strict.Handle(t.Context(), &envelope.Message{Body: []byte("no envelope")}); Classify(err) != ClassMalformed {
		t.Errorf("a message without an envelope: %v", err)
	}
}

// Of several handlers, the one that forgets first decides about the retention.
func TestRouteTellsTheShortestWindow(t *testing.T) {
	wrap := func(name string, keep time.Duration) Handler {
		return Wrap(name, memdedupe.NewStore(nil), func(context.Context, *memdedupe.Tx, *envelope.Message) error { return nil }, &Options{Retain: keep})
	}
	plain := HandlerFunc(func(context.Context, *envelope.Message) error { return nil })
	h := Chain(Route(map[string]Handler{"a": wrap("x", 3*time.Hour), "b": Chain(wrap("y", 2*time.Hour)), "c": plain, "d": wrap("x", 4*time.Hour)}, nil))
	if name, keeps := windowOf(h).window(); name != "x, y" || keeps != 2*time.Hour {
		t.Errorf("%q keeps keys for %v", name, keeps)
	}
	if _, keeps := windowOf(Route(map[string]Handler{"c": plain}, nil)).window(); keeps < 100*365*24*time.Hour {
		t.Errorf("a handler without keys keeps them for %v", keeps)
	}
}

func TestRouteRefusesNonsense(t *testing.T) {
	h := HandlerFunc(func(context.Context, *envelope.Message) error { return nil })
	for name, f := range map[string]func(){
		"no handlers":         func() { Route(nil, nil) },
		"no type":             func() { Route(map[string]Handler{"": h}, nil) },
		"no handler":          func() { Route(map[string]Handler{"a": nil}, nil) },
		"handled and ignored": func() { Route(map[string]Handler{"a": h}, &RouteOptions{Ignore: []string{"a"}}) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f()
		}()
	}
}
