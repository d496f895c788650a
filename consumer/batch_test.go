package consumer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// counting is memdedupe with a count of its transactions, and a commit that may
// be refused for what is in it.
type counting struct {
	*memdedupe.Driver
	mu     sync.Mutex
	sizes  []int // of transactions that were begun, in claims
	refuse func(c dedupe.Claim) error
}

func (d *counting) begun(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sizes = append(d.sizes, n)
}

func (d *counting) transactions() []int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.sizes)
}

func (d *counting) Begin(ctx context.Context, c dedupe.Claim) (*memdedupe.Tx, *dedupe.Record, error) {
	d.begun(1)
	return d.Driver.Begin(ctx, c)
}

func (d *counting) BeginBatch(ctx context.Context, cs []dedupe.Claim) (*memdedupe.Tx, []*dedupe.Record, error) {
	d.begun(len(cs))
	return d.Driver.BeginBatch(ctx, cs)
}

func (d *counting) Commit(ctx context.Context, tx *memdedupe.Tx, c dedupe.Claim, reply []byte) error {
	return d.CommitBatch(ctx, tx, []dedupe.Claim{c}, [][]byte{reply})
}

func (d *counting) CommitBatch(ctx context.Context, tx *memdedupe.Tx, cs []dedupe.Claim, replies [][]byte) error {
	for _, c := range cs {
		if d.refuse == nil {
			break
		}
		if err := d.refuse(c); err != nil {
			return errors.Join(err, d.Rollback(ctx, tx))
		}
	}
	return d.Driver.CommitBatch(ctx, tx, cs, replies)
}

// grouped is a run in groups under test.
type grouped struct {
	*bench
	d       *counting
	mu      sync.Mutex
	effects []string // that are committed, in order
	runs    map[string]int
	failing func(id string) error
}

// fail sets what handlers answer from now on.
func (g *grouped) fail(f func(id string) error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.failing = f
}

// startGroups runs h, whose effect is its event's id, in groups of up to max.
func startGroups(t *testing.T, src brokers.Source, o RunOptions, fail func(id string, run int) error, mw ...Middleware) *grouped {
	t.Helper()
	g := &grouped{d: &counting{Driver: memdedupe.NewDriver(nil)}, runs: map[string]int{}}
	h := Wrap("c", dedupe.NewTxStore(g.d, nil), func(_ context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
		g.mu.Lock()
		g.runs[m.ID]++
		run := g.runs[m.ID]
		g.mu.Unlock()
		if err := tx.OnCommit(func() { g.mu.Lock(); defer g.mu.Unlock(); g.effects = append(g.effects, m.ID) }); err != nil {
			return err
		}
		if fail != nil {
			return fail(m.ID, run)
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.failing != nil {
			return g.failing(m.ID)
		}
		return nil
	}, nil)
	if len(mw) > 0 {
		h = Chain(h, mw...)
	}
	g.bench = startHandler(t, src, &o, h)
	return g
}

func (g *grouped) wantEffects(ids ...string) {
	g.t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	if !slices.Equal(g.effects, ids) {
		g.t.Errorf("effects %q, want %q", g.effects, ids)
	}
}

func ids(n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprint(i))
	}
	return all
}

// feed queues n events in one lane before the run sees the first.
func feed(t *testing.T, src *scripted, lane string, n int) {
	for i := range n {
		src.event(t, lane, fmt.Sprint("p", i), fmt.Sprint(i))
	}
}

func acks(n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprint("ack p", i))
	}
	return all
}

// A group shares a transaction, keeps the order, and is acknowledged after it.
func TestGroupsShareATransaction(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		feed(t, src, "l", 20)
		g := startGroups(t, src, RunOptions{Batch: Batch{Max: 8, Wait: time.Second}}, nil)
		time.Sleep(time.Minute)
		synctest.Wait()
		g.wantEffects(ids(20)...)
		g.expect(acks(20)...)
		if sizes := g.d.transactions(); !slices.Equal(sizes, []int{8, 8, 4}) {
			t.Errorf("transactions of %v claims, want 8, 8 and 4", sizes)
		}
		g.stop()
	})
}

// A handler that fails is found by its number, whatever its place: what was
// before it is committed without it, what is behind it waits for it.
func TestGroupIsolatesTheHandlerThatFails(t *testing.T) {
	for _, culprit := range []int{0, 1, 7, 14, 15} {
		bubble(t, func(t *testing.T) {
			src := newScripted()
			feed(t, src, "l", 16)
			poison := fmt.Sprint(culprit)
			g := startGroups(t, src, RunOptions{Batch: Batch{Max: 16, Wait: time.Second}, MaxAttempts: 3}, func(id string, _ int) error {
				if id == poison {
					return errBoom
				}
				return nil
			})
			time.Sleep(time.Hour)
			synctest.Wait()
			g.wantEffects(slices.DeleteFunc(ids(16), func(id string) bool { return id == poison })...)
			g.expect(acks(16)...)
			g.expectDead(fmt.Sprintf("p%d failed 3", culprit))
			sizes := g.d.transactions()
			if single := sizes[1:]; len(single) > 5 || sizes[0] != 16 { // its prefix, its two further attempts, what is behind it
				t.Errorf("culprit %d: transactions of %v claims", culprit, sizes)
			}
			g.stop()
		})
	}
}

