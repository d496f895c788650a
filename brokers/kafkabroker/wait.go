package kafkabroker

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/unecho/unecho/brokers"
)

const (
	// waitAfterOthers is how long a partition that does not serve is still waited
	// for when the others of a call are done.
	waitAfterOthers = time.Second
	// shortestRest and longestRest bound how long a partition that did not serve is
	// left alone, by calls that have others to publish to.
	shortestRest = 250 * time.Millisecond
	longestRest  = 5 * time.Second
	// forgetRest is after how long a partition that nobody publishes to is forgotten.
	forgetRest = time.Minute
)

// waits decide for how long partitions are waited for that do not serve. A call
// returns when all of its partitions have answered, so one without a leader would
// hold up the others, call after call. So
//
//   - in a call that others of are done, it is waited for a second, not for the
//     whole time-out: what is not published then is told as unavailable;
//   - the calls that follow leave it alone for some time, and then try once, as long
//     as they have others that serve;
//   - a call with nothing else to do waits for the whole time-out.
type waits struct {
	timeout time.Duration

	mu   sync.Mutex
	down map[partitionKey]rest // those that did not serve when they were last tried
}

// rest is how long a partition is left alone.
type rest struct {
	until time.Time
	next  time.Duration
}

// isDown reports whether a partition is to be left alone.
func (w *waits) isDown(k partitionKey) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	r, down := w.down[k]
	return down && time.Now().Before(r.until)
}

// wait is that of one partition in one call.
type wait struct {
	c       *callWaits
	k       partitionKey
	err     error // why it is not tried at all
	once    bool  // it is tried once
	failing bool  // its last try did not succeed
	ended   bool
}

// callWaits is what the partitions of a call know of each other.
type callWaits struct {
	w       *waits
	end     time.Time
	served  bool      // one of them has been served
	serving int       // partitions under way that were not seen failing
	alone   time.Time // since when there is none of those
}

// begin starts the waits of a call.
func (w *waits) begin(parts []partitionKey) map[partitionKey]*wait {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	c := &callWaits{w: w, end: now.Add(w.timeout)}
	out := make(map[partitionKey]*wait, len(parts))
	for _, k := range parts {
		out[k] = &wait{c: c, k: k}
		if _, down := w.down[k]; !down {
			c.serving++
		}
	}
	for k, p := range out {
		r, down := w.down[k]
		if p.failing = down; !down || c.serving == 0 {
			continue
		}
		p.once = true
		if now.Before(r.until) {
			p.err = fmt.Errorf("%w: partition %s/%d did not serve, and is left alone until %v", brokers.ErrUnavailable, k.topic, k.id, r.until.Format(time.TimeOnly))
		}
	}
	return out
}

// until is when to stop trying.
func (p *wait) until() time.Time {
	p.c.w.mu.Lock()
	defer p.c.w.mu.Unlock()
	switch {
	case p.once:
		return time.Time{}
	case p.c.served && p.c.serving == 0 && p.c.alone.Add(waitAfterOthers).Before(p.c.end):
		return p.c.alone.Add(waitAfterOthers)
	}
	return p.c.end
}

// note takes note of a try.
func (p *wait) note(err error) {
	p.c.w.mu.Lock()
	defer p.c.w.mu.Unlock()
	p.turn(errors.Is(err, brokers.ErrUnavailable))
}

// turn sets whether p is failing.
func (p *wait) turn(failing bool) {
	if p.failing == failing || p.ended {
		return
	}
	p.failing = failing
	if failing {
		p.c.leave()
	} else {
		p.c.serving++
	}
}

// leave takes a partition out of those that serve.
func (c *callWaits) leave() {
	if c.serving--; c.serving == 0 {
		c.alone = time.Now()
	}
}

// finish takes note of how the partition's part of the call has ended.
func (p *wait) finish(err error) {
	w := p.c.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if !p.failing {
		p.c.leave()
	}
	p.ended = true
	switch {
	case p.err != nil: // it was not tried
	case !errors.Is(err, brokers.ErrUnavailable):
		delete(w.down, p.k)
		p.c.served = true
	default:
		w.leaveAlone(p.k, time.Now())
	}
}

// leaveAlone has a partition rest, for longer each time.
func (w *waits) leaveAlone(k partitionKey, now time.Time) {
	r := w.down[k]
	r.next = min(max(shortestRest, 2*r.next), longestRest)
	r.until = now.Add(r.next)
	if w.down == nil {
		w.down = make(map[partitionKey]rest)
	}
	maps.DeleteFunc(w.down, func(_ partitionKey, r rest) bool { return now.Sub(r.until) > forgetRest })
	w.down[k] = r
}
