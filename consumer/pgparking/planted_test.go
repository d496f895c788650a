package pgparking_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/parkingtest"
	"github.com/unecho/unecho/consumer/pgparking"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/planted"
)

// What the suite must see: lots and counters that did these things have lost
// messages, decisions, or the culprit.
func TestPlanted(t *testing.T) {
	for _, bug := range []struct {
		name, by string
		lot      func(f *fixture) consumer.ParkingLot
	}{
		{"headers not kept", "messages are kept as on the wire", func(f *fixture) consumer.ParkingLot { return noHeaders{f.lot} }},
		{"a null body kept as empty", "messages are kept as on the wire", func(f *fixture) consumer.ParkingLot { return nullIsEmpty{f.lot} }},
		{"the caller's message kept", "a record is nobody's but the lot's", func(f *fixture) consumer.ParkingLot { return &aliased{Lot: f.lot} }},
		{"a record for each redelivery", "parking again is one record", func(f *fixture) consumer.ParkingLot { return &alwaysNew{Lot: f.lot} }},
		{"the first failure kept", "parking again is one record", func(f *fixture) consumer.ParkingLot { return firstFailure{f.lot} }},
		{"a redelivery reopens", "a redelivery undoes no decision", func(f *fixture) consumer.ParkingLot { return reopens{f.lot} }},
		{"records by position alone", "other messages are other records", func(f *fixture) consumer.ParkingLot { return byPosition{f.lot} }},
		{"changes without a version", "of two changes for one version one is made", func(f *fixture) consumer.ParkingLot { return lastWins{f.lot} }},
		{"a state alone is updated", "an update changes what it says", func(f *fixture) consumer.ParkingLot { return stateAlone{f.lot} }},
		{"half an edit", "an edit is whole", func(f *fixture) consumer.ParkingLot { return halfEdit{f.lot} }},
		{"an edit in two steps", "an edit of what was changed is nothing", func(f *fixture) consumer.ParkingLot { return copyFirst{f.lot} }},
		{"lists with payloads", "lists by page, without payloads", func(f *fixture) consumer.ParkingLot { return fatLists{f.lot} }},
		{"lists without an end", "lists by page, without payloads", func(f *fixture) consumer.ParkingLot { return firstPage{f.lot} }},
		{"lists of all consumers", "lists by state and consumer", func(f *fixture) consumer.ParkingLot { return allConsumers{f.lot} }},
	} {
		t.Run(bug.name, func(t *testing.T) {
			planted.Caught(t, "parkingtest/"+bug.name, func(t testing.TB) { lotCase(bug.by)(t, bug.lot(newFixture(t))) })
		})
	}
	for _, bug := range []struct {
		name, by string
		counter  func(open func() consumer.StartCounter) func() consumer.StartCounter
	}{
		{"starts in memory", "starts count for all processes", func(func() consumer.StartCounter) func() consumer.StartCounter {
			return func() consumer.StartCounter { return &inMemory{n: map[string]int{}} }
		}},
		{"an end that does nothing", "starts count until their end", onCounter(func(c consumer.StartCounter) consumer.StartCounter { return noEnd{c} })},
		{"counted above the bound", "starts are counted up to a bound", onCounter(func(c consumer.StartCounter) consumer.StartCounter { return noBound{c} })},
		{"read and then written", "starts at once are all counted", readThenWrite},
		{"an end of everything", "an end is that of its places alone", onCounter(func(c consumer.StartCounter) consumer.StartCounter { return &endsAll{StartCounter: c} })},
		{"answers in another order", "starts count until their end", onCounter(func(c consumer.StartCounter) consumer.StartCounter { return backwards{c} })},
	} {
		t.Run(bug.name, func(t *testing.T) {
			planted.Caught(t, "parkingtest/"+bug.name, func(t testing.TB) { counterCase(bug.by)(t, bug.counter(openCounter(t))) })
		})
	}
}

