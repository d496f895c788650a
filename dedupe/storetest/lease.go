package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
)

// LeaseHarness is what the suite needs of a lease driver.
type LeaseHarness interface {
	// Driver returns the driver, on a store that holds no keys.
	Driver() dedupe.LeaseDriver
	// Admin returns a view of the same store for people.
	Admin() dedupe.Admin
}

// Forgetter is a harness whose store can lose its memory.
type Forgetter interface {
	// Forget makes the store forget everything.
	Forget(tb testing.TB)
}

// LeaseCase is one case of the suite of lease drivers.
type LeaseCase struct {
	Name string
	Func func(tb testing.TB, h LeaseHarness)
}

// RunLease runs the suite of lease drivers, every case on a store of its own.
func RunLease(t *testing.T, open func(tb testing.TB) LeaseHarness) {
	for _, c := range LeaseCases() {
		t.Run(c.Name, func(t *testing.T) { c.Func(t, open(t)) })
	}
}

// LeaseCases returns the cases of the suite of lease drivers.
func LeaseCases() []LeaseCase {
	return append([]LeaseCase{
		{"a new key is granted, a done one is not", leaseOnce},
		{"a reply comes back byte for byte", leaseReply},
		{"a held key is in progress", leaseHeld},
		{"B30 a claim whose answer was lost is found again", leaseAgain},
		{"B27 a lease that ran out is granted anew, as unknown", leaseExpired},
		{"a released key is granted at once", leaseReleased},
		{"L2 tokens rise", leaseTokens},
		{"L2 tokens rise although the store forgot them", leaseForget},
		{"L4 a stale owner can do nothing", leaseStale},
		{"late but unstolen is in time", leaseLate},
		{"an extended lease lasts", leaseExtended},
		{"completing twice is once", leaseCompleteTwice},
		{"a conflict is recorded once", leaseConflict},
		{"consumers, tenants and sources are apart", leaseScopes},
		{"a done key is kept for as long as it was asked", leaseRetain},
		{"one of many claims is granted", leaseRace},
		{"B28 a slow handler keeps its lease", leaseSlowHandler},
		{"B28 a handler whose lease is taken is cancelled and not done", leaseTaken},
		{"a failed handler runs again, with the same derived key", leaseFails},
		{"a panic gives the key up", leasePanics},
		{"a resolver decides about the unknown", leaseResolver},
		{"a lease that makes no sense is refused", leaseInvalid},
	}, leaseStateCases()...)
}

const (
	longLease  = time.Minute
	shortLease = 80 * time.Millisecond
)

func leaseClaim(id string) dedupe.Claim {
	k := dedupe.Key{Consumer: "c", Source: "/s", ID: id}
	return dedupe.Claim{Key: k, Fingerprint: dedupe.Fingerprint(k, []byte("content")), Retain: time.Hour}
}

func granted(tb testing.TB, d dedupe.LeaseDriver, c dedupe.Claim, owner string, lease time.Duration) dedupe.Grant {
	tb.Helper()
	g, r, err := d.Acquire(tb.Context(), c, owner, lease)
	if err != nil || r != nil {
		tb.Fatalf("acquire for %s: record %v, error %v, want a grant", owner, r, err)
	}
	return g
}

func completed(tb testing.TB, d dedupe.LeaseDriver, c dedupe.Claim, owner string, g dedupe.Grant, reply []byte) {
	tb.Helper()
	if err := d.Complete(tb.Context(), c, owner, g.Token, reply); err != nil {
		tb.Fatalf("complete by %s: %v", owner, err)
	}
}

