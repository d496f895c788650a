package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// raw is an event as an adapter hands it over.
func raw(t testing.TB, id, body string) *envelope.Message {
	t.Helper()
	m, err := envelope.Kafka.Encode(&envelope.Message{ID: id, Source: "/s", Type: "t", Topic: "x", Body: []byte(body)}, envelope.Binary)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// outcomes notes what the store decided.
type outcomes struct {
	mu   sync.Mutex
	seen []dedupe.Outcome
}

func (o *outcomes) Observe(_ context.Context, e Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if e.Step == StepDecide {
		o.seen = append(o.seen, e.Outcome)
	}
}

func TestWrapRunsOnceForEachEvent(t *testing.T) {
	var ran []string
	h := Wrap("c", memdedupe.NewStore(nil), func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
		ran = append(ran, m.ID+"="+string(m.Body))
		return nil
	}, nil)
	o := &outcomes{}
	ctx := withObserver(t.Context(), o)
	for _, m := range []*envelope.Message{raw(t, "1", "a"), raw(t, "1", "a"), raw(t, "2", "b"), raw(t, "1", "changed")} {
		if err := h.Handle(ctx, m); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{"1=a", "2=b"}; !slices.Equal(ran, want) {
		t.Errorf("ran %q, want %q", ran, want)
	}
	want := []dedupe.Outcome{dedupe.Processed, dedupe.Duplicate, dedupe.Processed, dedupe.Conflict}
	if !slices.Equal(o.seen, want) {
		t.Errorf("outcomes %v, want %v", o.seen, want)
	}
}

// B14: what counts as the same content is the user's choice, and a changed
// amount is a conflict in each of them but the one that looks at nothing.
func TestB14ContentDecidesAboutConflicts(t *testing.T) {
	first, reordered, changed := `{"a":1,"b":2}`, ` {"b":2, "a":1}`, `{"a":1,"b":3}`
	for name, c := range map[string]struct {
		content            Content
		reordered, changed dedupe.Outcome
	}{
		"raw":  {nil, dedupe.Conflict, dedupe.Conflict},
		"json": {JSONContent, dedupe.Duplicate, dedupe.Conflict},
		"none": {NoContent, dedupe.Duplicate, dedupe.Duplicate},

		"chosen field":       {FieldsContent("/b"), dedupe.Duplicate, dedupe.Conflict},
		"chosen other field": {FieldsContent("/a"), dedupe.Duplicate, dedupe.Duplicate},
	} {
		h := Wrap("c", memdedupe.NewStore(nil), func(context.Context, *memdedupe.Tx, *envelope.Message) error { return nil }, &Options{Content: c.content})
		o := &outcomes{}
		for _, body := range []string{first, first, reordered, changed} {
			if err := h.Handle(withObserver(t.Context(), o), raw(t, "1", body)); err != nil {
				t.Fatal(err)
			}
		}
		want := []dedupe.Outcome{dedupe.Processed, dedupe.Duplicate, c.reordered, c.changed}
		if !slices.Equal(o.seen, want) {
			t.Errorf("%s: %v, want %v", name, o.seen, want)
		}
	}
}

// A conflict says which fields differ, where the content is JSON.
func TestB14ConflictsNameFields(t *testing.T) {
	for name, c := range map[string]struct {
		content Content
		want    string
	}{"json": {JSONContent, "[/amount /to/city]"}, "fields": {FieldsContent("/amount"), "[/amount /to/city]"}, "raw": {RawContent, "[]"}} {
		d := memdedupe.NewDriver(nil)
		h := Wrap("c", dedupe.NewTxStore(d, nil), func(context.Context, *memdedupe.Tx, *envelope.Message) error { return nil }, &Options{Content: c.content})
		for _, body := range []string{`{"amount":1,"to":{"name":"Ann","city":"Oslo"}}`, `{"to":{"city":"Rome","name":"Ann"},"amount":2}`} {
			if err := h.Handle(t.Context(), raw(t, "1", body)); err != nil {
				t.Fatal(err)
			}
		}
		if found := d.Conflicts(); len(found) != 1 || fmt.Sprint(found[0].Fields) != c.want {
			t.Errorf("%s: recorded is %+v, want the fields %s", name, found, c.want)
		}
	}
}

func TestFieldsContentRefusesNonsense(t *testing.T) {
	for _, pointers := range [][]string{nil, {"amount"}, {"/a", ""}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("FieldsContent(%q) does not panic", pointers)
				}
			}()
			FieldsContent(pointers...)
		}()
	}
}

// B05: two consumers of one event on one store both process it.
func TestB05ConsumersAreApart(t *testing.T) {
	st, runs := memdedupe.NewStore(nil), 0
	for _, name := range []string{"billing", "email"} {
		h := Wrap(name, st, func(context.Context, *memdedupe.Tx, *envelope.Message) error { runs++; return nil }, nil)
		for range 2 {
			if err := h.Handle(t.Context(), raw(t, "1", "a")); err != nil {
				t.Fatal(err)
			}
		}
	}
	if runs != 2 {
		t.Errorf("%d runs, want one for each consumer", runs)
	}
}

// B01: messages without an id are not copies of each other. They are
// malformed, and no store ever hears of them.
func TestB01NoIDReachesNoStore(t *testing.T) {
	h := Wrap("c", memdedupe.NewStore(nil), func(context.Context, *memdedupe.Tx, *envelope.Message) error {
		t.Error("the handler ran")
		return nil
	}, nil)
	for _, m := range []*envelope.Message{
		{Body: []byte("no envelope")},
		{Header: envelope.Header{{Name: "ce_specversion", Value: []byte("1.0")}, {Name: "ce_source", Value: []byte("s")}, {Name: "ce_type", Value: []byte("t")}}},
		{Header: envelope.Header{{Name: "ce_specversion", Value: []byte("1.0")}, {Name: "ce_id", Value: []byte("  ")}, {Name: "ce_source", Value: []byte("s")}, {Name: "ce_type", Value: []byte("t")}}},
	} {
		err := h.Handle(t.Context(), m)
		if !errors.Is(err, envelope.ErrNoID) || Classify(err) != ClassMalformed {
			t.Errorf("error %v (%s), want ErrNoID, malformed", err, Classify(err))
		}
	}
}