// What fails at the commit tells nobody whose fault it is. It is found by halves,
// in at most ⌈log₂ n⌉ + 1 more transactions.
func TestGroupIsolatesByHalves(t *testing.T) {
	for _, n := range []int{2, 3, 8, 16, 31, 32} {
		for culprit := range n {
			d := &counting{Driver: memdedupe.NewDriver(nil), refuse: func(c dedupe.Claim) error {
				if c.Key.ID == fmt.Sprint(culprit) {
					return errBoom
				}
				return nil
			}}
			h := Wrap("c", dedupe.NewTxStore(d, nil), func(context.Context, *memdedupe.Tx, *envelope.Message) error { return nil }, nil).(groupHandler)
			var ms []*member
			for i := range n {
				ms = append(ms, &member{ctx: t.Context(), raw: raw(t, fmt.Sprint(i), "body")})
			}
			errs := h.handleGroup(t.Context(), ms)
			for i, err := range errs {
				switch {
				case i < culprit && err != nil, i == culprit && !errors.Is(err, errBoom), i > culprit && !errors.Is(err, ErrNotRun):
					t.Fatalf("%d of %d: answer %d is %v", culprit, n, i, err)
				}
			}
			log := 0
			for 1<<log < n {
				log++
			}
			if further := len(d.transactions()) - 1; further > log+1 {
				t.Errorf("%d of %d: %d further transactions, %v, want at most %d", culprit, n, further, d.transactions(), log+1)
			}
		}
	}
}

// A malformed message and a conflict in a group are their own, and a duplicate
// in it is one effect, acknowledged with its twin.
func TestGroupWithEverythingInIt(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		src.event(t, "l", "p0", "a")
		src.event(t, "l", "p1", "b")
		src.event(t, "l", "p2", "a")
		src.deliver("l", "p3") // no envelope
		d := src.event(t, "l", "p4", "a")
		d.Message.Body = []byte("other content")
		src.event(t, "l", "p5", "c")
		g := startGroups(t, src, RunOptions{Batch: Batch{Max: 10, Wait: time.Second}}, nil)
		time.Sleep(time.Minute)
		synctest.Wait()
		g.wantEffects("a", "b", "c")
		g.expect(acks(6)...)
		if len(g.dead) != 1 || !strings.HasPrefix(g.dead[0], "p3 missing_id") {
			t.Errorf("dead letters %q", g.dead)
		}
		if n := len(g.d.Conflicts()); n != 1 {
			t.Errorf("%d conflicts, want 1", n)
		}
		g.stop()
	})
}

// Panics, and handlers that end their goroutine, end neither the lane nor what
// shares a transaction with them.
func TestGroupSurvivesPanics(t *testing.T) {
	for name, leave := range map[string]func(){"panic": func() { panic("boom") }, "Goexit": runtime.Goexit} {
		bubble(t, func(t *testing.T) {
			src := newScripted()
			feed(t, src, "l", 6)
			g := startGroups(t, src, RunOptions{Batch: Batch{Max: 6, Wait: time.Second}, MaxAttempts: 5}, func(id string, run int) error {
				if id == "3" && run <= 2 {
					leave()
				}
				return nil
			})
			time.Sleep(time.Hour)
			synctest.Wait()
			g.mu.Lock()
			effects := len(g.effects)
			g.mu.Unlock()
			if name == "panic" && effects != 6 {
				t.Errorf("%s: %d effects, want 6", name, effects)
			}
			for _, note := range src.notes() {
				if name == "Goexit" && strings.HasPrefix(note, "ack") {
					t.Errorf("%s: %s although its transaction never ended", name, note)
				}
			}
			g.stop()
		})
	}
}

// An outage in the middle holds the group up as a whole, and spends nothing.
func TestGroupWaitsOutAnOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		feed(t, src, "l", 8)
		var mu sync.Mutex
		down := true
		g := startGroups(t, src, RunOptions{Batch: Batch{Max: 8, Wait: time.Second}, MaxAttempts: 2}, func(id string, _ int) error {
			mu.Lock()
			defer mu.Unlock()
			if down && id == "4" {
				return Unavailable(errBoom)
			}
			return nil
		})
		time.Sleep(time.Hour)
		mu.Lock()
		down = false
		mu.Unlock()
		time.Sleep(time.Hour)
		synctest.Wait()
		g.wantEffects(ids(8)...)
		g.expect(acks(8)...)
		g.expectDead()
		g.stop()
	})
}

