package consumer

import (
	"context"
	"math/rand/v2"
	"time"
)

// Backoff says how long to wait before a message is tried again: Min, doubled
// with each failure up to Max, each time a random half of it off.
type Backoff struct {
	// Min defaults to 100 ms, Max to 30 s.
	Min, Max time.Duration
}

func (b Backoff) normal() Backoff {
	if b.Min <= 0 {
		b.Min = 100 * time.Millisecond
	}
	if b.Max <= 0 {
		b.Max = 30 * time.Second
	}
	b.Max = max(b.Max, b.Min)
	return b
}

// after returns the wait after the nth failure in a row, n from 1.
func (b Backoff) after(n int) time.Duration {
	d := b.Min
	for ; n > 1 && d < b.Max; n-- {
		d *= 2
	}
	d = min(d, b.Max)
	return d/2 + rand.N(d/2+1)
}

// wait waits for d, until ctx is done, or until one of stops is closed; it
// reports whether the time has passed.
func wait(ctx context.Context, d time.Duration, stops ...<-chan struct{}) bool {
	return waitOr(ctx, d, nil, stops...)
}

// waitOr is wait that changed ends as well, as if the time had passed.
func waitOr(ctx context.Context, d time.Duration, changed <-chan struct{}, stops ...<-chan struct{}) bool {
	var stop [3]<-chan struct{} // a nil channel never fires
	copy(stop[:], stops)
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-changed:
		return true
	case <-ctx.Done():
	case <-stop[0]:
	case <-stop[1]:
	case <-stop[2]:
	}
	return false
}
