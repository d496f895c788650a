package dedupe_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/dedupe"
)

// B46: nothing is deleted at start, when what comes first may be older than
// any retention; and a run that fails does not end the pruner.
func TestB46PrunerWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var runs []time.Duration
		var reported []error
		failed := errors.New("the database is away")
		ctx, cancel := context.WithCancel(t.Context())
		err := dedupe.RunPruner(ctx, func(ctx context.Context, limit int) (int, error) {
			if _, ok := ctx.Deadline(); !ok || limit != 7 {
				t.Errorf("a run with the limit %d, and a deadline: %v", limit, ok)
			}
			runs = append(runs, time.Since(start))
			if len(runs) == 1 {
				return 0, failed
			}
			if len(runs) == 4 {
				cancel()
			}
			return 3, nil
		}, &dedupe.PrunerOptions{Limit: 7, Report: func(n int, err error) { reported = append(reported, err) }})
		if err != nil || len(runs) != 4 || len(reported) != 4 || !errors.Is(reported[0], failed) || reported[1] != nil {
			t.Fatalf("%v after the runs %v with the reports %v", err, runs, reported)
		}
		if runs[0] < 15*time.Minute {
			t.Errorf("the first run came after %v", runs[0])
		}
		for i := 1; i < 4; i++ {
			if gap := runs[i] - runs[i-1]; gap < 50*time.Second || gap > 70*time.Second {
				t.Errorf("the runs came at %v", runs)
			}
		}
	})
}

func TestPrunerRefusesNonsense(t *testing.T) {
	none := func(context.Context, int) (int, error) { return 0, nil }
	if dedupe.RunPruner(t.Context(), nil, nil) == nil {
		t.Error("a nil prune is no error")
	}
	for _, o := range []dedupe.PrunerOptions{{Delay: -1}, {Every: -1}, {Limit: -1}, {Timeout: -1}} {
		if dedupe.RunPruner(t.Context(), none, &o) == nil {
			t.Errorf("%+v is no error", o)
		}
	}
}