// takeOver waits until a lease has run out and takes the key.
func takeOver(tb testing.TB, d dedupe.LeaseDriver, c dedupe.Claim, owner string) dedupe.Grant {
	tb.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; {
		g, r, err := d.Acquire(tb.Context(), c, owner, longLease)
		switch {
		case err == nil && r == nil:
			return g
		case !errors.Is(err, dedupe.ErrInProgress) || time.Now().After(deadline):
			tb.Fatalf("take over: record %v, error %v", r, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func leaseOnce(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	g := granted(tb, d, c, "a", longLease)
	if g.Attempt != 1 || g.Unknown || g.Token <= 0 {
		tb.Errorf("first grant: %+v", g)
	}
	completed(tb, d, c, "a", g, nil)
	_, r, err := d.Acquire(tb.Context(), c, "b", longLease)
	if err != nil || r == nil || r.Fingerprint != c.Fingerprint || r.Reply != nil || r.DoneAt.IsZero() {
		tb.Errorf("acquire of a done key: %+v, %v", r, err)
	}
}

func leaseReply(tb testing.TB, h LeaseHarness) {
	d := h.Driver()
	for i, reply := range [][]byte{nil, {}, {0, 0xff, '\r', '\n'}, bytes.Repeat([]byte("x"), 64<<10)} {
		c := leaseClaim(fmt.Sprint(i))
		completed(tb, d, c, "a", granted(tb, d, c, "a", longLease), reply)
		_, r, err := d.Acquire(tb.Context(), c, "b", longLease)
		if err != nil || r == nil || !bytes.Equal(r.Reply, reply) || (r.Reply == nil) != (reply == nil) {
			tb.Errorf("reply %d: %v", i, err)
		}
	}
}

func leaseHeld(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	granted(tb, d, c, "a", longLease)
	var held *dedupe.HeldError
	_, _, err := d.Acquire(tb.Context(), c, "b", longLease)
	if !errors.Is(err, dedupe.ErrInProgress) || !errors.As(err, &held) || held.Left <= longLease-time.Minute || held.Left > longLease {
		tb.Errorf("acquire of a held key: %v, want ErrInProgress that knows how much of %v is left", err, longLease)
	}
}

func leaseAgain(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	first := granted(tb, d, c, "a", longLease)
	if again := granted(tb, d, c, "a", longLease); again != first {
		tb.Errorf("the same claim again: %+v, it was granted %+v", again, first)
	}
}

func leaseExpired(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	first := granted(tb, d, c, "a", shortLease)
	if _, _, err := d.Acquire(tb.Context(), c, "b", longLease); !errors.Is(err, dedupe.ErrInProgress) {
		tb.Errorf("acquire before the lease has run out: %v", err)
	}
	if g := takeOver(tb, d, c, "b"); !g.Unknown || g.Attempt != 2 || g.Token <= first.Token {
		tb.Errorf("granted after %+v ran out: %+v", first, g)
	}
}

func leaseReleased(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	for i, to := range []dedupe.State{dedupe.StateFree, dedupe.StateUnknown} {
		owner := fmt.Sprint("a", i)
		g := granted(tb, d, c, owner, longLease)
		if err := d.Release(tb.Context(), c.Key, owner, g.Token, to); err != nil {
			tb.Fatal(err)
		}
		next := granted(tb, d, c, "b"+owner, longLease)
		if next.Unknown != (to == dedupe.StateUnknown) || next.Attempt != g.Attempt+1 || next.Token <= g.Token {
			tb.Errorf("released as %v after %+v, granted %+v", to, g, next)
		}
		if err := d.Release(tb.Context(), c.Key, "b"+owner, next.Token, dedupe.StateFree); err != nil {
			tb.Fatal(err)
		}
	}
}

func leaseTokens(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	var last int64
	for i := range 20 {
		owner := fmt.Sprint(i)
		g := granted(tb, d, c, owner, longLease)
		if g.Token <= last {
			tb.Fatalf("token %d after %d", g.Token, last)
		}
		last = g.Token
		if err := d.Release(tb.Context(), c.Key, owner, g.Token, dedupe.StateFree); err != nil {
			tb.Fatal(err)
		}
	}
}

func leaseForget(tb testing.TB, h LeaseHarness) {
	f, ok := h.(Forgetter)
	if !ok {
		tb.Skip("n/a: the store forgets nothing")
	}
	d, c := h.Driver(), leaseClaim("1")
	old := granted(tb, d, c, "a", longLease)
	f.Forget(tb)
	next := granted(tb, d, c, "b", longLease)
	if next.Token <= old.Token {
		tb.Errorf("token %d after %d", next.Token, old.Token)
	}
	for what, err := range stale(tb, d, c, "a", old) {
		if !errors.Is(err, dedupe.ErrLeaseLost) {
			tb.Errorf("%s by the forgotten owner: %v, want ErrLeaseLost", what, err)
		}
	}
}

// stale tries everything as an owner that has none of it any more.
func stale(tb testing.TB, d dedupe.LeaseDriver, c dedupe.Claim, owner string, g dedupe.Grant) map[string]error {
	return map[string]error{
		"extend":   d.Extend(tb.Context(), c.Key, owner, g.Token, longLease),
		"complete": d.Complete(tb.Context(), c, owner, g.Token, []byte("stale")),
		"release":  d.Release(tb.Context(), c.Key, owner, g.Token, dedupe.StateFree),
	}
}

func leaseStale(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	old := granted(tb, d, c, "a", shortLease)
	next := takeOver(tb, d, c, "b")
	for _, state := range []string{"held by another", "done by another"} {
		for what, err := range stale(tb, d, c, "a", old) {
			if !errors.Is(err, dedupe.ErrLeaseLost) {
				tb.Errorf("%s of a key that is %s: %v, want ErrLeaseLost", what, state, err)
			}
		}
		if err := d.Extend(tb.Context(), c.Key, "b", old.Token, longLease); !errors.Is(err, dedupe.ErrLeaseLost) {
			tb.Errorf("extend with an old token: %v, want ErrLeaseLost", err)
		}
		if state == "held by another" {
			completed(tb, d, c, "b", next, []byte("fresh"))
		}
	}
	if _, r, err := d.Acquire(tb.Context(), c, "z", longLease); err != nil || r == nil || string(r.Reply) != "fresh" {
		tb.Errorf("the result of the owner is %+v, %v", r, err)
	}
}

func leaseLate(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	g := granted(tb, d, c, "a", time.Millisecond)
	other := leaseClaim("other") // by the store's clock, the lease of a is over when this one is
	granted(tb, d, other, "a", 20*time.Millisecond)
	takeOver(tb, d, other, "b")
	if err := d.Extend(tb.Context(), c.Key, "a", g.Token, longLease); err != nil {
		tb.Errorf("extend late: %v", err)
	}
	completed(tb, d, c, "a", g, nil)
}

func leaseExtended(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	g := granted(tb, d, c, "a", shortLease)
	if err := d.Extend(tb.Context(), c.Key, "a", g.Token, longLease); err != nil {
		tb.Fatal(err)
	}
	other := leaseClaim("other")
	granted(tb, d, other, "a", 2*shortLease)
	takeOver(tb, d, other, "b") // the first lease would be over by now
	if _, _, err := d.Acquire(tb.Context(), c, "b", longLease); !errors.Is(err, dedupe.ErrInProgress) {
		tb.Errorf("acquire of an extended lease: %v, want ErrInProgress", err)
	}
}

func leaseCompleteTwice(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	g := granted(tb, d, c, "a", longLease)
	completed(tb, d, c, "a", g, []byte("r"))
	completed(tb, d, c, "a", g, []byte("r"))
	completed(tb, d, c, "a", g, []byte("what a second run made of it"))
	if _, r, _ := d.Acquire(tb.Context(), c, "b", longLease); r == nil || string(r.Reply) != "r" {
		tb.Errorf("the result is %+v", r)
	}
}

func leaseConflict(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	st := dedupe.NewLeaseStore(d, nil)
	run := func(content string) dedupe.Outcome {
		c.Fingerprint = dedupe.Fingerprint(c.Key, []byte(content))
		res, err := st.Once(tb.Context(), c, func(context.Context, *dedupe.Lease) ([]byte, error) { return []byte(content), nil })
		if err != nil {
			tb.Fatal(err)
		}
		return res.Outcome
	}
	for i, content := range []string{"a", "b", "b", "a", "c"} {
		want := []dedupe.Outcome{dedupe.Processed, dedupe.Conflict, dedupe.Conflict, dedupe.Duplicate, dedupe.Conflict}[i]
		if got := run(content); got != want {
			tb.Errorf("claim %d: %v, want %v", i, got, want)
		}
	}
	if found, err := h.Admin().Conflicts(tb.Context(), c.Key.Stored()); err != nil || len(found) != 2 {
		tb.Errorf("%d conflicts recorded, %v; want one for each other content", len(found), err)
	}
}

func leaseScopes(tb testing.TB, h LeaseHarness) {
	d := h.Driver()
	for i, k := range []dedupe.Key{{Consumer: "c", ID: "1"}, {Consumer: "d", ID: "1"}, {Tenant: "t", Consumer: "c", ID: "1"}, {Consumer: "c", Source: "s", ID: "1"}, {Consumer: "c", ID: "{1}"}} {
		granted(tb, d, dedupe.Claim{Key: k, Retain: time.Hour}, fmt.Sprint(i), longLease)
	}
}

func leaseRetain(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	c.Retain = 100 * time.Millisecond
	completed(tb, d, c, "a", granted(tb, d, c, "a", longLease), nil)
	if _, r, err := d.Acquire(tb.Context(), c, "b", longLease); err != nil || r == nil {
		tb.Fatalf("within its time: %v, %v", r, err)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if p, ok := h.(Pruner); ok {
			p.Prune(tb)
		}
		g, r, err := d.Acquire(tb.Context(), c, "b", longLease)
		if err != nil || time.Now().After(deadline) {
			tb.Fatalf("after its time: %v, %v", r, err)
		}
		if r == nil {
			if g.Unknown {
				tb.Error("a key that was done is unknown when its time is over")
			}
			return
		}
	}
}

func leaseRace(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	var grants atomic.Int32
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			_, r, err := d.Acquire(tb.Context(), c, fmt.Sprint(i), longLease)
			switch {
			case err == nil && r == nil:
				grants.Add(1)
			case !errors.Is(err, dedupe.ErrInProgress):
				tb.Errorf("%v, %v", r, err)
			}
		})
	}
	wg.Wait()
	if grants.Load() != 1 {
		tb.Errorf("%d of 32 claims were granted", grants.Load())
	}
}

func leaseSlowHandler(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	lease := 2 * time.Second // long enough for a machine that is busy with other tests
	st := dedupe.NewLeaseStore(d, &dedupe.LeaseOptions{Lease: lease})
	res, err := st.Once(tb.Context(), c, func(ctx context.Context, l *dedupe.Lease) ([]byte, error) {
		for end := time.Now().Add(2 * lease); time.Now().Before(end); time.Sleep(lease / 10) {
			if _, _, err := d.Acquire(ctx, c, "thief", longLease); !errors.Is(err, dedupe.ErrInProgress) {
				tb.Errorf("acquire beside a handler that runs: %v", err)
				return nil, ctx.Err()
			}
		}
		return nil, ctx.Err()
	})
	if err != nil || res.Outcome != dedupe.Processed {
		tb.Errorf("%v, %v", res.Outcome, err)
	}
}

// stuck is a driver whose extensions do not arrive.
type stuck struct{ dedupe.LeaseDriver }

var errStuck = errors.New("no answer")

func (stuck) Extend(context.Context, dedupe.Key, string, int64, time.Duration) error { return errStuck }

func leaseTaken(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	lease := time.Second
	begin := time.Now()
	var cancelled time.Duration
	_, err := dedupe.NewLeaseStore(stuck{d}, &dedupe.LeaseOptions{Lease: lease}).Once(tb.Context(), c, func(ctx context.Context, l *dedupe.Lease) ([]byte, error) {
		<-ctx.Done()
		cancelled = time.Since(begin)
		if !errors.Is(context.Cause(ctx), dedupe.ErrLeaseLost) {
			tb.Errorf("the handler's context ended with %v", context.Cause(ctx))
		}
		return []byte("too late"), nil
	})
	if !errors.Is(err, dedupe.ErrLeaseLost) {
		tb.Errorf("Once: %v, want ErrLeaseLost", err)
	}
	if cancelled >= lease {
		tb.Errorf("cancelled after %v, the lease of %v may have been another's by then", cancelled, lease)
	}
	if g := takeOver(tb, d, c, "b"); !g.Unknown {
		tb.Error("the key of an owner that lost its lease is not unknown")
	}
}

func leaseFails(tb testing.TB, h LeaseHarness) {
	st, c := dedupe.NewLeaseStore(h.Driver(), nil), leaseClaim("1")
	var seen []dedupe.Lease
	var keys []string
	for i := range 3 {
		_, err := st.Once(tb.Context(), c, func(_ context.Context, l *dedupe.Lease) ([]byte, error) {
			seen, keys = append(seen, *l), append(keys, l.Derive("charge", 0))
			if i < 2 {
				return nil, errHandler
			}
			return nil, nil
		})
		if i < 2 && !errors.Is(err, errHandler) || i == 2 && err != nil {
			tb.Fatalf("run %d: %v", i, err)
		}
	}
	for i, l := range seen {
		if l.Attempt != i+1 || l.Unknown || keys[i] != keys[0] {
			tb.Errorf("run %d: %+v with key %s, want the same key at every attempt", i, l, keys[i])
		}
	}
}

func leasePanics(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	st := dedupe.NewLeaseStore(d, nil)
	func() {
		defer func() {
			if recover() == nil {
				tb.Error("the panic was swallowed")
			}
		}()
		_, _ = st.Once(tb.Context(), c, func(context.Context, *dedupe.Lease) ([]byte, error) { panic("boom") })
	}()
	if g := granted(tb, d, c, "b", longLease); !g.Unknown {
		tb.Error("what a handler did before it panicked is not known")
	}
}

func leaseResolver(tb testing.TB, h LeaseHarness) {
	d := h.Driver()
	for _, c := range []struct {
		name    string
		verdict dedupe.Verdict
		err     error
		runs    int
		want    dedupe.Outcome
	}{
		{"not done", dedupe.NotDone, nil, 1, dedupe.Processed},
		{"done", dedupe.Done, nil, 0, dedupe.Duplicate},
		{"later", dedupe.AskLater, nil, 0, 0},
		{"an error", dedupe.Done, errHandler, 0, 0},
	} {
		claim := leaseClaim(c.name)
		granted(tb, d, claim, "vanished", time.Millisecond)
		runs, asked := 0, 0
		st := dedupe.NewLeaseStore(d, &dedupe.LeaseOptions{Resolve: func(context.Context, *dedupe.Lease) (dedupe.Verdict, []byte, error) {
			asked++
			return c.verdict, []byte("resolved"), c.err
		}})
		var res dedupe.Result
		var err error
		for deadline := time.Now().Add(5 * time.Second); asked == 0 && time.Now().Before(deadline); {
			res, err = st.Once(tb.Context(), claim, func(context.Context, *dedupe.Lease) ([]byte, error) { runs++; return nil, nil })
		}
		if asked != 1 || runs != c.runs || res.Outcome != c.want || (c.want == 0) != errors.Is(err, dedupe.ErrInProgress) {
			tb.Errorf("%s: asked %d times, %d runs, %v, %v", c.name, asked, runs, res.Outcome, err)
		}
		if c.want == dedupe.Duplicate && string(res.Reply) != "resolved" {
			tb.Errorf("%s: reply %q", c.name, res.Reply)
		}
		if c.want == 0 { // and it is still unknown
			if g := granted(tb, d, claim, "next", longLease); !g.Unknown {
				tb.Errorf("%s: the next grant is %+v", c.name, g)
			}
		}
	}
}

func leaseInvalid(tb testing.TB, h LeaseHarness) {
	for _, lease := range []time.Duration{-1, time.Millisecond} {
		_, err := dedupe.NewLeaseStore(h.Driver(), &dedupe.LeaseOptions{Lease: lease}).Once(tb.Context(), leaseClaim("1"),
			func(context.Context, *dedupe.Lease) ([]byte, error) { tb.Error("the handler ran"); return nil, nil })
		if !errors.Is(err, dedupe.ErrInvalidClaim) {
			tb.Errorf("a lease of %v: %v, want ErrInvalidClaim", lease, err)
		}
	}
}
