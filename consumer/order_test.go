package consumer

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

// keyed queues a message with a key; "" is none.
func (s *scripted) keyed(lane, pos, key string) {
	m := &envelope.Message{Position: pos, Topic: "t"}
	if key != "" {
		m.Key = []byte(key)
	}
	s.feed <- &brokers.Delivery{Message: m, Lane: lane, Stopping: make(chan struct{}), Lost: make(chan struct{})}
}

// What a message that does not end holds up.
func TestOrderHoldsUpNoMoreThanItsUnit(t *testing.T) {
	for order, want := range map[Order][]string{
		OrderByLane: {"ack m0"},
		OrderByKey:  {"ack k0", "ack k1", "ack m0", "ack n0", "ack n1"},
		Unordered:   {"ack a1", "ack k0", "ack k1", "ack m0", "ack n0", "ack n1"},
	} {
		t.Run(order.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				src, release := newScripted(), make(chan struct{})
				b := start(t, src, &RunOptions{Order: order, HandlerTimeout: -1}, func(_ context.Context, m *envelope.Message) error {
					if m.Position == "a0" {
						<-release
					}
					return nil
				})
				src.keyed("l", "a0", "a")
				src.keyed("l", "a1", "a")
				src.keyed("l", "k0", "k")
				src.keyed("l", "n0", "")
				src.keyed("l", "n1", "")
				src.keyed("l", "k1", "k")
				src.keyed("m", "m0", "a") // another lane has another order
				synctest.Wait()
				got := src.notes()
				slices.Sort(got)
				if !slices.Equal(got, want) {
					t.Errorf("beside a message that does not end: %q, want %q", got, want)
				}
				close(release)
				synctest.Wait()
				if n := len(src.notes()); n != 7 {
					t.Errorf("%d of 7 are settled in the end", n)
				}
				b.stop()
			})
		})
	}
}

// Random messages that fail now and then are done in the order of their keys,
// one by one and in groups.
func TestOrderByKeyOverRetries(t *testing.T) {
	for seed := range uint64(20) {
		bubble(t, func(t *testing.T) {
			src := newScripted()
			rnd, feed := rand.New(rand.NewPCG(seed, 0)), rand.New(rand.NewPCG(seed, 1))
			var mu sync.Mutex
			busy, done := map[string]bool{}, map[string][]string{}
			b := start(t, src, &RunOptions{Order: OrderByKey, Concurrency: 4, MaxAttempts: -1}, func(_ context.Context, m *envelope.Message) error {
				key := string(m.Key)
				mu.Lock()
				if busy[key] {
					t.Errorf("seed %d: two of key %s at once", seed, key)
				}
				busy[key] = true
				fails, took := rnd.IntN(4) == 0, time.Duration(rnd.IntN(50))*time.Millisecond
				mu.Unlock()
				time.Sleep(took) // virtual
				mu.Lock()
				defer mu.Unlock()
				busy[key] = false
				if fails {
					return errBoom
				}
				done[key] = append(done[key], m.Position)
				return nil
			})
			want := map[string][]string{}
			for i := range 100 {
				key, pos := fmt.Sprint(feed.IntN(7)), fmt.Sprintf("p%02d", i)
				want[key] = append(want[key], pos)
				src.keyed("l", pos, key)
			}
			time.Sleep(time.Hour)
			synctest.Wait()
			for key := range want {
				if !slices.Equal(done[key], want[key]) {
					t.Errorf("seed %d: key %s: %q, want %q", seed, key, done[key], want[key])
				}
			}
			b.stop()
		})
	}
}
