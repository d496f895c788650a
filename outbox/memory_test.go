package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memory is a Store in memory, by the clock of the test's bubble. What is
// shown on it is what the relay does in time; that a store keeps its promises
// is shown by package outboxtest on real ones.
type memory struct {
	mu      sync.Mutex
	rows    []memoryRow
	settled []Settlement
	epoch   int64
	until   time.Time
	calls   map[string]int
	last    int64

	// before is called at each call, without the lock; an error is the answer.
	before func(ctx context.Context, op string) error
	// after is called after a Settle that worked; an error is the answer, and
	// the settlement stays.
	after func() error
}

type memoryRow struct {
	Row
	due    time.Time
	parked bool
}

func newMemory() *memory { return &memory{calls: map[string]int{}} }

func (s *memory) add(ids ...string) { s.addTo("t", ids...) }

func (s *memory) addTo(topic string, ids ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		s.last++
		m := &envelope.Message{ID: id, Source: "/s", Type: "t", Topic: topic, Key: []byte(id)}
		s.rows = append(s.rows, memoryRow{Row: Row{ID: s.last, Message: m}})
	}
}

// enter counts a call and asks before.
func (s *memory) enter(ctx context.Context, op string) error {
	s.mu.Lock()
	s.calls[op]++
	before := s.before
	s.mu.Unlock()
	if before != nil {
		return before(ctx, op)
	}
	return nil
}

func (s *memory) set(before func(ctx context.Context, op string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before = before
}

func (s *memory) count(op string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[op]
}

func (s *memory) Acquire(ctx context.Context, owner string, d time.Duration) (Lease, error) {
	if err := s.enter(ctx, "acquire"); err != nil {
		return Lease{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Now().Before(s.until) {
		return Lease{}, ErrHeld
	}
	s.epoch++
	s.until = time.Now().Add(d)
	return Lease{Owner: owner, Epoch: s.epoch, For: d}, nil
}

func (s *memory) Renew(ctx context.Context, l Lease) error {
	if err := s.enter(ctx, "renew"); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.extend(l)
}

func (s *memory) extend(l Lease) error {
	if l.Epoch != s.epoch {
		return ErrFenced
	}
	s.until = time.Now().Add(l.For)
	return nil
}

func (s *memory) Release(ctx context.Context, l Lease) error {
	if err := s.enter(ctx, "release"); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.Epoch == s.epoch {
		s.until = time.Time{}
	}
	return nil
}

func (s *memory) Read(ctx context.Context, _ Lease, limit int) ([]Row, error) {
	if err := s.enter(ctx, "read"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Row
	for _, r := range s.rows {
		if len(out) < limit && !r.parked && !r.due.After(time.Now()) {
			out = append(out, r.Row)
		}
	}
	return out, nil
}

func (s *memory) Settle(ctx context.Context, l Lease, ss []Settlement) error {
	if err := s.enter(ctx, "settle"); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.extend(l); err != nil {
		return err
	}
	s.settled = append(s.settled, ss...)
	for _, st := range ss {
		i := slices.IndexFunc(s.rows, func(r memoryRow) bool { return r.ID == st.Row.ID })
		switch r := &s.rows[i]; st.Action {
		case Sent:
			s.rows = slices.Delete(s.rows, i, i+1)
		case Hold:
			r.due = time.Now().Add(st.After)
		case Park, Skip:
			r.parked = true
		}
		if st.Counted && st.Action != Sent {
			s.rows[i].Attempts++
		}
	}
	if s.after != nil {
		return s.after()
	}
	return nil
}

// rival reports whether another relay could have the lease now.
func (s *memory) rival() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !time.Now().Before(s.until)
}

// sent returns the ids that were settled as sent, in order.
func (s *memory) sent() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ids []string
	for _, st := range s.settled {
		if st.Action == Sent {
			ids = append(ids, st.Row.Message.ID)
		}
	}
	return ids
}

// publisher is a brokers.Publisher made of a function.
type publisher func(ctx context.Context, msgs []*envelope.Message) brokers.Results

func (f publisher) Publish(ctx context.Context, msgs []*envelope.Message) brokers.Results {
	return f(ctx, msgs)
}
func (publisher) Close() error { return nil }

// takes takes everything, after d; what the context cut off is unknown.
func takes(d time.Duration) publisher {
	return func(ctx context.Context, msgs []*envelope.Message) brokers.Results {
		select {
		case <-time.After(d):
			return make(brokers.Results, len(msgs))
		case <-ctx.Done():
			return brokers.Fill(len(msgs), fmt.Errorf("%w: %w", brokers.ErrUnknown, ctx.Err()))
		}
	}
}

// events records what an Observer is told.
type events struct {
	mu  sync.Mutex
	all []Event
}

func (e *events) Observe(_ context.Context, ev Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, Event{Step: ev.Step, Err: ev.Err, Epoch: ev.Epoch})
}

func (e *events) of(step Step) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := 0
	for _, ev := range e.all {
		if ev.Step == step {
			n++
		}
	}
	return n
}

// start runs r until the function it returns is called, which waits for the
// end and fails the test unless Run has returned nil.
func start(t *testing.T, r *Relay) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	return func() {
		t.Helper()
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
}

var errStore = errors.New("the store is down")

// failing answers one kind of call with an error.
func failing(op string) func(context.Context, string) error {
	return func(_ context.Context, o string) error {
		if o == op {
			return errStore
		}
		return nil
	}
}

// hanging lets one kind of call wait for its context.
func hanging(op string) func(context.Context, string) error {
	return func(ctx context.Context, o string) error {
		if o != op {
			return nil
		}
		<-ctx.Done()
		return ctx.Err()
	}
}