func lotCase(name string) func(testing.TB, consumer.ParkingLot) {
	for _, c := range parkingtest.LotCases() {
		if c.Name == name {
			return c.Func
		}
	}
	panic("no case " + name)
}

func counterCase(name string) func(testing.TB, func() consumer.StartCounter) {
	for _, c := range parkingtest.CounterCases() {
		if c.Name == name {
			return c.Func
		}
	}
	panic("no case " + name)
}

type noHeaders struct{ *pgparking.Lot }

func (l noHeaders) Park(ctx context.Context, p *consumer.Parked) error {
	q := *p
	q.Message = p.Message.Clone()
	q.Message.Header = nil
	return l.Lot.Park(ctx, &q)
}

type nullIsEmpty struct{ *pgparking.Lot }

func (l nullIsEmpty) Find(ctx context.Context, id string) (*consumer.Parked, error) {
	p, err := l.Lot.Find(ctx, id)
	if err == nil && p.Message.Body == nil {
		p.Message.Body = []byte{}
	}
	return p, err
}

// aliased answers with the message that it was given.
type aliased struct {
	*pgparking.Lot
	kept sync.Map
}

func (l *aliased) Park(ctx context.Context, p *consumer.Parked) error {
	l.kept.Store(p.ID, p.Message)
	return l.Lot.Park(ctx, p)
}

func (l *aliased) Find(ctx context.Context, id string) (*consumer.Parked, error) {
	p, err := l.Lot.Find(ctx, id)
	if m, ok := l.kept.Load(id); ok && err == nil {
		p.Message = m.(*envelope.Message)
	}
	return p, err
}

type alwaysNew struct {
	*pgparking.Lot
	n atomic.Int64
}

func (l *alwaysNew) Park(ctx context.Context, p *consumer.Parked) error {
	q := *p
	q.ID = fmt.Sprintf("%.24s%08x", p.ID, l.n.Add(1))
	return l.Lot.Park(ctx, &q)
}

type firstFailure struct{ *pgparking.Lot }

func (l firstFailure) Park(ctx context.Context, p *consumer.Parked) error {
	if _, err := l.Find(ctx, p.ID); err == nil {
		return nil
	}
	return l.Lot.Park(ctx, p)
}

type reopens struct{ *pgparking.Lot }

func (l reopens) Park(ctx context.Context, p *consumer.Parked) error {
	if err := l.Lot.Park(ctx, p); err != nil {
		return err
	}
	q, err := l.Find(ctx, p.ID)
	if err == nil && q.State != consumer.ParkedWaiting {
		q.State = consumer.ParkedWaiting
		err = l.Update(ctx, q)
	}
	return err
}

type byPosition struct{ *pgparking.Lot }

func (l byPosition) Park(ctx context.Context, p *consumer.Parked) error {
	q := *p
	q.ID = fmt.Sprintf("%x", sha256.Sum256([]byte(p.Consumer+p.Message.Position)))[:32]
	return l.Lot.Park(ctx, &q)
}

type lastWins struct{ *pgparking.Lot }

func (l lastWins) Update(ctx context.Context, p *consumer.Parked) error {
	for {
		now, err := l.Find(ctx, p.ID)
		if err != nil {
			return l.Lot.Update(ctx, p)
		}
		q := *p
		q.Version = now.Version
		if err := l.Lot.Update(ctx, &q); !errors.Is(err, consumer.ErrParkedChanged) {
			return err
		}
	}
}

type stateAlone struct{ *pgparking.Lot }

func (l stateAlone) Update(ctx context.Context, p *consumer.Parked) error {
	now, err := l.Find(ctx, p.ID)
	if err != nil {
		return err
	}
	now.State, now.Version = p.State, p.Version
	return l.Lot.Update(ctx, now)
}

// halfEdit parks the copy and forgets the original.
type halfEdit struct{ *pgparking.Lot }

func (l halfEdit) Replace(ctx context.Context, _, next *consumer.Parked) error {
	return l.Park(ctx, next)
}

