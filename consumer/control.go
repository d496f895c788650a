package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/unecho/unecho/brokers"
)

// Control is a hold on a [Run] from outside: it pauses consumption and tells how
// the run is. The zero value is ready; give it to RunOptions.Control of one Run
// at a time. All methods may be called concurrently, before, during and after
// the run.
type Control struct {
	mu      sync.Mutex
	paused  bool
	changed chan struct{} // closed and replaced when paused changes
	run     *runner       // nil before the first one
	ended   bool          // run has returned
}

// Pause stops consumption until Resume: nothing more is received, but for one
// delivery that may be on its way; what is in flight goes on. The consumer
// keeps its partitions and its claims. It is no error to pause twice.
func (c *Control) Pause() { c.set(true) }

// Resume ends a pause.
func (c *Control) Resume() { c.set(false) }

func (c *Control) set(paused bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.paused == paused {
		return
	}
	c.paused = paused
	if c.changed != nil {
		close(c.changed)
	}
	c.changed = make(chan struct{})
}

// waitResumed waits until consumption is not paused. It reports false if ctx was
// done before. c may be nil.
func (c *Control) waitResumed(ctx context.Context) bool {
	if c == nil {
		return true
	}
	for {
		c.mu.Lock()
		if c.changed == nil {
			c.changed = make(chan struct{})
		}
		paused, changed := c.paused, c.changed
		c.mu.Unlock()
		if !paused {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// attach makes r the run that c tells about, until the function that it returns
// is called. c may be nil.
func (c *Control) attach(r *runner) (detach func(), _ error) {
	if c == nil {
		return func() {}, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.run != nil && !c.ended {
		return nil, errors.New("consumer: Run: RunOptions.Control belongs to another Run that has not returned")
	}
	c.run, c.ended = r, false
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.ended = true
	}, nil
}

// Health is how a run is at one moment.
type Health struct {
	// Started: Run was called. Ended: it has returned.
	Started, Ended bool
	// Paused: by Control.Pause. Draining: Run's context is done, or its source
	// has ended.
	Paused, Draining bool
	// Outage is why consumption is held up: the last error of what is out of
	// reach. Nil if nothing is. Since is since when. Its text is that of a client
	// library or of a handler, and Ready repeats it: show it to those who run the
	// consumer.
	Outage error
	Since  time.Time
	// InFlight is how many deliveries are received and not settled, Running how
	// many handlers run.
	InFlight, Running int
	// Overdue are handlers that go on although their time-out has passed a
	// while ago: they ignore their context.
	Overdue []Overdue
	// Stuck is what the source waits for before it receives more, where the
	// source tells (brokers.Stalling).
	Stuck []brokers.Stuck
	// Waiting are messages that wait to be tried again, the oldest first, at most
	// 100 of them. WaitingCount is how many there are.
	Waiting      []Waiting
	WaitingCount int
	// NoPlace are messages that are for the dead letters and that no place takes,
	// the oldest first, at most 100 of them. They are not acknowledged. Others
	// go on.
	NoPlace []Waiting
	// Deferred is what waits in the place of RunOptions.Defer, as it was when the
	// place was asked last.
	Deferred DeferredHealth
	// SmallPool says that the pool of the handler's store has fewer connections
	// than RunOptions.Concurrency, so that handlers wait for each other; nil if
	// it has not.
	SmallPool error
	// ShortRetention is what was accepted by AcceptShortRetention; nil if
	// there was nothing to accept.
	ShortRetention error
}

// Overdue is a handler that does not return.
type Overdue struct {
	// Position is where the broker keeps the message.
	Position string
	// Began is when the handler was started.
	Began time.Time
}

// overdueAfter is how long after its time-out a handler counts as overdue.
const overdueAfter = 10 * time.Second

// Live returns nil, or why the process should be replaced: a handler that does
// not return holds what is behind it, and only the end of the process frees it.
func (h Health) Live() error {
	if len(h.Overdue) == 0 {
		return nil
	}
	o := h.Overdue[0]
	return fmt.Errorf("consumer: %d handlers do not return, the oldest has the message at %s since %s",
		len(h.Overdue), o.Position, o.Began.UTC().Format(time.RFC3339))
}

// Ready returns nil if messages are being consumed, or why they are not.
func (h Health) Ready() error {
	switch {
	case h.Ended:
		return errors.New("consumer: the run has ended")
	case !h.Started:
		return errors.New("consumer: not started")
	case h.Draining:
		return errors.New("consumer: draining")
	case h.Outage != nil:
		return fmt.Errorf("consumer: held up since %s: %w", h.Since.UTC().Format(time.RFC3339), h.Outage)
	case h.Paused:
		return errors.New("consumer: paused")
	case len(h.NoPlace) > 0:
		w := h.NoPlace[0]
		return fmt.Errorf("consumer: %d messages are for the dead letters and no place takes them, such as that at %s since %s: %w",
			len(h.NoPlace), w.Position, w.Since.UTC().Format(time.RFC3339), w.Err)
	case len(h.Stuck) > 0:
		s := h.Stuck[0]
		return fmt.Errorf("consumer: %d partitions wait for a message each, such as topic %s, partition %d, offset %d with %d behind it",
			len(h.Stuck), s.Topic, s.Partition, s.Offset, s.Behind)
	}
	return h.Live()
}

// Health returns how the run is.
func (c *Control) Health() Health {
	c.mu.Lock()
	h := Health{Started: c.run != nil, Ended: c.ended, Paused: c.paused}
	r := c.run
	c.mu.Unlock()
	if r == nil || h.Ended {
		return h
	}
	h.Draining = closed(r.draining)
	h.Since, h.Outage = r.gate.outage()
	h.InFlight = int(r.unsettled.Load())
	h.Running, h.Overdue = r.running.look(r.o.HandlerTimeout)
	h.ShortRetention, h.SmallPool = r.accepted(), r.small
	h.Waiting, h.NoPlace, h.WaitingCount = r.waits.look()
	h.Deferred = r.deferrer.health()
	for _, w := range h.Waiting {
		if h.Outage == nil && w.Class == ClassUnavailable && !mayCharge(w.Err) { // its lane waits for a person
			h.Since, h.Outage = w.Since, w.Err
		}
	}
	if s, ok := r.src.(brokers.Stalling); ok {
		h.Stuck = s.Stuck()
	}
	return h
}

// running are the handlers that run.
type running struct {
	mu    sync.Mutex
	since map[*job]time.Time
}

func newRunning() *running { return &running{since: make(map[*job]time.Time)} }

func (r *running) begin(j *job) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.since[j] = time.Now()
}

func (r *running) end(j *job) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.since, j)
}

// look counts the handlers, and returns those that are overdue, the oldest
// first. A negative time-out is none.
func (r *running) look(timeout time.Duration) (n int, overdue []Overdue) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for j, began := range r.since {
		if timeout > 0 && time.Since(began) > timeout+overdueAfter {
			overdue = append(overdue, Overdue{j.d.Message.Position, began})
		}
	}
	slices.SortFunc(overdue, func(a, b Overdue) int { return a.Began.Compare(b.Began) })
	return len(r.since), overdue
}
