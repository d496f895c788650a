package outbox

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

// fate is what is done with a row of a batch.
type fate int

const (
	// stays: the row cannot go: it is blocked, or is no whole message.
	stays fate = iota
	// going: it is published with the others.
	going
	// probing: it is published to see whether its destination serves again.
	probing
	// waiting: it is held aside, because its destination is down.
	waiting
)

// entry is a row of a batch.
type entry struct {
	row  Row
	to   string // its destination, if it goes or waits for that
	fate fate
	err  error // the publisher's answer, if it was published
}

// plan decides what is done with the rows of a batch. Nothing of a destination that
// is down goes but the probe, so a probe passes no row of its key, if it is the first
// of its key here.
func (r *Relay) plan(rows []Row) []entry {
	b := make([]entry, len(rows))
	now := time.Now()
	var seen map[string]map[string]bool // by destination that is probed, the keys so far
	candidates := make(map[string]int)  // how many rows could have been the probe
	chosen := make(map[string]int)
	for i, row := range rows {
		e := &b[i]
		e.row = row
		if !row.goes() {
			continue
		}
		e.to, e.fate = r.destinationOf(e), going
		d := r.down[e.to]
		if d == nil {
			continue
		}
		e.fate = waiting
		if now.Before(d.probe) {
			continue
		}
		if seen == nil {
			seen = make(map[string]map[string]bool)
		}
		if seen[e.to] == nil {
			seen[e.to] = make(map[string]bool)
		}
		key := string(row.Message.Key)
		if row.Message.Key != nil && seen[e.to][key] {
			continue
		}
		seen[e.to][key] = row.Message.Key != nil
		if candidates[e.to]++; rand.N(candidates[e.to]) == 0 {
			chosen[e.to] = i
		}
	}
	for _, i := range chosen {
		b[i].fate = probing
	}
	return b
}

// publish publishes the rows that go and, beside them, the probes.
func (r *Relay) publish(ctx context.Context, b []entry) error {
	ctx, cancel := context.WithTimeout(ctx, r.o.PublishTimeout)
	defer cancel()
	start := time.Now()
	probes, rest := pick(b, probing), pick(b, going)
	var wg sync.WaitGroup
	wg.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, probeTimeout)
		defer cancel()
		probes.send(ctx, r.pub)
	})
	rest.send(ctx, r.pub)
	wg.Wait()
	err := errors.Join(probes.answer(b), rest.answer(b))
	var rows []Row
	var first error
	for _, e := range b {
		rows = append(rows, e.row)
		if first == nil {
			first = e.err
		}
	}
	if len(probes.msgs)+len(rest.msgs) > 0 {
		r.observe(ctx, Event{Step: StepPublish, Rows: rows, Err: first, Took: time.Since(start)})
	}
	return err
}

// call is what is published of a batch together.
type call struct {
	at      []int // in the batch
	msgs    []*envelope.Message
	results brokers.Results
}

func pick(b []entry, f fate) *call {
	c := &call{}
	for i, e := range b {
		if e.fate == f {
			c.msgs, c.at = append(c.msgs, e.row.Message), append(c.at, i)
		}
	}
	return c
}

func (c *call) send(ctx context.Context, pub brokers.Publisher) {
	if len(c.msgs) > 0 {
		c.results = pub.Publish(ctx, c.msgs)
	}
}

// answer puts the answers into the batch.
func (c *call) answer(b []entry) error {
	if len(c.results) != len(c.msgs) {
		return fmt.Errorf("outbox: the publisher gave %d results for %d messages", len(c.results), len(c.msgs))
	}
	for n, i := range c.at {
		b[i].err = c.results[n]
	}
	return nil
}

// outage returns why nothing of a batch went, if the broker is to blame and no
// destination: of what was to go, some says so, and nothing has an answer that only
// the broker can give. A rejection may come from the adapter, which knows the
// limits. A publisher that can ask the broker for a word of its own is asked.
func (r *Relay) outage(ctx context.Context, b []entry) error {
	p, ok := r.pub.(brokers.Prober)
	var why error
	for _, e := range b {
		switch {
		case e.fate == probing && e.err == nil:
			return nil
		case e.fate != going:
		case isOutage(e.err) || ok && errors.Is(e.err, brokers.ErrNoRoute): // nobody answers for the topic: who does for the broker?
			if why == nil {
				why = e.err
			}
		case answered(e.err):
			return nil
		}
	}
	if why == nil || !ok {
		return why
	}
	ctx, cancel := context.WithTimeout(ctx, brokerTimeout)
	defer cancel()
	if p.Probe(ctx) == nil {
		return nil
	}
	return why
}

// brokerTimeout bounds a question to the broker itself.
const brokerTimeout = 2 * time.Second