// Without an order to keep, groups are made all the same, and a broker that can
// wait gets back what failed.
func TestGroupsWithoutLanes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		src := newScripted()
		feed(t, src, "", 40)
		g := startGroups(t, nacking{src}, RunOptions{Batch: Batch{Max: 10, Wait: time.Second}, Concurrency: 4, MaxAttempts: 3}, func(id string, run int) error {
			if id == "7" && run < 3 {
				return errBoom
			}
			return nil
		})
		time.Sleep(time.Hour)
		synctest.Wait()
		g.mu.Lock()
		effects := slices.Clone(g.effects)
		g.mu.Unlock()
		slices.Sort(effects)
		if want := ids(40); !slices.Equal(effects, slices.Sorted(slices.Values(want))) {
			t.Errorf("effects %q", effects)
		}
		if n := len(g.d.transactions()); n > 20 {
			t.Errorf("%d transactions for 40 events in groups of 10", n)
		}
		if !slices.Contains(src.notes(), "nack p7") {
			t.Errorf("what failed was not handed back to the broker: %v", src.notes())
		}
		g.expectDead()
		g.stop()
	})
}

// A history in groups and one by one has the same effects in the same order of
// each key, whatever fails in it.
func TestGroupsEqualOneByOne(t *testing.T) {
	for seed := range uint64(20) {
		var tables [2][]string
		for mode, size := range []int{1, 7} {
			bubble(t, func(t *testing.T) {
				rnd := rand.New(rand.NewPCG(seed, 0))
				src := newScripted()
				fails := map[string]int{} // how often a handler fails on an event
				for i := range 60 {
					id := fmt.Sprint(rnd.IntN(40))
					if rnd.IntN(6) == 0 {
						fails[id] = rnd.IntN(5)
					}
					d := src.event(t, "l", fmt.Sprint("p", i), id)
					if rnd.IntN(10) == 0 {
						d.Message.Body = []byte("other content")
					}
				}
				g := startGroups(t, src, RunOptions{Batch: Batch{Max: size, Wait: time.Second}, MaxAttempts: 100}, nil)
				left := map[string]int{}
				g.fail(func(id string) error {
					if left[id] < fails[id] {
						left[id]++
						return errBoom
					}
					return nil
				})
				time.Sleep(24 * time.Hour)
				synctest.Wait()
				g.mu.Lock()
				tables[mode] = slices.Clone(g.effects)
				g.mu.Unlock()
				if n := len(src.notes()); n != 60 {
					t.Errorf("seed %d, groups of %d: %d settled, want 60", seed, size, n)
				}
				g.stop()
			})
		}
		if !slices.Equal(tables[0], tables[1]) {
			t.Errorf("seed %d: one by one %v\nin groups %v", seed, tables[0], tables[1])
		}
	}
}

func TestBatchRefusesWhatCannot(t *testing.T) {
	h := Wrap("c", memdedupe.NewLeaseStore(nil), func(context.Context, *dedupe.Lease, *envelope.Message) error { return nil }, nil)
	for name, h := range map[string]Handler{
		"leases":                   h,
		"a function":               HandlerFunc(func(context.Context, *envelope.Message) error { return nil }),
		"leases behind middleware": Chain(h),
		"leases behind a route":    Route(map[string]Handler{"t": h}, nil),
	} {
		if err := Run(t.Context(), newScripted(), h, &RunOptions{DeadLetter: Discard, Batch: Batch{Max: 10}}); err == nil || !strings.Contains(err.Error(), "Batch.Max is 10") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A set-based handler gets what is new, in order and each once; what it fails on
// is isolated by halves; and its effects are those of one by one.
func TestWrapBatch(t *testing.T) {
	for _, poison := range []string{"", "0", "5", "15"} {
		bubble(t, func(t *testing.T) {
			src := newScripted()
			for i := range 20 {
				src.event(t, "l", fmt.Sprint("p", i), fmt.Sprint(i%16)) // the last four are copies
			}
			d := &counting{Driver: memdedupe.NewDriver(nil)}
			var mu sync.Mutex
			var effects []string
			var sizes []int
			h := WrapBatch("c", dedupe.NewTxStore(d, nil), func(_ context.Context, tx *memdedupe.Tx, ms []*envelope.Message) error {
				mu.Lock()
				sizes = append(sizes, len(ms))
				mu.Unlock()
				for _, m := range ms {
					if m.ID == poison {
						return errBoom
					}
				}
				return tx.OnCommit(func() {
					mu.Lock()
					defer mu.Unlock()
					for _, m := range ms {
						effects = append(effects, m.ID)
					}
				})
			}, nil)
			b := startHandler(t, src, &RunOptions{Batch: Batch{Max: 20, Wait: time.Second}, MaxAttempts: 2}, h)
			time.Sleep(time.Hour)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if want := slices.DeleteFunc(ids(16), func(id string) bool { return id == poison }); !slices.Equal(effects, want) {
				t.Errorf("poison %q: effects %q", poison, effects)
			}
			if sizes[0] != 16 || poison == "" && len(sizes) != 1 {
				t.Errorf("poison %q: the handler got %v events", poison, sizes)
			}
			b.expect(acks(20)...)
			if dead := len(b.dead); (poison == "") != (dead == 0) {
				t.Errorf("poison %q: %d dead letters", poison, dead)
			}
			b.stop()
		})
	}
	defer func() {
		if recover() == nil {
			t.Error("a store that cannot claim several keys is accepted")
		}
	}()
	WrapBatch("c", memdedupe.NewLeaseStore(nil), func(context.Context, *dedupe.Lease, []*envelope.Message) error { return nil }, nil)
}
