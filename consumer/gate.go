package consumer

import (
	"context"
	"slices"
	"sync"
	"time"
)

// gate holds deliveries back while what they need is out of reach, and lets one
// of them through from time to time to see whether it is back. Without it every
// lane would try by itself, and an outage would be met by as many connection
// attempts as there are messages in flight.
//
// One message cannot shut it. What a message meets is its testimony: an outage is
// believed when a second one meets it as well, or the store says so when it is
// asked, and nobody has got through meanwhile. One that gets through, and was
// started after a testimony, refutes it:
//
//   - While nothing was shut, the message whose testimony it is has met something
//     of its own. After maxAlibis of that in a row it is charged: the error
//     counts as its failure.
//   - A believed outage is over. Nobody is charged for it, but the next testimony
//     of those who have told of it shuts nothing until they have got through: two
//     messages that always meet an outage of their own would otherwise hold up all
//     others every other moment.
type gate struct {
	backoff Backoff

	mu       sync.Mutex
	subjects map[any]*subject
	changed  chan struct{} // closed and replaced whenever something changes
}

// maxAlibis is how often in a row a message must meet an outage, while others that
// need the same are served, before it is charged. The store may well end one
// connection of many.
const maxAlibis = 3

// maxProbe bounds the wait between two probes, and that of a message that has met
// an outage: consumption is to be back soon after what it needs.
const maxProbe = time.Second

// subject is something that can be out of reach.
type subject struct {
	// everybody: all messages need it. Otherwise those do that have met its outage.
	everybody bool

	shut, probing bool
	tries         int
	why           error     // of the last testimony
	since         time.Time // when it was met first
	shutAt        time.Time
	next          time.Time // when the next probe may go
	waiting       []*mind   // for their turn to probe, in order
	witnesses     map[*mind]time.Time
	suspects      map[*mind]time.Time // whose testimony shuts nothing
	asking        bool                // somebody asks the store
}

// mind is what the gate knows of one message.
type mind struct {
	records map[*subject]*record // nil until it has met an outage
}

// record is what a message has done about one subject.
type record struct {
	since    time.Time // of the first testimony
	alibis   int       // in a row
	doubtful bool      // its testimony shuts nothing
}

func (m *mind) of(s *subject) *record {
	r := m.records[s]
	if r == nil {
		if m.records == nil {
			m.records = make(map[*subject]*record)
		}
		r = &record{since: time.Now()}
		m.records[s] = r
	}
	return r
}

// visit is one try of a message.
type visit struct {
	m      *mind
	began  time.Time
	probes *subject // nil if nothing is shut
}

func newGate(b Backoff) *gate {
	b.Max = min(b.Max, maxProbe)
	b.Min = min(b.Min, b.Max)
	return &gate{backoff: b, subjects: make(map[any]*subject), changed: make(chan struct{})}
}

// subject returns that of a key. A subject that there is keeps its reach.
func (g *gate) subject(key any, everybody bool) *subject {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.subjects[key]
	if s == nil {
		s = &subject{everybody: everybody, witnesses: make(map[*mind]time.Time), suspects: make(map[*mind]time.Time)}
		g.subjects[key] = s
	}
	return s
}

// find returns the subject of a key, nil if nobody has told of it yet.
func (g *gate) find(key any) *subject {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.subjects[key]
}

// met are the subjects that not everybody needs, and whose outage m has met.
func (g *gate) met(m *mind) []*subject {
	g.mu.Lock()
	defer g.mu.Unlock()
	var all []*subject
	for s := range m.records {
		if !s.everybody {
			all = append(all, s)
		}
	}
	return all
}

// knows reports whether there is anything to remember of m.
func (g *gate) knows(m *mind) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(m.records) > 0
}

// enter waits until nothing that m needs is shut, or until it is its turn to
// probe. It reports whether the caller may go on; it may not when ctx is done or
// one of stops is closed. Whoever was let in calls bad, good and then leave.
func (g *gate) enter(ctx context.Context, m *mind, stops ...<-chan struct{}) (visit, bool) {
	for {
		g.mu.Lock()
		s, left := g.blocking(m)
		if s == nil || left <= 0 {
			v := visit{m: m, began: time.Now(), probes: s}
			if s != nil {
				s.probing = true
				s.waiting = s.waiting[1:]
			}
			g.mu.Unlock()
			return v, true
		}
		changed := g.changed
		g.mu.Unlock()
		if !waitOr(ctx, left, changed, stops...) {
			g.forget(m)
			return visit{}, false
		}
	}
}

// blocking returns what m waits for, with m in its queue, and how long it waits at
// most; no time if it is m's turn. g.mu is held.
func (g *gate) blocking(m *mind) (*subject, time.Duration) {
	for _, s := range g.subjects {
		if !s.shut || !s.everybody && m.records[s] == nil {
			continue
		}
		if !slices.Contains(s.waiting, m) {
			s.waiting = append(s.waiting, m)
		}
		if s.probing || s.waiting[0] != m {
			return s, time.Hour // a change wakes us
		}
		return s, time.Until(s.next)
	}
	return nil, 0
}

