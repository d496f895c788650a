package consumer

import (
	"context"
	"sync"
	"time"
)

// gate holds all deliveries back while the store or a broker is out of reach,
// and lets one of them through from time to time to see whether it is back.
// Without it every lane would try by itself, and an outage would be met by as
// many connection attempts as there are messages in flight.
type gate struct {
	backoff Backoff

	mu      sync.Mutex
	down    bool
	probing bool
	tries   int
	why     error         // of the last trip
	since   time.Time     // the first one
	next    time.Time     // when the next probe may go
	changed chan struct{} // closed and replaced whenever something changes
}

func newGate(b Backoff) *gate {
	return &gate{backoff: b, changed: make(chan struct{})}
}

// enter waits until the gate is open, or until it is this caller's turn to
// probe. It reports whether the caller may go on; it may not when ctx is done
// or one of stops is closed. Whoever was let in calls pass or trip.
func (g *gate) enter(ctx context.Context, stops ...<-chan struct{}) bool {
	for {
		g.mu.Lock()
		if !g.down {
			g.mu.Unlock()
			return true
		}
		left := time.Until(g.next)
		if !g.probing && left <= 0 {
			g.probing = true
			g.mu.Unlock()
			return true
		}
		if g.probing {
			left = time.Hour // the probe's end wakes us
		}
		changed := g.changed
		g.mu.Unlock()
		if !waitOr(ctx, left, changed, stops...) {
			return false
		}
	}
}

// waitOpen waits until the gate is open, without ever being the probe.
func (g *gate) waitOpen(ctx context.Context) bool {
	for {
		g.mu.Lock()
		down, changed := g.down, g.changed
		g.mu.Unlock()
		if !down {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// pass is called when something reached the store. It reports whether the
// gate was shut until now.
func (g *gate) pass() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.down {
		return false
	}
	g.down, g.probing, g.tries, g.why = false, false, 0, nil
	g.wake()
	return true
}

// trip is called when the store was out of reach. Deliveries that were under
// way together fail together: only the first of them, and then each probe,
// makes the wait longer. It returns the wait, and whether the gate was open.
func (g *gate) trip(why error) (after time.Duration, first bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	first = !g.down
	if first {
		g.since = time.Now()
	}
	g.why = why
	if !first && !g.probing {
		return time.Until(g.next), false
	}
	g.down, g.probing = true, false
	g.tries++
	after = g.backoff.after(g.tries)
	g.next = time.Now().Add(after)
	g.wake()
	return after, first
}

// outage returns since when the gate is shut, and why; nil if it is open.
func (g *gate) outage() (since time.Time, why error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.down {
		return time.Time{}, nil
	}
	return g.since, g.why
}

// leave is called instead of pass and trip when the caller was let in and did
// not try, so that another may probe.
func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.probing {
		g.probing = false
		g.wake()
	}
}

func (g *gate) wake() {
	close(g.changed)
	g.changed = make(chan struct{})
}
