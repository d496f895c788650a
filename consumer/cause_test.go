package consumer

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// What a handler writes has the same id at every run, alone and in a group, and
// carries on what its cause belongs to.
func TestCausedIsTheSameAtEveryRun(t *testing.T) {
	var written []*envelope.Message
	fail := errors.New("not this time")
	handle := func(ctx context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
		for i := range 2 {
			out, err := Caused(ctx, m, &envelope.Message{Source: "/billing", Type: "invoice.made", Topic: "invoices", Extensions: map[string]string{"own": "x"}}, i)
			if err != nil {
				t.Fatal(err)
			}
			written = append(written, out)
		}
		return fail
	}
	cause := &envelope.Message{ID: "7", Source: "/s", Type: "order.placed", Topic: "x",
		Extensions: map[string]string{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "correlationid": "root"}}
	first, err := envelope.Kafka.Encode(cause, envelope.Binary)
	if err != nil {
		t.Fatal(err)
	}
	h := Wrap("billing", memdedupe.NewStore(nil), handle, nil)
	for range 2 {
		if err := h.Handle(t.Context(), first.Clone()); !errors.Is(err, fail) {
			t.Fatal(err)
		}
	}
	if errs := h.(groupHandler).handleGroup(t.Context(), []*member{{ctx: t.Context(), raw: first.Clone()}}); !errors.Is(errs[0], fail) {
		t.Fatal(errs)
	}
	other := Wrap("archive", memdedupe.NewStore(nil), handle, nil)
	if err := other.Handle(t.Context(), first.Clone()); !errors.Is(err, fail) {
		t.Fatal(err)
	}
	if len(written) != 8 {
		t.Fatalf("%d events written, want 8", len(written))
	}
	a, b := written[0].ID, written[1].ID
	key := dedupe.Key{Consumer: "billing", Source: "/s", ID: "7"}
	if a == b || a != dedupe.Derive(key, "event:invoice.made", 0) {
		t.Errorf("the ids are %q and %q", a, b)
	}
	for i, m := range written[:6] {
		if want := []string{a, b}[i%2]; m.ID != want {
			t.Errorf("event %d has the id %q, want %q", i, m.ID, want)
		}
	}
	if written[6].ID == a {
		t.Error("two consumers write events of one id")
	}
	for name, want := range map[string]string{"causationid": "7", "correlationid": "root", "traceparent": cause.Extensions["traceparent"], "own": "x"} {
		if got := written[0].Extensions[name]; got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	if _, err := envelope.Kafka.Encode(written[0], envelope.Binary); err != nil {
		t.Errorf("it cannot be sent: %v", err)
	}
}

// What an event says itself stays, and without a cause there is an error.
func TestCausedKeepsWhatIsSaid(t *testing.T) {
	if _, err := Caused(t.Context(), &envelope.Message{ID: "7"}, &envelope.Message{}, 0); !errors.Is(err, ErrNoCause) {
		t.Errorf("outside a handler: %v", err)
	}
	ctx := withKey(t.Context(), dedupe.Key{Consumer: "c", ID: "7"})
	out := &envelope.Message{ID: "mine", Type: "t", Extensions: map[string]string{"correlationid": "mine too"}}
	got, err := Caused(ctx, &envelope.Message{ID: "7"}, out, 0)
	if err != nil || got.ID != "mine" || got.Extensions["correlationid"] != "mine too" || got.Extensions["causationid"] != "7" {
		t.Errorf("%+v, %v", got, err)
	}
	if len(out.Extensions) != 1 {
		t.Errorf("the event that was given has changed: %v", out.Extensions)
	}
	root, err := Caused(ctx, &envelope.Message{ID: "7"}, &envelope.Message{Type: "t"}, 0)
	if err != nil || root.Extensions["correlationid"] != "7" {
		t.Errorf("an event without a correlation: %+v, %v", root, err)
	}
}

// A set handler has a key for each of its messages, the one that each would have
// alone, and none for another one's.
func TestSetHandlersHaveTheKeysOfTheirMessages(t *testing.T) {
	got := map[string][]string{}
	set := func(ctx context.Context, _ *memdedupe.Tx, ms []*envelope.Message) error {
		if _, err := Derive(ctx, ms[0].Clone(), "charge", 0); len(ms) > 1 && !errors.Is(err, ErrNoCause) {
			t.Errorf("of a message that it was not given: %v", err)
		}
		for _, m := range ms {
			out, err := Caused(ctx, m, &envelope.Message{Source: "/c", Type: "made"}, 0)
			if err != nil {
				return err
			}
			key, err := Derive(ctx, m, "charge", 0)
			if err != nil {
				return err
			}
			got[m.Position] = append(got[m.Position], out.ID, key)
		}
		return errBoom
	}
	one := func(ctx context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
		return set(ctx, tx, []*envelope.Message{m})
	}
	var ms []*envelope.Message
	for i, id := range []string{"1", "2", "3"} {
		m := event(t, "t", id, "x")
		m.Position = fmt.Sprintf("t/0/%d", i)
		ms = append(ms, m)
	}
	for name, h := range map[string]Handler{
		"keys":           WrapBatch("c", memdedupe.NewStore(nil), set, nil),
		"positions":      WrapWatermarkBatch("c", memdedupe.NewStore(nil), set, nil),
		"both":           WrapWatermarkBatch("c", memdedupe.NewStore(nil), set, withKeys),
		"one by one":     Wrap("c", memdedupe.NewStore(nil), one, nil),
		"one by one too": WrapWatermark("c", memdedupe.NewStore(nil), one, nil),
	} {
		clear(got)
		members := make([]*member, len(ms))
		for i, m := range ms {
			members[i] = &member{ctx: t.Context(), raw: m.Clone()}
			if err := h.Handle(t.Context(), m.Clone()); !errors.Is(err, errBoom) { // alone, too
				t.Fatalf("%s: %v", name, err)
			}
		}
		h.(groupHandler).handleGroup(t.Context(), members)
		seen := map[string]bool{}
		for _, m := range ms {
			ids := got[m.Position]
			if len(ids) < 2 {
				t.Fatalf("%s: %q of %s", name, ids, m.Position)
			}
			for i, id := range ids {
				if id != ids[i%2] {
					t.Errorf("%s: %s has %q, and at first it had %q", name, m.Position, id, ids[i%2])
				}
				seen[id] = true
			}
		}
		if len(seen) != 2*len(ms) {
			t.Errorf("%s: %d different ids, want %d", name, len(seen), 2*len(ms))
		}
	}
	if _, err := Derive(t.Context(), ms[0], "charge", 0); !errors.Is(err, ErrNoCause) {
		t.Errorf("outside a handler: %v", err)
	}
}

// A message that only its position names is nobody's causation: an attribute
// may not be empty.
func TestCausedByANamelessMessage(t *testing.T) {
	out, err := Caused(withKey(t.Context(), dedupe.Key{Consumer: "c", ID: "7"}), &envelope.Message{}, &envelope.Message{Source: "/c", Type: "made", Topic: "t"}, 0)
	if err != nil || len(out.Extensions) != 0 {
		t.Fatalf("%+v, %v", out, err)
	}
	if _, err := envelope.Kafka.Encode(out, envelope.Binary); err != nil {
		t.Errorf("it cannot be sent: %v", err)
	}
}
