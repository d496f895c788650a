package prune_test

import (
	"errors"
	"testing"

	"github.com/unecho/unecho/dedupe/internal/prune"
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
