package dedupe_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/memharness"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/dedupe/storetest"
)

// plain is a store without powers.
type plain struct{ dedupe.Store[*memdedupe.Tx] }

func TestGuardKeepsThePower(t *testing.T) {
	st := memdedupe.NewStore(nil)
	for name, o := range map[string]dedupe.GuardOptions{"no limit": {}, "a rate": {NewPerSecond: 1}} {
		if _, ok := dedupe.Guard(st, o).(dedupe.Batcher[*memdedupe.Tx]); !ok {
			t.Errorf("%s: the guard of a Batcher is none", name)
		}
		if _, ok := dedupe.Guard[*memdedupe.Tx](plain{st}, o).(dedupe.Batcher[*memdedupe.Tx]); ok {
			t.Errorf("%s: the guard of a plain store is a Batcher", name)
		}
	}
}

// A guard that lets everything through is a store like any other.
func TestGuardConformance(t *testing.T) {
	for name, o := range map[string]dedupe.GuardOptions{"no limit": {}, "a rate": {NewPerSecond: 1e9}} {
		t.Run(name, func(t *testing.T) {
			storetest.Run(t, func(_ testing.TB, s storetest.Settings) storetest.Harness[*memdedupe.Tx] {
				return memharness.New(s, func(d memharness.TxDriver) dedupe.Store[*memdedupe.Tx] {
					return dedupe.Guard(dedupe.NewTxStore(d, nil), o)
				})
			})
		})
	}
}

// guarded is a store behind a guard, and what its handlers have done.
type guarded struct {
	t     *testing.T
	st    dedupe.Store[*memdedupe.Tx]
	runs  [][]string // of each run, the ids that were fresh
	fails func() error
}

func newGuarded(t *testing.T, o dedupe.GuardOptions) *guarded {
	return &guarded{t: t, st: dedupe.Guard(memdedupe.NewStore(nil), o), fails: func() error { return nil }}
}

// each claims "tenant/id" in a batch; the handler's replies are the ids.
func (g *guarded) each(names ...string) ([]dedupe.Answer, error) {
	claims := claimsOf(names...)
	return g.st.(dedupe.Batcher[*memdedupe.Tx]).OnceEach(g.t.Context(), claims, func(_ context.Context, _ *memdedupe.Tx, fresh []int) ([][]byte, error) {
		var run []string
		var replies [][]byte
		for _, i := range fresh {
			run, replies = append(run, names[i]), append(replies, []byte(names[i]))
		}
		g.runs = append(g.runs, run)
		return replies, g.fails()
	})
}

func claimsOf(names ...string) (claims []dedupe.Claim) {
	for _, name := range names {
		tenant, id, _ := strings.Cut(name, "/")
		claims = append(claims, dedupe.Claim{Key: dedupe.Key{Tenant: tenant, Consumer: "c", ID: id}})
	}
	return claims
}

// want claims a batch, and compares the answers: p, d, r are processed,
// duplicate, refused.
func (g *guarded) want(answers string, names ...string) {
	g.t.Helper()
	got, err := g.each(names...)
	if err != nil {
		g.t.Fatal(err)
	}
	var short strings.Builder
	for i, a := range got {
		switch {
		case errors.Is(a.Err, dedupe.ErrRateLimited) && a.Outcome == 0 && a.Reply == nil:
			short.WriteByte('r')
		case a.Err != nil:
			g.t.Errorf("claim %d: %v", i, a.Err)
		default:
			short.WriteByte(a.Outcome.String()[0])
			if string(a.Reply) != names[i] {
				g.t.Errorf("claim %d has the reply %q, want %q", i, a.Reply, names[i])
			}
		}
	}
	if short.String() != answers {
		g.t.Errorf("%v: %s, want %s", names, short.String(), answers)
	}
}

// What is wrong with one claim is that claim's answer.
func TestGuardRefusesAloneInABatch(t *testing.T) {
	st := dedupe.Guard(memdedupe.NewStore(nil), dedupe.GuardOptions{MaxPart: 40, ASCII: true, MinEntropy: 64}).(dedupe.Batcher[*memdedupe.Tx])
	random := []string{"9b2f6a58-6c0e-4d0e-8f43-0d7a1c5be201", "5e0c9f0e-9a3c-4a5e-b0b1-6a1f4c2d7e93"}
	claims := claimsOf("t/"+strings.Repeat("ab3", 14), "t/"+random[0], "t/order-1", "t\u00e9/"+random[1], "t/"+random[1])
	claims = append(claims, dedupe.Claim{Key: dedupe.Key{Tenant: "t", Consumer: "c", ID: random[0]}, Retain: -1})
	answers, err := st.OnceEach(t.Context(), claims, func(_ context.Context, _ *memdedupe.Tx, fresh []int) ([][]byte, error) {
		if !slices.Equal(fresh, []int{1, 4}) {
			t.Errorf("fresh are %v, want 1 and 4 of the caller's claims", fresh)
		}
		return [][]byte{[]byte("first"), []byte("second")}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []error{dedupe.ErrInvalidKey, nil, dedupe.ErrWeakKey, dedupe.ErrInvalidKey, nil, dedupe.ErrInvalidClaim} {
		if a := answers[i]; !errors.Is(a.Err, want) || (a.Outcome == dedupe.Processed) != (want == nil) {
			t.Errorf("claim %d: %v, %v; want %v", i, a.Outcome, a.Err, want)
		}
	}
	if string(answers[1].Reply) != "first" || string(answers[4].Reply) != "second" {
		t.Errorf("the replies are %q and %q", answers[1].Reply, answers[4].Reply)
	}
	all, err := st.OnceEach(t.Context(), claims[:1], nil)
	if err != nil || !errors.Is(all[0].Err, dedupe.ErrInvalidKey) {
		t.Errorf("a batch with nothing but a refused claim: %v, %v", all, err)
	}
}

// New keys over the rate leave nothing, and the others are done, by one run of
// the handler; what is done already is free.
func TestGuardLimitsNewKeysOfABatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarded(t, dedupe.GuardOptions{NewPerSecond: 10, Burst: 3})
		g.want("pp", "a/1", "a/2") // one is left
		g.want("dpdrrpr", "a/1", "a/3", "a/2", "a/4", "a/5", "b/1", "a/4")
		g.want("ddd", "a/1", "a/2", "a/3")
		g.want("rr", "a/4", "a/4")
		want := [][]string{{"a/1", "a/2"}, {"a/3", "b/1"}}
		if fmt.Sprint(g.runs) != fmt.Sprint(want) {
			t.Errorf("the handler ran for %v, want %v", g.runs, want)
		}
		time.Sleep(200 * time.Millisecond) // of the bubble: two more
		g.want("ppr", "a/4", "a/5", "a/6")
		time.Sleep(time.Second) // the bucket is full, and no fuller
		g.want("pppr", "a/6", "a/7", "a/8", "a/9")
	})
}

