// Package modes runs one history of deliveries in every way in which a consumer
// can hold its keys, and demands one result.
package modes

import (
	"fmt"
	"math/rand/v2"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/envelope"
)

const (
	topic  = "orders"
	source = "/shop"
	kind   = "order.placed"
)

// The contents that a handler fails on. Every other one succeeds at once.
const (
	poisoned = "poison"
	flaky    = "fails twice"
	failures = 2 // of flaky
)

// delivery is what is published once.
type delivery struct {
	key, id, body string
	malformed     bool // it has an id and no source
}

// message is d as a producer publishes it. Without attributes in its fields a
// message stays as it is, so a broken envelope arrives broken.
func (d delivery) message() *envelope.Message {
	m := &envelope.Message{Topic: topic, Key: []byte(d.key), Body: []byte(d.body)}
	if d.malformed {
		m.Header.Add("ce_specversion", []byte("1.0"))
		m.Header.Add("ce_id", []byte(d.id))
		m.Header.Add("ce_type", []byte(kind))
		return m
	}
	m.ID, m.Source, m.Type = d.id, source, kind
	return m
}

// newHistory makes about n deliveries of events on eight keys: new ones, copies
// close behind their original and far behind it, and identities that are used
// again for another content. All deliveries of an event have its key, so that
// their order is the lane's and the same in every run.
func newHistory(seed uint64, n int) []delivery {
	rnd := rand.New(rand.NewPCG(seed, seed))
	key := func() string { return fmt.Sprintf("key %d", rnd.IntN(8)) }
	var h, events []delivery
	for i := range n {
		near := max(0, len(events)-3)
		switch p := rnd.IntN(10); {
		case len(events) == 0 || p < 5:
			d := delivery{key: key(), id: fmt.Sprintf("event %d", i), body: fmt.Sprintf("body %d", i)}
			h, events = append(h, d), append(events, d)
		case p < 7: // a twin: mostly in the same group
			h = append(h, events[near+rnd.IntN(len(events)-near)])
		case p < 8: // a redelivery
			h = append(h, events[rnd.IntN(len(events))])
		case p < 9: // a conflict in the same group
			h = append(h, events[near+rnd.IntN(len(events)-near)].with(fmt.Sprintf("other %d", rnd.IntN(2))))
		default: // a conflict with what was committed long ago
			h = append(h, events[rnd.IntN(len(events))].with(fmt.Sprintf("other %d", rnd.IntN(2))))
		}
	}
	return insert(rnd, h, key)
}

// with is d with another content.
func (d delivery) with(body string) delivery {
	d.body = body
	return d
}

// insert puts in what fails, each run of deliveries at a place of its own.
func insert(rnd *rand.Rand, h []delivery, key func() string) []delivery {
	poison := delivery{key: key(), id: "poison", body: poisoned}
	unsteady := delivery{key: key(), id: "flaky", body: flaky}
	runs := [][]delivery{
		{{key: key(), id: "malformed", body: "a body", malformed: true}},
		// A poison has no effect, so its identity is free for another content.
		{poison, poison, poison.with("mended"), poison.with("mended"), poison},
		{unsteady, unsteady, unsteady.with("other 0")},
	}
	// Alone among others: whoever isolates it must not blame its neighbours.
	for i := range 8 {
		runs = append(runs, []delivery{{key: key(), id: fmt.Sprintf("poison %d", i), body: poisoned}})
	}
	for _, run := range runs {
		at := len(h)/4 + rnd.IntN(len(h)/2)
		h = append(h[:at:at], append(run, h[at:]...)...)
	}
	return h
}

// result is what a history leaves behind.
type result struct {
	effects   map[string][]string // by key, in the order in which they came about
	dead      map[string]int      // by id and reason
	conflicts map[string]int      // records by id
	repeats   int                 // effects that were brought about again and recognised
}

// expected says what has to come of a history: of each identity the first content
// that does not fail takes effect.
func expected(h []delivery) result {
	r := result{effects: map[string][]string{}, dead: map[string]int{}, conflicts: map[string]int{}}
	done := map[string]string{}
	seen := map[[2]string]bool{}
	for _, d := range h {
		first, known := done[d.id]
		switch {
		case d.malformed:
			r.dead[d.id+": "+envelope.ReasonMissingSource]++
		case known && first == d.body:
		case known:
			if !seen[[2]string{d.id, d.body}] {
				r.conflicts[d.id]++
			}
			seen[[2]string{d.id, d.body}] = true
		case d.body == poisoned:
			r.dead[d.id+": "+string(consumer.ClassPermanent)]++
		default:
			done[d.id] = d.body
			r.effects[d.key] = append(r.effects[d.key], d.id+": "+d.body)
		}
	}
	return r
}
