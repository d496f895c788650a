package consumer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

type order struct {
	ID    string `json:"id"`
	Cents int    `json:"cents"`
}

// A body that is not what it should be reaches no handler, leaves no key, is
// dead-lettered at once, and is not quoted.
func TestTypedPayloads(t *testing.T) {
	for name, tc := range map[string]struct {
		codec Codec
		body  string
		ok    bool
	}{
		"right":            {nil, `{"id":"7","cents":100}`, true},
		"more members":     {nil, `{"id":"7","cents":100,"new":true}`, true},
		"strict":           {StrictJSON, `{"id":"7","cents":100,"new":true}`, false},
		"wrong kind":       {nil, `{"id":"7","cents":"secret"}`, false},
		"number too large": {nil, `{"id":"7","cents":5555555555555555555555}`, false},
		"no JSON":          {nil, `secret`, false},
		"empty":            {nil, ``, false},
		"two documents":    {nil, `{"id":"7","cents":100}{"secret":1}`, false},
		"space behind it":  {nil, "{\"id\":\"7\",\"cents\":100}\n ", true},
		"codec of one's own": {CodecFunc(func(m *envelope.Message, into any) error {
			*into.(*order) = order{ID: "7", Cents: len(m.Body)}
			return nil
		}), strings.Repeat("x", 100), true},
	} {
		d := memdedupe.NewDriver(nil)
		runs := 0
		h := Wrap("c", dedupe.NewTxStore(d, nil), Typed(tc.codec, func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message, o order) error {
			runs++
			if o != (order{"7", 100}) || m.ID != "1" {
				t.Errorf("%s: %+v of event %s", name, o, m.ID)
			}
			return nil
		}), nil)
		err := h.Handle(t.Context(), event(t, "order.placed", "1", tc.body))
		if (err == nil) != tc.ok || (runs == 1) != tc.ok {
			t.Errorf("%s: %v after %d runs", name, err, runs)
		}
		if tc.ok {
			continue
		}
		var bad *PayloadError
		if Classify(err) != ClassMalformed || reason(ClassMalformed, err) != ReasonBadPayload || !errors.As(err, &bad) || bad.Type != "order.placed" {
			t.Errorf("%s: %v (%s)", name, err, Classify(err))
		}
		if strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "555") {
			t.Errorf("%s: %v quotes the body", name, err)
		}
		if _, err := d.Admin().Find(t.Context(), dedupe.Key{Consumer: "c", Source: "/s", ID: "1"}.Stored()); !errors.Is(err, dedupe.ErrNotFound) {
			t.Errorf("%s: the key is there: %v", name, err)
		}
	}
}

// The stored reply goes out with every delivery, the same bytes, and again when
// it could not be sent.
func TestWrapReplySendsTheStoredReply(t *testing.T) {
	var sent []string
	var fail error
	runs := 0
	h := WrapReply("c", memdedupe.NewStore(nil), func(context.Context, *memdedupe.Tx, *envelope.Message) ([]byte, error) {
		runs++
		return []byte{byte('0' + runs), 0xff}, nil
	}, func(_ context.Context, m *envelope.Message, r dedupe.Result) error {
		sent = append(sent, m.ID+" "+r.Outcome.String()+" "+string(r.Reply))
		return fail
	}, nil)
	fail = errors.New("the asker is gone")
	if err := h.Handle(t.Context(), event(t, "t", "1", "a")); !errors.Is(err, fail) {
		t.Errorf("Handle: %v", err)
	}
	fail = nil
	for _, body := range []string{"a", "a", "other content"} {
		if err := h.Handle(t.Context(), event(t, "t", "1", body)); err != nil {
			t.Error(err)
		}
	}
	if got := strings.Join(sent, ", "); runs != 1 || got != "1 processed 1\xff, 1 duplicate 1\xff, 1 duplicate 1\xff" {
		t.Errorf("%d runs, sent %q", runs, got)
	}
}

// A producer names its types as it likes; errors, and the logs that they go
// into, stay short.
func TestErrorsNameTypesUpToALength(t *testing.T) {
	m := event(t, strings.Repeat("long", 1<<18), "1", "no JSON")
	handler := Wrap("c", memdedupe.NewStore(nil), Typed(nil, func(context.Context, *memdedupe.Tx, *envelope.Message, struct{}) error { return nil }), nil)
	for name, h := range map[string]Handler{"payload": handler, "unrouted": Route(map[string]Handler{"other": handler}, nil)} {
		if err := h.Handle(t.Context(), m); err == nil || len(err.Error()) > 500 {
			t.Errorf("%s: an error of %d bytes, want one, and a short one", name, len(fmt.Sprint(err)))
		}
	}
}
