package consumer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// marked is a run of a handler whose effects are the positions of its records.
type marked struct {
	*bench
	d *memdedupe.Driver

	mu      sync.Mutex
	effects []string
	runs    map[string]int
}

// startMarked runs a handler by positions. fail may be nil.
func startMarked(t *testing.T, src brokers.Source, d *memdedupe.Driver, run RunOptions, o *Options, fail func(at string, run int) error, mw ...Middleware) *marked {
	t.Helper()
	m := &marked{d: d, runs: map[string]int{}}
	h := WrapWatermark("c", dedupe.NewTxStore(d, nil), func(_ context.Context, tx *memdedupe.Tx, msg *envelope.Message) error {
		m.mu.Lock()
		m.runs[msg.Position]++
		run := m.runs[msg.Position]
		m.mu.Unlock()
		if err := tx.OnCommit(func() { m.mu.Lock(); defer m.mu.Unlock(); m.effects = append(m.effects, msg.Position) }); err != nil {
			return err
		}
		if fail != nil {
			return fail(msg.Position, run)
		}
		return nil
	}, o)
	if len(mw) > 0 {
		h = Chain(h, mw...)
	}
	m.bench = startHandler(t, src, &run, h)
	return m
}

func (m *marked) wantEffects(offsets ...int) {
	m.t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	if want := positions(offsets...); !slices.Equal(m.effects, want) {
		m.t.Errorf("effects at %q, want %q", m.effects, want)
	}
}

func positions(offsets ...int) (all []string) {
	for _, o := range offsets {
		all = append(all, fmt.Sprint("t/0/", o))
	}
	return all
}

func ackedAt(offsets ...int) (all []string) {
	for _, p := range positions(offsets...) {
		all = append(all, "ack "+p)
	}
	return all
}

// record queues the record at an offset, written that many seconds after the first.
func (s *scripted) record(t *testing.T, offset int, id string, second int) {
	t.Helper()
	m := raw(t, id, "body")
	m.Position, m.Topic, m.Time = fmt.Sprint("t/0/", offset), "t", time.Unix(1_700_000_000+int64(second), 0)
	s.feed <- &brokers.Delivery{Message: m, Lane: "t/0", Stopping: make(chan struct{}), Lost: make(chan struct{})}
}

func (s *scripted) records(t *testing.T, offsets ...int) {
	t.Helper()
	for _, o := range offsets {
		s.record(t, o, fmt.Sprint(o), o)
	}
}

// modes runs a test one by one and in groups.
func modes(t *testing.T, f func(t *testing.T, o RunOptions)) {
	for name, o := range map[string]RunOptions{"one by one": {}, "groups": {Batch: Batch{Max: 8, Wait: 10 * time.Millisecond}}} {
		t.Run(name, func(t *testing.T) { bubble(t, func(t *testing.T) { f(t, o) }) })
	}
}

func TestWatermarkRunsOnceForEachRecord(t *testing.T) {
	modes(t, func(t *testing.T, o RunOptions) {
		src := newScripted()
		src.records(t, 3, 4, 7, 8, 4, 7, 8, 9) // a gap, and a rebalance
		m := startMarked(t, src, memdedupe.NewDriver(nil), o, nil, nil)
		time.Sleep(time.Second)
		src.records(t, 0, 5, 10) // a rewind on purpose
		time.Sleep(time.Second)
		m.stop()
		m.wantEffects(3, 4, 7, 8, 9, 10)
		m.expect(append(ackedAt(3, 4, 7, 8, 4, 7, 8, 9, 0, 5, 10), "close")...)
	})
}

// The one that fails is tried again before what is behind it: behind the position
// it would be a duplicate.
func TestWatermarkKeepsOrderUnderFailures(t *testing.T) {
	for name, end := range map[string]func(){"error": func() {}, "panic": func() { panic("boom") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			modes(t, func(t *testing.T, o RunOptions) {
				src := newScripted()
				src.records(t, 0, 1, 2, 3, 4, 5)
				m := startMarked(t, src, memdedupe.NewDriver(nil), o, nil, func(at string, run int) error {
					if at == "t/0/3" && run <= 3 {
						end()
						return errBoom
					}
					return nil
				})
				time.Sleep(10 * time.Minute)
				m.stop()
				m.wantEffects(0, 1, 2, 3, 4, 5)
				m.expect(append(ackedAt(0, 1, 2, 3, 4, 5), "close")...)
				m.expectDead()
			})
		})
	}
}

