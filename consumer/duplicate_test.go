package consumer

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// event is a delivery of an event, by its id.
func (s *scripted) event(t *testing.T, lane, pos, id string) *brokers.Delivery {
	m := raw(t, id, "body")
	m.Position, m.Topic = pos, "t"
	d := &brokers.Delivery{Message: m, Lane: lane, Stopping: make(chan struct{}), Lost: make(chan struct{})}
	s.feed <- d
	return d
}

// B22: a duplicate that is done is acknowledged without being handled, however
// often the acknowledgement fails, and never becomes a dead letter.
func TestB22DoneIsAcknowledgedHoweverOften(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newScripted()
		src.ackErr = errors.New("the answer is lost")
		runs, dead := 0, 0
		h := Wrap("c", memdedupe.NewStore(nil), func(context.Context, *memdedupe.Tx, *envelope.Message) error { runs++; return nil }, nil)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- Run(ctx, src, h, &RunOptions{MaxAttempts: 2, DeadLetter: func(context.Context, *Failure) error { dead++; return nil }})
		}()
		for range 6 {
			src.event(t, "l", "p0", "1")
			synctest.Wait()
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		notes := slices.DeleteFunc(src.notes(), func(s string) bool { return s == "close" })
		if want := slices.Repeat([]string{"ack p0"}, 6); runs != 1 || dead != 0 || !slices.Equal(notes, want) {
			t.Errorf("%d runs, %d dead letters, %v; want one run, and that every copy is acknowledged", runs, dead, notes)
		}
	})
}

// B22: a copy of an event that is being handled is neither handled nor
// acknowledged, and comes back until its owner is done; by the broker where it
// can wait.
func TestB22RunningComesBackLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &nacking{newScripted()}
		release := make(chan struct{})
		var runs atomic.Int32
		h := Wrap("c", memdedupe.NewStore(&memdedupe.Options{Wait: time.Millisecond}), func(ctx context.Context, _ *memdedupe.Tx, _ *envelope.Message) error {
			runs.Add(1)
			select {
			case <-release:
			case <-ctx.Done():
			}
			return nil
		}, nil)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- Run(ctx, src, h, &RunOptions{Concurrency: 4, MaxAttempts: 2, DeadLetter: func(_ context.Context, f *Failure) error {
				t.Errorf("a dead letter: %v", f.Err)
				return nil
			}})
		}()
		src.event(t, "", "p0", "1")
		synctest.Wait()
		src.event(t, "", "p1", "1") // the copy, which the source redelivers after each nack
		time.Sleep(10 * time.Second)
		for _, note := range src.notes() {
			if note == "ack p1" {
				t.Error("a copy was acknowledged while the first one ran")
			}
		}
		close(release)
		time.Sleep(time.Minute)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		notes := src.notes()
		if runs.Load() != 1 || !slices.Contains(notes, "ack p0") || !slices.Contains(notes, "ack p1") {
			t.Errorf("%d runs, %v; want one run, and both acknowledged in the end", runs.Load(), notes)
		}
	})
}
