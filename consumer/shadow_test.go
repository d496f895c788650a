package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// In shadow nothing is suppressed, everything is decided as it would be without,
// and what would have been suppressed is told.
func TestShadow(t *testing.T) {
	var decided [2][]string
	for n, shadow := range []bool{false, true} {
		d := memdedupe.NewDriver(nil)
		var effects, would, keys []string
		h := Wrap("c", dedupe.NewTxStore(d, nil), func(ctx context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
			if string(m.Body) == "poison" {
				return errBoom
			}
			if k := ctx.Value(keyOfEvent{}).(dedupe.Key); k.Source != shadowSource {
				keys = append(keys, k.ID)
			}
			return tx.OnCommit(func() { effects = append(effects, string(m.Body)) })
		}, &Options{Shadow: shadow})
		ctx := withObserver(t.Context(), ObserverFunc(func(_ context.Context, e Event) {
			switch e.Step {
			case StepShadow:
				if e.Err != nil {
					would = append(would, string(Classify(e.Err)))
				} else {
					would = append(would, e.Outcome.String())
				}
			case StepDecide:
				decided[n] = append(decided[n], fmt.Sprint(e.Outcome, e.Err))
			}
		}))
		for _, m := range []*envelope.Message{raw(t, "1", "a"), raw(t, "1", "a"), raw(t, "1", "b"), raw(t, "1", "poison"), {Body: []byte("nameless")}, raw(t, "2", "c")} {
			err := h.Handle(ctx, m)
			switch body := string(m.Body); {
			case body == "poison" && shadow && !errors.Is(err, errBoom), body == "nameless" && !shadow && err == nil:
				t.Errorf("shadow %v: %q is answered %v", shadow, body, err)
			case err != nil && body != "poison" && body != "nameless":
				t.Errorf("shadow %v: %q is answered %v", shadow, body, err)
			}
		}
		want, told, events := []string{"a", "c"}, []string(nil), []string{"1", "2"}
		if shadow {
			want, told = []string{"a", "a", "b", "nameless", "c"}, []string{"duplicate", "conflict", "conflict", "malformed"}
			events = []string{"1", "1", "1", "2"}
		}
		if !slices.Equal(effects, want) || !slices.Equal(would, told) || !slices.Equal(keys, events) {
			t.Errorf("shadow %v: effects %q, told of %q, keys %q; want %q, %q, %q", shadow, effects, would, keys, want, told, events)
		}
		if n := len(d.Conflicts()); n != 2 {
			t.Errorf("shadow %v: %d conflicts are recorded, want 2", shadow, n)
		}
	}
	if !slices.Equal(decided[0], decided[1]) {
		t.Errorf("decided without shadow %q, with it %q", decided[0], decided[1])
	}
}

func TestShadowTakesNoBatch(t *testing.T) {
	h := Wrap("c", memdedupe.NewStore(nil), func(context.Context, *memdedupe.Tx, *envelope.Message) error { return nil }, &Options{Shadow: true})
	if err := Run(t.Context(), newScripted(), h, &RunOptions{DeadLetter: Discard, Batch: Batch{Max: 10}}); err == nil || !strings.Contains(err.Error(), "shadow") {
		t.Errorf("%v", err)
	}
}
