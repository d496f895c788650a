package parkingtest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/unecho/unecho/consumer"
)

// enough is a bound that no case reaches.
const enough = 1000

func start(t testing.TB, c consumer.StartCounter, most int, want []int, places ...string) {
	t.Helper()
	if got, err := c.Start(t.Context(), places, most); err != nil || !slices.Equal(got, want) {
		t.Errorf("Start(%.40q, up to %d): %v, %v; want %v", places, most, got, err, want)
	}
}

func end(t testing.TB, c consumer.StartCounter, places ...string) {
	t.Helper()
	if err := c.End(t.Context(), places); err != nil {
		t.Errorf("End: %v", err)
	}
}

// Starts count until their end, in the order of the places that were given,
// whatever these are named.
func countUntilEnd(t testing.TB, open func() consumer.StartCounter) {
	c := open()
	odd := []string{"c\x00topic/3/42", "c\x00topic/3/4", "\xff\xfe", strings.Repeat("x", 1<<16)}
	start(t, c, enough, []int{1, 1, 1, 1}, odd...)
	start(t, c, enough, []int{2}, odd[1])
	start(t, c, enough, []int{1, 3, 2}, "new", odd[1], odd[0])
	end(t, c, odd[1], "never started")
	start(t, c, enough, []int{1, 3}, odd[1], odd[0])
	start(t, c, enough, nil)
	end(t, c)
}

func countForAll(t testing.TB, open func() consumer.StartCounter) {
	first, second := open(), open()
	start(t, first, enough, []int{1}, "a")
	start(t, second, enough, []int{2, 1}, "a", "b")
	end(t, second, "a")
	start(t, first, enough, []int{1, 2}, "a", "b")
}

// What has as many starts as may be is not counted, and said to have more.
func countToBound(t testing.TB, open func() consumer.StartCounter) {
	c := open()
	for _, step := range []struct {
		most int
		want []int
	}{{1, []int{1, 1}}, {1, []int{2, 2}}, {1, []int{2, 2}}, {3, []int{2, 2}}, {3, []int{3, 3}}, {3, []int{4, 4}}, {1, []int{4, 4}}, {4, []int{4, 4}}} {
		start(t, c, step.most, step.want, "b", "a")
	}
	start(t, c, 1, []int{1, 5}, "new", "a")
}

// Batches that share places, in whatever order they name them, neither deadlock
// nor lose a count.
func countAtOnce(t testing.TB, open func() consumer.StartCounter) {
	const workers, rounds = 6, 15
	names := make([]string, 20)
	want := make([]int, len(names))
	for i := range names {
		names[i], want[i] = fmt.Sprintf("billing\x00orders/0/%d", i), workers*rounds+1
	}
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			c, mine, ctx := open(), slices.Clone(names), context.WithoutCancel(t.Context())
			for range rounds {
				rand.Shuffle(len(mine), func(i, j int) { mine[i], mine[j] = mine[j], mine[i] })
				if _, err := c.Start(ctx, mine, enough); err != nil {
					t.Errorf("Start: %v", err)
				}
				if err := c.End(ctx, []string{"another"}); err != nil {
					t.Errorf("End: %v", err)
				}
			}
		})
	}
	wg.Wait()
	start(t, open(), enough, want, names...)
}

func endsApart(t testing.TB, open func() consumer.StartCounter) {
	c := open()
	start(t, c, enough, []int{1, 1, 1}, "a", "b", "a\x00b")
	end(t, c, "a")
	start(t, c, enough, []int{1, 2, 2}, "a", "b", "a\x00b")
}