// Middleware that answers for a message has it tried again, before what is behind
// it, whether it fails, panics or ends its goroutine.
func TestWatermarkKeepsOrderUnderMiddleware(t *testing.T) {
	for name, end := range map[string]func(){"error": func() {}, "panic": func() { panic("boom") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			modes(t, func(t *testing.T, o RunOptions) {
				src := newScripted()
				src.records(t, 0, 1, 2, 3, 4, 5)
				var mu sync.Mutex
				runs := 0
				m := startMarked(t, src, memdedupe.NewDriver(nil), o, nil, nil, around(func(ctx context.Context, h Handler, m *envelope.Message) error {
					if m.Position == "t/0/2" {
						mu.Lock()
						runs++
						n := runs
						mu.Unlock()
						if n <= 3 {
							end()
							return errBoom
						}
					}
					return h.Handle(ctx, m)
				}))
				time.Sleep(10 * time.Minute)
				m.stop()
				m.wantEffects(0, 1, 2, 3, 4, 5)
				m.expect(append(ackedAt(0, 1, 2, 3, 4, 5), "close")...)
			})
		})
	}
}

// A record is dead-lettered, the next one is dated earlier and moves the position
// past it, and both come again. That is no other log.
func TestWatermarkPassesDeadLetters(t *testing.T) {
	modes(t, func(t *testing.T, o RunOptions) {
		o.MaxAttempts = 2
		src, d := newScripted(), memdedupe.NewDriver(nil)
		src.record(t, 0, "0", 0)
		src.record(t, 1, "1", 100)
		src.record(t, 2, "2", 50)
		m := startMarked(t, src, d, o, nil, func(at string, _ int) error {
			if at == "t/0/1" {
				return errBoom
			}
			return nil
		})
		time.Sleep(time.Minute)
		src.record(t, 1, "1", 100)
		src.record(t, 2, "2", 50)
		src.record(t, 3, "3", 60)
		time.Sleep(time.Minute)
		m.stop()
		m.wantEffects(0, 2, 3)
		m.expectDead("t/0/1 failed 2") // and no second time
		m.expect(append(ackedAt(0, 1, 2, 1, 2, 3), "close")...)
	})
}

// The dead letter was the last record, comes again, and middleware shows the
// handler other bytes than the broker has.
func TestWatermarkPassesDeadLettersUnderMiddleware(t *testing.T) {
	modes(t, func(t *testing.T, o RunOptions) {
		o.MaxAttempts = 1
		src := newScripted()
		src.records(t, 0, 0)
		m := startMarked(t, src, memdedupe.NewDriver(nil), o, nil, func(string, int) error { return errBoom },
			around(func(ctx context.Context, h Handler, m *envelope.Message) error {
				plain := m.Clone()
				plain.Body = append(plain.Body, " in plain text"...)
				return h.Handle(ctx, plain)
			}))
		time.Sleep(time.Minute)
		m.stop()
		m.expectDead("t/0/0 failed 1")
		m.expect(append(ackedAt(0, 0), "close")...)
	})
}

// A group ends where places do not ascend: see handleGroup.
func TestWatermarkGroupsAscend(t *testing.T) {
	for _, c := range []struct {
		positions []string
		run       int
	}{
		{[]string{"t/0/5", "t/0/6", "t/0/3", "t/0/4"}, 2},
		{[]string{"t/0/5", "t/0/5"}, 1},
		{[]string{"t/0/5", "t/1/6"}, 1},
		{[]string{"t/0/5", "u/0/6"}, 1},
		{[]string{"t/0/5", "STREAM/6"}, 1},
	} {
		h := WrapWatermark("c", memdedupe.NewStore(nil), func(context.Context, *memdedupe.Tx, *envelope.Message) error { return nil }, nil)
		var ms []*member
		for _, p := range c.positions {
			ms = append(ms, &member{raw: &envelope.Message{Position: p}, ctx: t.Context()})
		}
		for i, err := range h.(groupHandler).handleGroup(t.Context(), ms) {
			if i < c.run && err != nil || i >= c.run && !errors.Is(err, ErrNotRun) {
				t.Errorf("%q: answer %d is %v, the first %d are to be run", c.positions, i, err, c.run)
			}
		}
	}
}

