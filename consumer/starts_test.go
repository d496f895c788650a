package consumer

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// counter is a StartCounter that outlives a process of the test.
type counter struct {
	mu     sync.Mutex
	starts map[string]int
	down   bool
}

func (c *counter) Start(_ context.Context, places []string, most int) ([]int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.down {
		return nil, dedupe.ErrUnavailable
	}
	n := make([]int, len(places))
	for i, p := range places {
		if n[i] = c.starts[p] + 1; n[i] <= most {
			c.starts[p]++
		}
	}
	return n, nil
}

func (c *counter) End(_ context.Context, places []string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range places {
		delete(c.starts, p)
	}
	return nil
}

func (c *counter) set(down bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down = down
}

// process is what one process sees of a counter. When it has died nothing it
// does reaches the counter any more.
type process struct {
	*counter
	died chan struct{}
	once sync.Once
}

func (p *process) die() { p.once.Do(func() { close(p.died) }) }

func (p *process) Start(ctx context.Context, places []string, most int) ([]int, error) {
	if closed(p.died) {
		return nil, dedupe.ErrUnavailable
	}
	return p.counter.Start(ctx, places, most)
}

func (p *process) End(ctx context.Context, places []string) error {
	if closed(p.died) {
		return dedupe.ErrUnavailable
	}
	return p.counter.End(ctx, places)
}

// One message ends the process whenever it is handled, together with whatever
// runs beside it. It is dead-lettered after as many starts as are allowed, and
// none of the others, however many die with it.
func TestCrashLoop(t *testing.T) {
	const killer, messages = 5, 12
	for name, o := range map[string]RunOptions{
		"at once":   {Order: Unordered},
		"in a lane": {},
		"in groups": {Batch: Batch{Max: 8, Wait: time.Millisecond}},
		"few":       {Order: Unordered, Concurrency: 2},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				c := &counter{starts: map[string]int{}}
				store := memdedupe.NewStore(nil)
				var mu sync.Mutex
				starts, done := 0, map[string]int{}
				live := func() (dead []string, died bool) {
					src, p := newScripted(), &process{counter: c, died: make(chan struct{})}
					h := Wrap("c", store, func(_ context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
						time.Sleep(10 * time.Millisecond)
						if m.ID == fmt.Sprint(killer) {
							mu.Lock()
							starts++
							mu.Unlock()
							p.die()
						}
						select {
						case <-p.died: // with all that run
							return errBoom
						case <-time.After(10 * time.Millisecond):
						}
						return tx.OnCommit(func() { mu.Lock(); defer mu.Unlock(); done[m.ID]++ })
					}, nil)
					run := o
					run.CrashLoop = CrashLoop{Counter: p, Consumer: "c"}
					b := startHandler(t, src, &run, h)
					feed(t, src, "l", messages)
					select {
					case <-p.died:
					case <-time.After(time.Minute):
					}
					died = closed(p.died)
					b.stop()
					return b.dead, died
				}
				crashes := 0
				for {
					dead, died := live()
					if !died {
						if want := []string{fmt.Sprintf("p%d crash_loop 0", killer)}; !slices.Equal(dead, want) {
							t.Errorf("dead letters %q, want %q", dead, want)
						}
						break
					}
					if len(dead) > 0 {
						t.Errorf("dead letters %q of a process that died", dead)
					}
					if crashes++; crashes > 20 {
						t.Fatal("the process ends again and again")
					}
				}
				if crashes != 3 || starts != 3 {
					t.Errorf("the process ended %d times in %d starts, want 3", crashes, starts)
				}
				for i := range messages {
					if n := done[fmt.Sprint(i)]; i != killer && n != 1 {
						t.Errorf("event %d has %d effects, want 1", i, n)
					}
				}
				if len(c.starts) != 0 {
					t.Errorf("starts without an end: %v", c.starts)
				}
			})
		})
	}
}

// A counter that is out of reach is an outage: nothing starts uncounted.
func TestStartsThatCannotBeCounted(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src, c := newScripted(), &counter{starts: map[string]int{}}
		c.set(true)
		control := &Control{}
		var ran atomic.Int32
		b := start(t, src, &RunOptions{CrashLoop: CrashLoop{Counter: c, Consumer: "c"}, Control: control}, func(context.Context, *envelope.Message) error {
			ran.Add(1)
			return nil
		})
		src.deliver("l", "p0")
		time.Sleep(time.Minute)
		synctest.Wait()
		if ran.Load() != 0 || control.Health().Outage == nil {
			t.Errorf("the handler ran %d times, health %+v", ran.Load(), control.Health())
		}
		c.set(false)
		time.Sleep(time.Minute)
		synctest.Wait()
		b.expect("ack p0")
		b.stop()
	})
}
