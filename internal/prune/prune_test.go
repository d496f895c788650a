package prune_test

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/internal/prune"
)

func TestRun(t *testing.T) {
	table := func(rows int) func(n int) (int, error) {
		return func(n int) (int, error) {
			if n < 1 || n > prune.Batch {
				t.Errorf("asked for %d rows", n)
			}
			n = min(n, rows)
			rows -= n
			return n, nil
		}
	}
	for _, tc := range []struct{ limit, a, b, want int }{
		{0, 0, 0, 0}, {0, 2500, 3, 2503}, {-1, 1000, 1000, 2000}, {1, 5, 5, 1}, {1700, 2500, 5, 1700}, {2600, 2500, 500, 2600}, {10, 3, 3, 6},
	} {
		if got, err := prune.Run(tc.limit, table(tc.a), table(tc.b)); got != tc.want || err != nil {
			t.Errorf("Run(%d) of %d and %d rows = %d, %v; want %d", tc.limit, tc.a, tc.b, got, err, tc.want)
		}
	}
	failed := errors.New("failed")
	n, err := prune.Run(0, table(5), func(int) (int, error) { return 2, failed })
	if n != 7 || !errors.Is(err, failed) {
		t.Errorf("Run = %d, %v; want what was deleted before the error", n, err)
	}
}

// TestTransactionsStayShort: on a database that needs a millisecond a row, no
// transaction but the first ones is longer than twice the aim, and on one that
// recovers the batches grow again.
func TestTransactionsStayShort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rows, perRow := 3000, time.Millisecond
		var sizes []int
		n, err := prune.Run(0, func(n int) (int, error) {
			n = min(n, rows)
			rows -= n
			time.Sleep(time.Duration(n) * perRow)
			sizes = append(sizes, n)
			if rows < 500 {
				perRow = time.Microsecond
			}
			return n, nil
		})
		if n != 3000 || err != nil {
			t.Fatalf("Run = %d, %v", n, err)
		}
		if slices.Max(sizes[5:]) > 250 || !slices.Contains(sizes[:10], 62) && !slices.Contains(sizes[:10], 31) {
			t.Errorf("batches of %v rows at a millisecond each, want them to shrink to %v", sizes, prune.Aim)
		}
		if last := sizes[len(sizes)-2]; last < 60 {
			t.Errorf("the batches did not grow again: %v", sizes)
		}
	})
}