// A message that is with the dead letters already is not put there again because
// the store is out of reach when the position is to pass it.
func TestWatermarkPassesOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src, d := newScripted(), memdedupe.NewDriver(&memdedupe.Options{Wait: time.Millisecond})
		src.records(t, 0)
		var held *memdedupe.Tx
		letters := 0
		o := RunOptions{MaxAttempts: 1, DeadLetter: func(ctx context.Context, _ *Failure) (err error) {
			letters++ // and somebody else holds the position from now on, for a while
			held, _, err = d.BeginAt(ctx, dedupe.Partition{Consumer: "c", Topic: "t"})
			return err
		}}
		m := startMarked(t, src, d, o, nil, func(string, int) error { return errBoom })
		time.Sleep(time.Minute)
		synctest.Wait()
		m.expect()
		if err := d.Rollback(t.Context(), held); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Minute)
		m.stop()
		if letters != 1 {
			t.Errorf("%d dead letters, want 1", letters)
		}
		m.expect(append(ackedAt(0), "close")...)
	})
}

// The topic was made anew: consumption pauses, nothing is lost, and a person has
// it go on.
func TestWatermarkReplacedLogPauses(t *testing.T) {
	modes(t, func(t *testing.T, o RunOptions) {
		src, d := newScripted(), memdedupe.NewDriver(nil)
		c := &Control{}
		o.Control, o.MaxAttempts = c, 1
		src.records(t, 0, 1, 2)
		m := startMarked(t, src, d, o, nil, nil)
		time.Sleep(time.Minute)
		if err := c.Health().Ready(); err != nil {
			t.Errorf("before: %v", err)
		}
		src.record(t, 0, "new 0", 1000)
		src.record(t, 1, "new 1", 1001)
		time.Sleep(time.Hour)
		err := c.Health().Ready()
		if !errors.Is(err, dedupe.ErrLogReplaced) || Classify(err) != ClassUnavailable {
			t.Errorf("the health is %v, want ErrLogReplaced", err)
		}
		for _, hint := range []string{"partition 0 of topic t", "offset 0", "offset 3", "2023-11-14T22:30:00Z", "2023-11-14T22:13:22Z", "reset the position"} {
			if !strings.Contains(fmt.Sprint(err), hint) {
				t.Errorf("the error %q does not say %q", err, hint)
			}
		}
		m.expect(ackedAt(0, 1, 2)...)
		admin := d.Admin().(dedupe.PositionAdmin)
		if err := admin.ResetPosition(t.Context(), dedupe.Partition{Consumer: "c", Topic: "t"}, 0); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if err := c.Health().Ready(); err != nil {
			t.Errorf("after the reset: %v", err)
		}
		m.stop()
		m.wantEffects(0, 1, 2, 0, 1)
		m.expectDead()
	})
}

// The log was cut off, and what was written instead is dated no later.
func TestWatermarkComparesTheLastRecord(t *testing.T) {
	for name, change := range map[string]func(m *envelope.Message){
		"body": func(m *envelope.Message) { m.Body = []byte("other") },
		"key":  func(m *envelope.Message) { m.Key = []byte("other") },
		"time": func(m *envelope.Message) { m.Time = m.Time.Add(-time.Second) },
	} {
		t.Run(name, func(t *testing.T) {
			h := WrapWatermark("c", memdedupe.NewStore(nil), func(context.Context, *memdedupe.Tx, *envelope.Message) error { return nil }, nil)
			m := &envelope.Message{Position: "t/0/7", Body: []byte("body"), Time: time.Unix(1_700_000_000, 0)}
			for range 2 {
				if err := h.Handle(t.Context(), m.Clone()); err != nil {
					t.Fatal(err)
				}
			}
			other := m.Clone()
			change(other)
			if err := h.Handle(t.Context(), other); !errors.Is(err, dedupe.ErrLogReplaced) {
				t.Errorf("another record at the last offset: %v, want ErrLogReplaced", err)
			}
		})
	}
}

var withKeys = &Options{Extractor: envelope.CloudEvents()}

func TestWatermarkWithKeys(t *testing.T) {
	modes(t, func(t *testing.T, o RunOptions) {
		src, d := newScripted(), memdedupe.NewDriver(nil)
		src.record(t, 0, "a", 0)
		src.record(t, 1, "b", 1)
		src.record(t, 2, "a", 2) // the producer has sent it twice
		bad := &envelope.Message{Position: "t/0/3", Topic: "t", Body: []byte("no event"), Time: time.Unix(1_700_009_999, 0)}
		badAgain := func() {
			src.feed <- &brokers.Delivery{Message: bad.Clone(), Lane: "t/0", Stopping: make(chan struct{}), Lost: make(chan struct{})}
		}
		badAgain()
		src.record(t, 4, "c", 4)
		src.record(t, 5, "b", 5)
		m := startMarked(t, src, d, o, withKeys, nil)
		time.Sleep(time.Minute)
		badAgain()
		src.record(t, 4, "c", 4)
		src.record(t, 6, "d", 6)
		time.Sleep(time.Minute)
		m.stop()
		m.wantEffects(0, 1, 4, 6)
		m.expectDead("t/0/3 missing_id 0")
		m.expect(append(ackedAt(0, 1, 2, 3, 4, 5, 3, 4, 6), "close")...)
	})
}

