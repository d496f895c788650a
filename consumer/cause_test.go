package consumer

import (
	"context"
	"errors"
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
