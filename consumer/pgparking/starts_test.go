package pgparking_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/unecho/unecho/consumer/pgparking"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/internal/dbcut"
	"github.com/unecho/unecho/internal/testenv"
)

// Starts count until their end, in the order of the places that were given.
func TestStartsCountUntilTheirEnd(t *testing.T) {
	f := newFixture(t)
	c := pgparking.NewStartCounter(f.pool, nil)
	start := func(want []int, places ...string) {
		t.Helper()
		if got, err := c.Start(t.Context(), places, 1000); err != nil || !slices.Equal(got, want) {
			t.Errorf("Start(%q): %v, %v; want %v", places, got, err, want)
		}
	}
	odd := []string{"c\x00topic/3/42", "c\x00topic/3/4", "\xff\xfe", strings.Repeat("x", 1<<16)}
	start([]int{1, 1, 1, 1}, odd...)
	start([]int{2}, odd[1])
	start([]int{1, 3, 2}, "new", odd[1], odd[0])
	// Another process sees them as well.
	other := pgparking.NewStartCounter(testenv.PoolOf(t, f.url, 1), nil)
	if got, err := other.Start(t.Context(), odd[:1], 1000); err != nil || got[0] != 3 {
		t.Errorf("another process counts %v, %v; want 3", got, err)
	}
	if err := c.End(t.Context(), []string{odd[1], "never started"}); err != nil {
		t.Fatal(err)
	}
	start([]int{1, 4}, odd[1], odd[0])
	start(nil)
	if err := c.End(t.Context(), nil); err != nil {
		t.Error(err)
	}
	f.wantInt(1, "select count(*) from unecho_start where readable = 'c topic/3/42' and starts = 4")
	for _, places := range [][]string{{""}, {"a", "b", "a"}} {
		_, err := c.Start(t.Context(), places, 1000)
		if err == nil || c.End(t.Context(), places) == nil {
			t.Errorf("%q is no error", places)
		}
	}
}

// What has as many starts as may be is not counted, and said to have more.
func TestStartsAreCountedUpToABound(t *testing.T) {
	f := newFixture(t)
	c := pgparking.NewStartCounter(f.pool, nil)
	for i, step := range []struct {
		most int
		want []int
	}{{1, []int{1, 1}}, {1, []int{2, 2}}, {1, []int{2, 2}}, {3, []int{2, 2}}, {3, []int{3, 3}}, {3, []int{4, 4}}, {1, []int{4, 4}}, {4, []int{4, 4}}} {
		if got, err := c.Start(t.Context(), []string{"b", "a"}, step.most); err != nil || !slices.Equal(got, step.want) {
			t.Errorf("step %d, up to %d: %v, %v; want %v", i, step.most, got, err, step.want)
		}
	}
	if got, err := c.Start(t.Context(), []string{"new", "a"}, 1); err != nil || !slices.Equal(got, []int{1, 5}) {
		t.Errorf("a new one beside one of before: %v, %v", got, err)
	}
}

// Batches that share places, in whatever order they name them, neither deadlock
// nor lose a count.
func TestStartsDoNotDeadlock(t *testing.T) {
	f := newFixture(t)
	c := pgparking.NewStartCounter(f.pool, nil)
	const workers, rounds, places = 6, 15, 40
	names := make([]string, places)
	for i := range names {
		names[i] = fmt.Sprintf("billing\x00orders/0/%d", i)
	}
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			mine := slices.Clone(names)
			for range rounds {
				rand.Shuffle(places, func(i, j int) { mine[i], mine[j] = mine[j], mine[i] })
				if _, err := c.Start(context.Background(), mine, 1000); err != nil {
					t.Errorf("Start: %v", err)
				}
				if w%2 == 1 {
					if err := c.End(context.Background(), mine); err != nil {
						t.Errorf("End: %v", err)
					}
				}
			}
		})
	}
	wg.Wait()
	if err := c.End(t.Context(), names); err != nil {
		t.Fatal(err)
	}
	for range workers * rounds {
		wg.Go(func() {
			if _, err := c.Start(context.Background(), names[:3], 1000); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	f.wantInt(3*workers*rounds, "select sum(starts)::int from unecho_start")
}

// A start whose answer is lost is not taken for one that was counted.
func TestTheAnswerToAStartIsLost(t *testing.T) {
	f := newFixture(t)
	proxy, url := dbcut.Start(t, f.url)
	proxy.Implicit()
	c := pgparking.NewStartCounter(testenv.PoolOf(t, url, 1), nil)
	for n, applied := range []bool{true, false} {
		if _, err := c.Start(t.Context(), []string{"warm"}, 1000); err != nil {
			t.Fatal(err)
		}
		proxy.CutCommit(applied)
		if _, err := c.Start(t.Context(), []string{"a"}, 1000); !errors.Is(err, dedupe.ErrUnknownOutcome) {
			t.Errorf("Start, applied %v: %v, want ErrUnknownOutcome", applied, err)
		}
		if got, err := c.Start(t.Context(), []string{"a"}, 1000); err != nil || got[0] != 2+n {
			t.Errorf("Start again, applied %v: %v, %v; want %d", applied, got, err, 2+n)
		}
	}
}
