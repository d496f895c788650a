package pgparking_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/parkingtest"
	"github.com/unecho/unecho/consumer/pgparking"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/internal/dbcut"
	"github.com/unecho/unecho/internal/testenv"
)

func TestConformanceOfStarts(t *testing.T) {
	parkingtest.RunCounter(t, openCounter)
}

// openCounter gives each process a pool of its own.
func openCounter(t testing.TB) func() consumer.StartCounter {
	f := newFixture(t)
	return func() consumer.StartCounter { return pgparking.NewStartCounter(testenv.PoolOf(t, f.url, 1), nil) }
}

func TestPlacesAreChecked(t *testing.T) {
	f := newFixture(t)
	c := pgparking.NewStartCounter(f.pool, nil)
	for _, places := range [][]string{{""}, {"a", "b", "a"}} {
		_, err := c.Start(t.Context(), places, 1000)
		if err == nil || c.End(t.Context(), places) == nil {
			t.Errorf("%q is no error", places)
		}
	}
	if _, err := c.Start(t.Context(), []string{"c\x00topic/3/42"}, 1000); err != nil {
		t.Fatal(err)
	}
	f.wantInt(1, "select count(*) from unecho_start where readable = 'c topic/3/42' and starts = 1")
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