func TestWrapTakesAnotherConvention(t *testing.T) {
	runs := 0
	h := Wrap("c", memdedupe.NewStore(nil), func(context.Context, *memdedupe.Tx, *envelope.Message) error { runs++; return nil },
		&Options{Extractor: envelope.FromHeader("message-id", "")})
	for range 2 {
		m := &envelope.Message{Topic: "t", Header: envelope.Header{{Name: "Message-Id", Value: []byte("7")}}}
		if err := h.Handle(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	if runs != 1 {
		t.Errorf("%d runs, want 1", runs)
	}
}

func TestTenantsAreApart(t *testing.T) {
	st, runs := memdedupe.NewStore(nil), 0
	for _, tenant := range []string{"a", "b", "a"} {
		h := Wrap("c", st, func(context.Context, *memdedupe.Tx, *envelope.Message) error { runs++; return nil }, &Options{Tenant: tenant})
		if err := h.Handle(t.Context(), raw(t, "1", "x")); err != nil {
			t.Fatal(err)
		}
	}
	if runs != 2 {
		t.Errorf("%d runs, want one for each tenant", runs)
	}
}

func TestWrapPanicsOnAProgrammersError(t *testing.T) {
	st := memdedupe.NewStore(nil)
	h := func(context.Context, *memdedupe.Tx, *envelope.Message) error { return nil }
	for name, f := range map[string]func(){
		"no name":    func() { Wrap("", st, h, nil) },
		"no store":   func() { Wrap[*memdedupe.Tx]("c", nil, h, nil) },
		"no handler": func() { Wrap("c", st, nil, nil) },
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

// early acknowledges before the store has committed: the bug that loses a
// message when the commit fails. Run must not be able to do it, and this shows
// that the test below would see it.
type early struct{ brokers.Source }

func (e early) Receive(ctx context.Context) (*brokers.Delivery, error) {
	d, err := e.Source.Receive(ctx)
	if err == nil {
		err = e.Source.Ack(ctx, d)
	}
	return d, err
}
func (early) Ack(context.Context, *brokers.Delivery) error    { return nil }
func (early) Return(context.Context, *brokers.Delivery) error { return nil }

// lost runs a consumer whose store is away until it is stopped, then another
// one with a store that works, and returns how many events were lost.
func lost(t *testing.T, wrap func(brokers.Source) brokers.Source) int {
	b := membroker.New()
	b.CreateTopic("x", 2)
	for _, id := range []string{"1", "2", "3"} {
		m := &envelope.Message{ID: id, Source: "/s", Type: "t", Topic: "x", Key: []byte(id)}
		if err := b.Publisher().Publish(t.Context(), []*envelope.Message{m}).Err(); err != nil {
			t.Fatal(err)
		}
	}
	consume := func(d time.Duration, h HandlerFunc) {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		defer cancel()
		if err := Run(ctx, wrap(b.Source("x", "g")), h, &RunOptions{DeadLetter: Discard}); err != nil {
			t.Fatal(err)
		}
	}
	consume(time.Second, func(context.Context, *envelope.Message) error { return dedupe.ErrUnavailable })
	var mu sync.Mutex
	done := map[string]bool{}
	consume(time.Second, Wrap("c", memdedupe.NewStore(nil), func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
		mu.Lock()
		defer mu.Unlock()
		done[m.ID] = true
		return nil
	}, nil).Handle)
	return 3 - len(done)
}

// B15: a store that is away holds the acknowledgement back, also over a restart.
func TestB15StoreAwayLosesNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		if n := lost(t, func(s brokers.Source) brokers.Source { return s }); n != 0 {
			t.Errorf("%d events lost", n)
		}
	})
	bubble(t, func(t *testing.T) {
		if n := lost(t, func(s brokers.Source) brokers.Source { return early{s} }); n == 0 {
			t.Error("acknowledging before the commit goes unnoticed")
		}
	})
}

func TestDeadLetterToKeepsTheOriginal(t *testing.T) {
	b := membroker.New()
	b.CreateTopic("dead", 1)
	hook := DeadLetterTo(b.Publisher(), "dead")
	m := raw(t, "1", "body")
	m.Position = "x/0/7"
	m.Key = []byte("k")
	for range 2 { // it hops twice
		f := &Failure{Message: m, Class: ClassFailed, Reason: "failed", Attempts: 3, Err: errors.New("bad\r\nthing")}
		if err := hook(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		src := b.Source("dead", "g")
		d, err := src.Receive(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_ = src.Ack(t.Context(), d)
		_ = src.Close()
		m = d.Message
	}
	if string(m.Body) != "body" || string(m.Key) != "k" {
		t.Errorf("body %q, key %q", m.Body, m.Key)
	}
	if got, err := envelope.Decode(m); err != nil || got.ID != "1" || got.Source != "/s" {
		t.Errorf("the envelope is gone: %v, %v", got, err)
	}
	for name, want := range map[string]string{HeaderDeadReason: "failed", HeaderDeadError: "bad  thing", HeaderDeadAttempts: "3", HeaderDeadFrom: "dead/0/0"} {
		vs := m.Header.Values(name)
		if len(vs) != 1 || string(vs[0]) != want {
			t.Errorf("%s: %q, want one %q", name, vs, want)
		}
	}
}
