package envelope

import (
	"regexp"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var uuid7 = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)

// millis reads the time that an id carries.
func millis(t *testing.T, id string) int64 {
	t.Helper()
	if !uuid7.MatchString(id) {
		t.Fatalf("%s is no UUIDv7", id)
	}
	ms, err := strconv.ParseInt(id[:8]+id[9:13], 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return ms
}

func TestNewIDCarriesTheTime(t *testing.T) {
	t.Parallel()
	before := time.Now().UnixMilli()
	ms := millis(t, NewID())
	// A burst of ids may be a few counts, so at most a millisecond, ahead.
	if after := time.Now().UnixMilli(); ms < before || ms > after+1 {
		t.Errorf("time %d is not between %d and %d", ms, before, after)
	}
}

func TestIDsRise(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // the clock stands still
		var s idSource
		last := ""
		step := func(now time.Time) {
			id := s.next(now)
			if millis(t, id); id <= last {
				t.Fatalf("%s came after %s", id, last)
			}
			last = id
		}
		now := time.Now()
		for range 10_000 { // more than one millisecond has room for
			step(now)
		}
		if d := millis(t, last) - now.UnixMilli(); d < 1 || d > 4 {
			t.Errorf("10,000 ids at once are %d ms ahead", d)
		}
		step(now.Add(-time.Hour))
		step(now.Add(time.Hour))
		if millis(t, last) != now.Add(time.Hour).UnixMilli() {
			t.Errorf("%s does not follow the clock any more", last)
		}
	})
}

func TestIDsOfManyGoroutinesDiffer(t *testing.T) {
	t.Parallel()
	const workers, each = 8, 1000
	ids := make([][]string, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for range each {
				ids[w] = append(ids[w], NewID())
			}
		})
	}
	wg.Wait()
	for w, mine := range ids {
		if !slices.IsSorted(mine) {
			t.Errorf("the ids of goroutine %d do not rise", w)
		}
	}
	all := slices.Concat(ids...)
	slices.Sort(all)
	if n := len(slices.Compact(all)); n != workers*each {
		t.Errorf("%d different ids of %d", n, workers*each)
	}
}