// Behind a new key that is refused no other one of its tenant is let through,
// though a token may come in the meantime.
func TestGuardKeepsTheOrderOfATenant(t *testing.T) {
	g := newGuarded(t, dedupe.GuardOptions{NewPerSecond: 1e4, Burst: 1})
	var names []string
	for i := range 2000 {
		names = append(names, fmt.Sprint("a/", i))
	}
	answers, err := g.each(names...)
	if err != nil {
		t.Fatal(err)
	}
	first := slices.IndexFunc(answers, func(a dedupe.Answer) bool { return a.Err != nil })
	if first < 1 || slices.ContainsFunc(answers[first:], func(a dedupe.Answer) bool { return a.Err == nil }) {
		t.Errorf("the first refused is %d, and some behind it are done", first)
	}
}

// A batch that fails is tried again in parts: its keys pay once, when they are
// done. One whose outcome is unknown has paid.
func TestGuardChargesABatchThatFails(t *testing.T) {
	failure := errors.New("handler")
	for _, tc := range []struct {
		name  string
		fails error
		then  string
	}{
		{"handler error", failure, "ppr"},
		{"unknown outcome", dedupe.ErrUnknownOutcome, "rrr"},
	} {
		g := newGuarded(t, dedupe.GuardOptions{NewPerSecond: 1e-9, Burst: 2})
		g.fails = func() error { return tc.fails }
		for range 3 {
			if answers, err := g.each("a/1", "a/2"); !errors.Is(err, tc.fails) || answers != nil {
				t.Errorf("%s: %v, %v", tc.name, answers, err)
			}
			if tc.then == "rrr" {
				break
			}
		}
		g.fails = func() error { return nil }
		g.want(tc.then, "a/1", "a/2", "a/3")
	}
	g := newGuarded(t, dedupe.GuardOptions{NewPerSecond: 1e-9, Burst: 2})
	g.fails = func() error { panic(failure) }
	func() {
		defer func() { _ = recover() }()
		_, _ = g.each("a/1", "a/2")
	}()
	g.fails = func() error { return nil }
	g.want("ppr", "a/1", "a/2", "a/3")
}

// What a lost race runs again is counted once.
func TestGuardCountsABatchOnce(t *testing.T) {
	g := newGuarded(t, dedupe.GuardOptions{NewPerSecond: 1e-9, Burst: 2})
	g.fails = func() error {
		if len(g.runs) < 3 {
			return memdedupe.ErrConflict
		}
		return nil
	}
	g.want("ppr", "a/1", "a/2", "a/3")
	if len(g.runs) != 3 {
		t.Errorf("the handler ran %d times, want 3", len(g.runs))
	}
}

// between is a Batcher that lets somebody else in between two runs of a batch.
type between struct {
	dedupe.Store[*memdedupe.Tx]
	dedupe.Batcher[*memdedupe.Tx]
	calls int
	then  func(call int)
}

func (b *between) OnceEach(ctx context.Context, claims []dedupe.Claim, fn func(context.Context, *memdedupe.Tx, []int) ([][]byte, error)) ([]dedupe.Answer, error) {
	b.calls++
	b.then(b.calls)
	return b.Batcher.OnceEach(ctx, claims, fn)
}

// A key that another transaction has done between the two runs is a duplicate,
// and what was paid for it is given back.
func TestGuardGivesBackWhatWasDoneElsewhere(t *testing.T) {
	st := memdedupe.NewStore(nil)
	b := &between{Store: st, Batcher: st.(dedupe.Batcher[*memdedupe.Tx])}
	g := newGuarded(t, dedupe.GuardOptions{})
	g.st = dedupe.Guard[*memdedupe.Tx](b, dedupe.GuardOptions{NewPerSecond: 1e-9, Burst: 2})
	b.then = func(call int) {
		if call == 2 {
			if _, err := st.Once(t.Context(), claimsOf("a/1")[0], func(context.Context, *memdedupe.Tx) ([]byte, error) { return []byte("a/1"), nil }); err != nil {
				t.Error(err)
			}
		}
	}
	g.want("dprrr", "a/1", "a/2", "a/3", "a/3", "a/3")
	if b.calls != 2 {
		t.Errorf("the batch was claimed %d times, want twice", b.calls)
	}
	g.want("dpr", "a/1", "a/3", "a/4")
}