// copyFirst parks the copy before it looks whether the original has changed.
type copyFirst struct{ *pgparking.Lot }

func (l copyFirst) Replace(ctx context.Context, p, next *consumer.Parked) error {
	if err := l.Park(ctx, next); err != nil {
		return err
	}
	q := *p
	q.State = consumer.ParkedEdited
	return l.Update(ctx, &q)
}

type fatLists struct{ *pgparking.Lot }

func (l fatLists) List(ctx context.Context, f consumer.ParkedFilter) (consumer.ParkedPage, error) {
	page, err := l.Lot.List(ctx, f)
	for i := range page.Records {
		if page.Records[i], err = l.Find(ctx, page.Records[i].ID); err != nil {
			break
		}
	}
	return page, err
}

type firstPage struct{ *pgparking.Lot }

func (l firstPage) List(ctx context.Context, f consumer.ParkedFilter) (consumer.ParkedPage, error) {
	f.After = ""
	return l.Lot.List(ctx, f)
}

type allConsumers struct{ *pgparking.Lot }

func (l allConsumers) List(ctx context.Context, f consumer.ParkedFilter) (consumer.ParkedPage, error) {
	f.Consumer = ""
	return l.Lot.List(ctx, f)
}

// onCounter breaks each process's side of a counter.
func onCounter(bug func(consumer.StartCounter) consumer.StartCounter) func(func() consumer.StartCounter) func() consumer.StartCounter {
	return func(open func() consumer.StartCounter) func() consumer.StartCounter {
		return func() consumer.StartCounter { return bug(open()) }
	}
}

// inMemory forgets with its process.
type inMemory struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *inMemory) Start(_ context.Context, places []string, most int) ([]int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	answer := make([]int, len(places))
	for i, p := range places {
		if answer[i] = c.n[p] + 1; answer[i] <= most {
			c.n[p]++
		}
	}
	return answer, nil
}

func (c *inMemory) End(_ context.Context, places []string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range places {
		delete(c.n, p)
	}
	return nil
}

type noEnd struct{ consumer.StartCounter }

func (noEnd) End(context.Context, []string) error { return nil }

type noBound struct{ consumer.StartCounter }

func (c noBound) Start(ctx context.Context, places []string, _ int) ([]int, error) {
	return c.StartCounter.Start(ctx, places, 1<<20)
}

// readThenWrite counts in two steps, what it has read before the others wrote.
func readThenWrite(func() consumer.StartCounter) func() consumer.StartCounter {
	shared := &inMemory{n: map[string]int{}}
	return func() consumer.StartCounter { return twoSteps{shared} }
}

type twoSteps struct{ *inMemory }

func (c twoSteps) Start(ctx context.Context, places []string, most int) ([]int, error) {
	c.mu.Lock()
	before := maps.Clone(c.n)
	c.mu.Unlock()
	runtime.Gosched()
	c.mu.Lock()
	defer c.mu.Unlock()
	answer := make([]int, len(places))
	for i, p := range places {
		if answer[i] = before[p] + 1; answer[i] <= most {
			c.n[p] = answer[i]
		}
	}
	return answer, nil
}

type endsAll struct {
	consumer.StartCounter
	seen sync.Map
}

func (c *endsAll) Start(ctx context.Context, places []string, most int) ([]int, error) {
	for _, p := range places {
		c.seen.Store(p, true)
	}
	return c.StartCounter.Start(ctx, places, most)
}

func (c *endsAll) End(ctx context.Context, _ []string) error {
	var all []string
	c.seen.Range(func(p, _ any) bool { all = append(all, p.(string)); return true })
	return c.StartCounter.End(ctx, all)
}

// backwards answers in the order in which it has locked.
type backwards struct{ consumer.StartCounter }

func (c backwards) Start(ctx context.Context, places []string, most int) ([]int, error) {
	n, err := c.StartCounter.Start(ctx, places, most)
	slices.Reverse(n)
	return n, err
}
