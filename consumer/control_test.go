package consumer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

func TestPauseReceivesNothingAndResumeGoesOn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src, c := newScripted(), &Control{}
		c.Pause()
		c.Pause()
		b := start(t, src, &RunOptions{Control: c}, func(context.Context, *envelope.Message) error { return nil })
		src.deliver("l", "p0")
		time.Sleep(time.Hour)
		synctest.Wait()
		b.expect()
		if err := c.Health().Ready(); err == nil || !strings.Contains(err.Error(), "paused") {
			t.Errorf("Ready while paused: %v", err)
		}
		if err := c.Health().Live(); err != nil {
			t.Errorf("Live while paused: %v", err)
		}
		c.Resume()
		synctest.Wait()
		b.expect("ack p0")
		if err := c.Health().Ready(); err != nil {
			t.Errorf("Ready after Resume: %v", err)
		}
		c.Pause()
		src.deliver("l", "p1") // on its way when the pause came
		src.deliver("l", "p2")
		time.Sleep(time.Hour)
		synctest.Wait()
		b.expect("ack p0", "ack p1")
		b.stop()
		if h := c.Health(); !h.Ended || h.Ready() == nil {
			t.Errorf("after the run: %+v", h)
		}
	})
}

func TestPausedRunDrains(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := &Control{}
		c.Pause()
		b := start(t, newScripted(), &RunOptions{Control: c}, func(context.Context, *envelope.Message) error { return nil })
		synctest.Wait()
		b.stop()
	})
}

// An outage makes a run not ready, and says since when; it stays alive, for no
// new process would do better.
func TestHealthTellsAnOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src, c := newScripted(), &Control{}
		if err := c.Health().Ready(); err == nil {
			t.Error("ready before the run")
		}
		var down atomic.Bool
		down.Store(true)
		b := start(t, src, &RunOptions{Control: c}, func(context.Context, *envelope.Message) error {
			if down.Load() {
				return fmt.Errorf("insert: %w", dedupe.ErrUnavailable)
			}
			return nil
		})
		began := time.Now()
		src.deliver("l", "p0")
		time.Sleep(time.Hour)
		synctest.Wait()
		h := c.Health()
		if !errors.Is(h.Outage, dedupe.ErrUnavailable) || !h.Since.Equal(began) || h.InFlight != 1 {
			t.Errorf("in an outage: %+v", h)
		}
		if err := h.Ready(); !errors.Is(err, dedupe.ErrUnavailable) {
			t.Errorf("Ready: %v", err)
		}
		if err := h.Live(); err != nil {
			t.Errorf("Live: %v", err)
		}
		down.Store(false)
		time.Sleep(time.Minute)
		synctest.Wait()
		if err := c.Health().Ready(); err != nil {
			t.Errorf("after the outage: %v", err)
		}
		b.stop()
	})
}

// B23: a handler that ignores its context makes the run red once its time-out
// and a grace have passed, and no sooner.
func TestB23HungHandlerMakesItRed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src, c, release := newScripted(), &Control{}, make(chan struct{})
		b := start(t, src, &RunOptions{Control: c, HandlerTimeout: time.Minute, MaxAttempts: 1}, func(_ context.Context, m *envelope.Message) error {
			if m.Position == "p0" {
				<-release
			}
			return nil
		})
		began := time.Now()
		src.deliver("l", "p0")
		src.deliver("m", "p1")
		for at, red := range map[time.Duration]bool{time.Minute + time.Second: false, time.Minute + 11*time.Second: true} {
			if red {
				continue
			}
			time.Sleep(at)
			synctest.Wait()
			if err := c.Health().Live(); err != nil {
				t.Errorf("after %v: %v", at, err)
			}
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		h := c.Health()
		if err := h.Live(); err == nil || !strings.Contains(err.Error(), "p0") || h.Ready() == nil {
			t.Errorf("after %v: %v, %v; want a red that names the message", time.Since(began), err, h.Ready())
		}
		if h.Running != 1 || len(h.Overdue) != 1 || !h.Overdue[0].Began.Equal(began) {
			t.Errorf("%+v", h)
		}
		close(release)
		synctest.Wait()
		if err := c.Health().Live(); err != nil {
			t.Errorf("after it has returned: %v", err)
		}
		b.stop()
	})
}

// stalling is a scripted source whose window is full.
type stalling struct {
	*scripted
	stuck []brokers.Stuck
}

func (s stalling) Stuck() []brokers.Stuck { return s.stuck }

func TestHealthNamesTheStuckOffset(t *testing.T) {
	c := &Control{}
	r, err := newRunner(stalling{newScripted(), []brokers.Stuck{{Topic: "orders", Partition: 3, Offset: 42, Behind: 7}}}, HandlerFunc(nil), &RunOptions{DeadLetter: Discard})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.attach(r); err != nil {
		t.Fatal(err)
	}
	if err := c.Health().Ready(); err == nil || !strings.Contains(err.Error(), "orders, partition 3, offset 42 with 7 behind it") {
		t.Errorf("Ready: %v", err)
	}
	if err := c.Health().Live(); err != nil {
		t.Errorf("Live: %v", err)
	}
	if _, err := c.attach(r); err == nil {
		t.Error("one Control for two runs at once")
	}
}