// forget takes a message that has left, or is at its end, out of what the gate
// looks at. What is known of it stays with it.
func (g *gate) forget(m *mind) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, s := range g.subjects {
		delete(s.witnesses, m)
		delete(s.suspects, m)
		if i := slices.Index(s.waiting, m); i >= 0 {
			s.waiting = slices.Delete(s.waiting, i, i+1)
			g.wake() // the next one may be at its turn
		}
	}
}

// leave ends a visit. A probe that has told nothing lets another one go.
func (g *gate) leave(v visit) {
	if v.probes == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if s := v.probes; s.shut && s.probing {
		s.probing = false
		g.wake()
	}
}

// bad is called when v's message has met an outage of s. charged means that it is
// the message's own by now; otherwise it is to wait for after. shut reports that s
// was shut by this.
func (g *gate) bad(v visit, s *subject, why error) (charged, shut bool, after time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	if v.probes == s && s.shut {
		s.probing = false
		s.tries++
		s.next = now.Add(g.backoff.after(s.tries))
		g.wake()
	}
	r := v.m.of(s)
	if r.alibis >= maxAlibis {
		return true, false, 0
	}
	s.why = why
	if r.doubtful {
		s.suspects[v.m] = now
		if s.shut {
			return false, false, 0
		}
		return false, false, g.backoff.after(r.alibis + 1)
	}
	s.witnesses[v.m] = now
	if !s.shut && len(s.witnesses) > 1 {
		shut = true
		g.shut(s, now)
	}
	if s.shut { // the gate makes it wait
		return false, shut, 0
	}
	return false, false, g.backoff.after(1)
}

// shut is called under the lock.
func (g *gate) shut(s *subject, now time.Time) {
	s.shut, s.probing, s.tries, s.since, s.shutAt = true, false, 1, now, now
	for m := range s.witnesses {
		if at := m.records[s].since; at.Before(s.since) {
			s.since = at
		}
	}
	s.next = now.Add(g.backoff.after(1))
	g.wake()
}

// good is called when something that was started at began was served by s. It
// reports whether s was shut until now.
func (g *gate) good(s *subject, began time.Time) (opened bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if s.shut && began.Before(s.shutAt) {
		return false // it was under way when s went
	}
	alone := !s.shut
	for m, at := range s.witnesses {
		if began.Before(at) {
			alone = false // somebody has told of an outage since
			continue
		}
		r := m.of(s)
		r.doubtful = true
		if !s.shut {
			r.alibis++
		}
		delete(s.witnesses, m)
	}
	for m, at := range s.suspects {
		if alone && !began.Before(at) {
			m.of(s).alibis++
			delete(s.suspects, m)
		}
	}
	opened = s.shut
	if opened {
		s.shut, s.probing, s.tries, s.waiting = false, false, 0, nil
		clear(s.suspects)
		g.wake()
	}
	return opened
}

// served is called when v's message itself was served by s: whatever it has met
// before, its word counts again.
func (g *gate) served(v visit, s *subject) (opened bool) {
	g.mu.Lock()
	delete(v.m.records, s)
	delete(s.witnesses, v.m)
	delete(s.suspects, v.m)
	g.mu.Unlock()
	return g.good(s, v.began)
}

// ask lets one caller at a time ask the store itself about s, and takes its answer
// for a testimony. It reports what good and bad do.
func (g *gate) ask(ctx context.Context, s *subject, probe func(ctx context.Context) error) (opened, shut bool) {
	g.mu.Lock()
	if s.asking {
		g.mu.Unlock()
		return false, false
	}
	s.asking = true
	g.mu.Unlock()
	began := time.Now()
	err := probe(ctx)
	if err == nil {
		opened = g.good(s, began)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	s.asking = false
	// Not all that a store says is about an outage, and it says nothing about
	// itself when our own context has ended.
	if err != nil && !s.shut && isOutage(err) && ctx.Err() == nil && len(s.witnesses)+len(s.suspects) > 0 {
		s.why, shut = err, true
		g.shut(s, time.Now())
	}
	return opened, shut
}

// outage returns since when something is shut that everybody needs, and why. If
// nothing is, it returns what a message has met that nobody has refuted yet; nil if
// there is no such thing either.
func (g *gate) outage() (since time.Time, why error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, s := range g.subjects {
		if s.shut && s.everybody && (why == nil || s.since.Before(since)) {
			since, why = s.since, s.why
		}
	}
	if why != nil {
		return since, why
	}
	for _, s := range g.subjects {
		for m := range s.witnesses {
			if at := m.records[s].since; why == nil || at.Before(since) {
				since, why = at, s.why
			}
		}
	}
	return since, why
}

// waitRoom waits until nothing is shut that everybody needs, or room says that
// there is room for one more delivery all the same: those that wait are the ones
// that probe. It reports false if ctx was done first.
func (g *gate) waitRoom(ctx context.Context, room func() bool) bool {
	for {
		g.mu.Lock()
		changed, shut := g.changed, false
		for _, s := range g.subjects {
			shut = shut || s.shut && s.everybody
		}
		g.mu.Unlock()
		if !shut || room() {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// settled wakes who waits for room.
func (g *gate) settled() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, s := range g.subjects {
		if s.shut {
			g.wake()
			return
		}
	}
}

// wake is called under the lock.
func (g *gate) wake() {
	close(g.changed)
	g.changed = make(chan struct{})
}
