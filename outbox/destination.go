package outbox

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"time"

	"github.com/unecho/unecho/brokers"
)

const (
	// firstProbe and lastProbe bound the wait between two probes of a destination
	// that is down; it grows by half each time.
	firstProbe = 250 * time.Millisecond
	lastProbe  = 5 * time.Second
	// probeTimeout bounds a probe, which the rest of its batch waits for.
	probeTimeout = 750 * time.Millisecond
	// longestAside is the longest that a row is held aside because its destination is
	// down, so that it goes soon after the destination is back.
	longestAside = 30 * time.Second
	// mostDown is how many destinations are remembered as down. Rows of others are
	// published, and fail, as if it was for the first time.
	mostDown = 10_000
	// forgetDown is after how long a destination is forgotten that no row goes to.
	forgetDown = 10 * time.Minute
)

// destination is where rows fare alike: a topic, or a partition of one. It is down
// when what went there met an outage, and the broker does not have one:
//
//   - its rows are held aside without being published, so those of other
//     destinations go on, whatever the order in which they were written;
//   - one of them goes as a probe from time to time, by itself and with little time.
//     It is another one each time, so that a row that is to blame itself cannot keep
//     the destination down.
type destination struct {
	since time.Time
	probe time.Time // when it is tried again
	pause time.Duration
}

// destinationOf says where a message goes.
func (r *Relay) destinationOf(e *entry) string {
	if p, ok := r.pub.(brokers.Router); ok {
		return p.Destination(e.row.Message)
	}
	return e.row.Message.Topic
}

// tally is how the rows of one destination fared in a batch.
type tally struct {
	served  bool            // the broker has taken or refused one for its own sake
	missing bool            // the broker says that there is no such destination
	out     map[string]bool // keys whose first row met an outage
	unkeyed int             // rows without a key that did
	probed  bool
	err     error
}

func (t *tally) add(e *entry) {
	t.probed = t.probed || e.fate == probing
	switch {
	case errors.Is(e.err, brokers.ErrBlocked):
	case errors.Is(e.err, brokers.ErrNoRoute):
		t.missing, t.err = true, e.err
	case !isOutage(e.err):
		t.served = true
	case e.row.Message.Key == nil:
		t.unkeyed, t.err = t.unkeyed+1, e.err
	default:
		if t.out == nil {
			t.out = make(map[string]bool)
		}
		t.out[string(e.row.Message.Key)], t.err = true, e.err
	}
}

// down reports whether the destination is: what one row met may be its own.
func (t *tally) down() bool {
	return !t.served && (t.missing || len(t.out)+t.unkeyed > 1 || t.probed && t.err != nil)
}

// learn takes note of how the destinations fared, in a batch that met no outage of
// the broker.
func (r *Relay) learn(ctx context.Context, b []entry) {
	tallies := make(map[string]*tally)
	for i := range b {
		e := &b[i]
		if e.fate != going && e.fate != probing {
			continue
		}
		t := tallies[e.to]
		if t == nil {
			t = &tally{}
			tallies[e.to] = t
		}
		t.add(e)
	}
	now := time.Now()
	maps.DeleteFunc(r.down, func(_ string, d *destination) bool { return now.Sub(d.probe) > forgetDown })
	for to, t := range tallies {
		d := r.down[to]
		switch {
		case t.down() && d == nil && len(r.down) < mostDown:
			r.down[to] = &destination{since: now, pause: firstProbe, probe: now.Add(firstProbe)}
			r.observe(ctx, Event{Step: StepDown, Destination: to, Err: t.err})
		case t.down() && d != nil:
			d.pause = min(d.pause*3/2, lastProbe)
			d.probe = now.Add(jitter(d.pause))
		case t.served && d != nil:
			delete(r.down, to)
			r.observe(ctx, Event{Step: StepUp, Destination: to, Took: now.Sub(d.since)})
		}
	}
}

// aside is for how long a row is held whose destination is down: until the next
// probe, or for longer, the longer it has been, and spread, so that some are due
// whenever it is probed. What is due again and again costs the store.
func (r *Relay) aside(d *destination) time.Duration {
	least := max(0, time.Until(d.probe))
	most := min(time.Since(d.since)/2, longestAside, r.o.MaxBackoff)
	if most <= least {
		return least
	}
	return least + rand.N(most-least)
}
