package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

// scripted is a source whose deliveries a test makes one by one, and which
// writes down how each was settled. The real adapters have their own suite;
// here it is about what the runtime asks of one.
type scripted struct {
	feed chan *brokers.Delivery
	end  chan error // ends Receive with an error

	mu     sync.Mutex
	log    []string // "ack p0", "nack p0 1s", "return p0", "close"
	ackErr error
}

func newScripted() *scripted {
	return &scripted{feed: make(chan *brokers.Delivery, 1000), end: make(chan error, 1)}
}

// deliver queues a message at pos; lane "" is unordered.
func (s *scripted) deliver(lane, pos string) *brokers.Delivery {
	d := &brokers.Delivery{Message: &envelope.Message{Position: pos, Topic: "t"}, Lane: lane,
		Stopping: make(chan struct{}), Lost: make(chan struct{})}
	s.feed <- d
	return d
}

func (s *scripted) Receive(ctx context.Context) (*brokers.Delivery, error) {
	select {
	case d := <-s.feed:
		return d, nil
	case err := <-s.end:
		return nil, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *scripted) note(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log = append(s.log, fmt.Sprintf(format, args...))
}

func (s *scripted) notes() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.log)
}

func (s *scripted) Ack(_ context.Context, d *brokers.Delivery) error {
	s.note("ack %s", d.Message.Position)
	return s.ackErr
}

func (s *scripted) Return(_ context.Context, d *brokers.Delivery) error {
	s.note("return %s", d.Message.Position)
	return nil
}

func (s *scripted) Close() error {
	s.note("close")
	return nil
}

// nacking is a scripted source whose broker can wait.
type nacking struct{ *scripted }

func (s nacking) Nack(_ context.Context, d *brokers.Delivery, after time.Duration) error {
	s.note("nack %s", d.Message.Position)
	go func() {
		time.Sleep(after) // virtual time: every test here runs in a synctest bubble
		again := *d
		again.Attempt++
		s.feed <- &again
	}()
	return nil
}

// bench is one Run under test.
type bench struct {
	t      *testing.T
	src    *scripted
	cancel context.CancelFunc
	done   chan error
	dead   []string
	deadMu sync.Mutex
	// deadErr is consulted before a dead letter is taken.
	deadErr func(n int) error
	deadN   int
}

// start runs h in the test's bubble. o may be nil.
func start(t *testing.T, src brokers.Source, o *RunOptions, h HandlerFunc) *bench {
	t.Helper()
	return startHandler(t, src, o, h)
}

func startHandler(t *testing.T, src brokers.Source, o *RunOptions, h Handler) *bench {
	t.Helper()
	b := &bench{t: t, done: make(chan error, 1)}
	switch s := src.(type) {
	case *scripted:
		b.src = s
	case nacking:
		b.src = s.scripted
	}
	if o == nil {
		o = &RunOptions{}
	}
	if o.DeadLetter == nil {
		o.DeadLetter = b.deadLetter
	}
	ctx, cancel := context.WithCancel(t.Context())
	b.cancel = cancel
	go func() { b.done <- Run(ctx, src, h, o) }()
	t.Cleanup(cancel)
	return b
}

func (b *bench) deadLetter(_ context.Context, f *Failure) error {
	b.deadMu.Lock()
	defer b.deadMu.Unlock()
	b.deadN++
	if b.deadErr != nil {
		if err := b.deadErr(b.deadN); err != nil {
			return err
		}
	}
	b.dead = append(b.dead, fmt.Sprintf("%s %s %d", f.Message.Position, f.Reason, f.Attempts))
	return nil
}

// stop drains, and fails the test unless Run returns nil.
func (b *bench) stop() {
	b.t.Helper()
	if err := b.end(); err != nil {
		b.t.Errorf("Run: %v", err)
	}
}

// end drains and returns Run's error.
func (b *bench) end() error {
	b.cancel()
	return <-b.done
}

func (b *bench) expect(want ...string) {
	b.t.Helper()
	if got := b.src.notes(); !slices.Equal(got, want) {
		b.t.Errorf("settled:\n got %q\nwant %q", got, want)
	}
}

func (b *bench) expectDead(want ...string) {
	b.t.Helper()
	b.deadMu.Lock()
	defer b.deadMu.Unlock()
	if !slices.Equal(b.dead, want) {
		b.t.Errorf("dead letters:\n got %q\nwant %q", b.dead, want)
	}
}

// bubble runs f in virtual time.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

var errBoom = errors.New("boom")