func TestPlaceOf(t *testing.T) {
	for _, good := range []struct {
		position, topic string
		partition       int
		offset          int64
	}{
		{"orders/0/0", "orders", 0, 0},
		{"a.b-c_d/12/9223372036854775807", "a.b-c_d", 12, math.MaxInt64},
		{"t/2147483647/1", "t", math.MaxInt32, 1},
	} {
		topic, partition, offset, err := placeOf(good.position)
		if err != nil || topic != good.topic || partition != good.partition || offset != good.offset {
			t.Errorf("%q: %q, %d, %d, %v", good.position, topic, partition, offset, err)
		}
	}
	for _, bad := range []string{"", "STREAM/12", "/0/1", "t/0", "t/0/", "t//1", "t/-1/1", "t/0/-1", "t/+1/1", "t/01/1", "t/0/01", "t/0/1/2", "a/b/0/1",
		"t/0x1/1", "t/2147483648/1", "t/0/9223372036854775808", "t/ 0/1", "t/0/1 ", "t/1_0/1"} {
		if _, _, _, err := placeOf(bad); Classify(err) != ClassUnavailable || !errors.Is(err, errNoPlace) {
			t.Errorf("%q: %v; want that consumption pauses", bad, err)
		}
	}
}

// What has no order is refused before anything is handled, and nothing is
// dead-lettered.
func TestWatermarkNeedsOrder(t *testing.T) {
	h := WrapWatermark("c", memdedupe.NewStore(nil), func(context.Context, *memdedupe.Tx, *envelope.Message) error {
		t.Error("the handler ran")
		return nil
	}, nil)
	routed := Chain(Route(map[string]Handler{"t": Chain(h)}, nil))
	for _, h := range []Handler{h, Chain(h), routed} {
		for name, c := range map[string]struct {
			src brokers.Source
			o   RunOptions
		}{
			"the broker redelivers single messages": {nacking{newScripted()}, RunOptions{}},
			"order by key":                          {newScripted(), RunOptions{Order: OrderByKey}},
			"no order":                              {newScripted(), RunOptions{Order: Unordered}},
		} {
			c.o.DeadLetter = Discard
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if err := Run(ctx, c.src, h, &c.o); err == nil || !strings.Contains(err.Error(), "WrapWatermark") {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	bubble(t, func(t *testing.T) {
		for _, o := range []RunOptions{{}, {Batch: Batch{Max: 4}}} {
			src := newScripted()
			src.deliver("", "t/0/0")
			b := startHandler(t, src, &o, h)
			if err := <-b.done; !errors.Is(err, errNoPlace) {
				t.Errorf("no lane: %v, want an error of Run", err)
			}
			b.expect("return t/0/0", "close")
			src = newScripted()
			src.deliver("l", "STREAM/7")
			b = startHandler(t, src, &o, h)
			time.Sleep(time.Hour)
			b.stop()
			b.expect("return STREAM/7", "close")
			b.expectDead()
		}
	})
}

func TestWatermarkPanics(t *testing.T) {
	st := memdedupe.NewStore(nil)
	h := func(context.Context, *memdedupe.Tx, *envelope.Message) error { return nil }
	hs := func(context.Context, *memdedupe.Tx, []*envelope.Message) error { return nil }
	for name, f := range map[string]func(){
		"name":        func() { WrapWatermark("", st, h, nil) },
		"store":       func() { WrapWatermark[*memdedupe.Tx]("c", nil, h, nil) },
		"handler":     func() { WrapWatermark[*memdedupe.Tx]("c", st, nil, nil) },
		"handlers":    func() { WrapWatermarkBatch[*memdedupe.Tx]("c", st, nil, nil) },
		"no Placer":   func() { WrapWatermark("c", dedupe.Guard(st, dedupe.GuardOptions{}), h, nil) },
		"shadow":      func() { WrapWatermark("c", st, h, &Options{Shadow: true}) },
		"batch store": func() { WrapWatermarkBatch("c", dedupe.Guard(st, dedupe.GuardOptions{}), hs, nil) },
	} {
		func() {
			defer func() {
				if v := recover(); v == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f()
		}()
	}
}

func TestWatermarkWindow(t *testing.T) {
	h := func(context.Context, *memdedupe.Tx, *envelope.Message) error { return nil }
	if _, keeps := windowOf(WrapWatermark("c", memdedupe.NewStore(nil), h, nil)).window(); keeps != brokers.Forever {
		t.Errorf("positions are kept for %v", keeps)
	}
	if _, keeps := windowOf(WrapWatermark("c", memdedupe.NewStore(nil), h, withKeys)).window(); keeps != dedupe.DefaultRetain {
		t.Errorf("keys are kept for %v", keeps)
	}
}

// WrapWatermarkBatch gets what is new of a group, once, and alone when it fails.
func TestWatermarkBatch(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		src.records(t, 0, 1, 2, 3, 4, 5)
		var groups [][]string
		poison := true
		h := WrapWatermarkBatch("c", memdedupe.NewStore(nil), func(_ context.Context, tx *memdedupe.Tx, ms []*envelope.Message) error {
			var got []string
			for _, m := range ms {
				got = append(got, m.Position)
			}
			if poison && slices.Contains(got, "t/0/4") {
				return Permanent(errBoom)
			}
			return tx.OnCommit(func() { groups = append(groups, got) })
		}, nil)
		b := startHandler(t, src, &RunOptions{Batch: Batch{Max: 6, Wait: time.Second}}, h)
		time.Sleep(time.Minute)
		synctest.Wait()
		poison = false
		src.records(t, 3, 4, 5, 6)
		time.Sleep(time.Minute)
		b.stop()
		b.expectDead("t/0/4 permanent 1")
		b.expect(append(ackedAt(0, 1, 2, 3, 4, 5, 3, 4, 5, 6), "close")...)
		if want := [][]string{positions(0, 1, 2), positions(3), positions(5), positions(6)}; !slices.EqualFunc(groups, want, slices.Equal) {
			t.Errorf("the groups are %q, want %q", groups, want)
		}
	})
}

// The whole on a broker that rebalances and loses acknowledgements: each record
// has its effect once, in the order of its partition.
func TestWatermarkOnABrokerWithFaults(t *testing.T) {
	modes(t, func(t *testing.T, o RunOptions) {
		const records, partitions = 200, 3
		b := membroker.New()
		b.CreateTopic("t", partitions)
		n := 0
		b.SetFaults(membroker.Faults{DropAck: func(*brokers.Delivery) bool { n++; return n%7 == 0 }})
		var mu sync.Mutex
		effects := map[string][]string{}
		runs := 0
		h := WrapWatermark("c", memdedupe.NewStore(nil), func(ctx context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
			topic, partition, _, err := placeOf(m.Position)
			if err != nil {
				return err
			}
			select {
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
				return ctx.Err()
			}
			mu.Lock()
			runs++
			fail := runs%11 == 0
			mu.Unlock()
			if fail {
				return errBoom
			}
			return tx.OnCommit(func() {
				mu.Lock()
				defer mu.Unlock()
				lane := fmt.Sprint(topic, partition)
				effects[lane] = append(effects[lane], m.Position)
			})
		}, nil)
		var ms []*envelope.Message
		for i := range records {
			ms = append(ms, &envelope.Message{ID: fmt.Sprint(i), Source: "/s", Type: "t", Topic: "t", Key: fmt.Append(nil, i%20), Body: []byte("b")})
		}
		if err := b.Publisher().Publish(t.Context(), ms).Err(); err != nil {
			t.Fatal(err)
		}
		o.DeadLetter = func(_ context.Context, f *Failure) error {
			t.Errorf("a dead letter: %v", f.Err)
			return nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				if err := Run(ctx, b.Source("t", "g"), h, &o); err != nil {
					t.Error(err)
				}
			})
		}
		for range 20 {
			time.Sleep(30 * time.Millisecond)
			b.Rebalance("t", "g")
		}
		b.SetFaults(membroker.Faults{})
		time.Sleep(10 * time.Minute)
		b.Rebalance("t", "g") // what was handled and not acknowledged comes again
		time.Sleep(10 * time.Minute)
		cancel()
		wg.Wait()
		total := 0
		for lane, got := range effects {
			total += len(got)
			for i, at := range got {
				if _, _, offset, _ := placeOf(at); offset != int64(i) {
					t.Errorf("%s: the effect %d is that of %s", lane, i, at)
				}
			}
		}
		if total != records {
			t.Errorf("%d effects, want %d", total, records)
		}
		synctest.Wait()
	})
}
