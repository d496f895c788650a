package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
)

// leaseStateCases are those about the states between new and done, and about
// what people see of them.
func leaseStateCases() []LeaseCase {
	return []LeaseCase{
		{"B14 another content of a key that is not done is a conflict", leaseOtherContent},
		{"B14 another content after a failure without effect runs", leaseOtherContentAfterFailure},
		{"B14 a conflict names the fields that differ", leaseConflictFields},
		{"a vanished owner's key is parked by policy", leaseParks},
		{"a parked key waits for a person", leaseParked},
		{"a reply over the cap leaves the key unknown", leaseReplyTooLarge},
		{"admin explains every state", leaseExplained},
		{"admin releases what is unknown or parked, and nothing else", leaseAdminRelease},
		{"admin evicts", leaseAdminEvict},
		{"a holder's name is shown", leaseHolder},
		{"B27 lifetimes that make no sense are refused", leaseLifetimes},
	}
}

func withContent(c dedupe.Claim, content string) dedupe.Claim {
	c.Fingerprint = dedupe.Fingerprint(c.Key, []byte(content))
	return c
}

// vanish leaves a key whose owner has vanished.
func vanish(tb testing.TB, d dedupe.LeaseDriver, c dedupe.Claim, a dedupe.Admin) dedupe.Grant {
	tb.Helper()
	g := granted(tb, d, c, "vanished", time.Millisecond)
	inState(tb, a, c.Key, dedupe.StateUnknown)
	return g
}

// inState waits until a key is in a state.
func inState(tb testing.TB, a dedupe.Admin, k dedupe.Key, want dedupe.State) dedupe.Entry {
	tb.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		e, err := a.Find(tb.Context(), k.Stored())
		if err != nil {
			tb.Fatalf("Find: %v", err)
		}
		if e.State == want {
			return e
		}
		if time.Now().After(deadline) {
			tb.Fatalf("the key is %v, want %v", e.State, want)
		}
	}
}

// leaseOtherContent: until it is known what came of the first content, no other
// one runs.
func leaseOtherContent(tb testing.TB, h LeaseHarness) {
	d := h.Driver()
	for _, state := range []dedupe.State{dedupe.StateRunning, dedupe.StateUnknown, dedupe.StateParked} {
		c := leaseClaim(state.String())
		g := granted(tb, d, c, "a", longLease)
		if state != dedupe.StateRunning {
			if err := d.Release(tb.Context(), c.Key, "a", g.Token, state); err != nil {
				tb.Fatal(err)
			}
		}
		other := withContent(c, "other")
		_, r, err := d.Acquire(tb.Context(), other, "b", longLease)
		if err != nil || r == nil || r.Fingerprint != c.Fingerprint || r.Reply != nil {
			tb.Errorf("%v: another content is answered %+v, %v; want the record of the first", state, r, err)
		}
		res, err := dedupe.NewLeaseStore(d, nil).Once(tb.Context(), other, mustNot(tb))
		if err != nil || res.Outcome != dedupe.Conflict {
			tb.Errorf("%v: another content: %v, %v; want a conflict", state, res.Outcome, err)
		}
	}
	c := leaseClaim("vanished") // its lease has run out, and nobody has claimed it since
	vanish(tb, d, c, h.Admin())
	if _, r, err := d.Acquire(tb.Context(), withContent(c, "other"), "b", longLease); err != nil || r == nil {
		tb.Errorf("vanished: another content is answered %+v, %v; want the record of the first", r, err)
	}
	if g := granted(tb, d, c, "c", longLease); !g.Unknown || g.Attempt != 2 {
		tb.Errorf("vanished: the first content is then granted %+v", g)
	}
}

func mustNot(tb testing.TB) func(context.Context, *dedupe.Lease) ([]byte, error) {
	return func(context.Context, *dedupe.Lease) ([]byte, error) {
		tb.Error("the handler ran")
		return nil, nil
	}
}

// leaseOtherContentAfterFailure: as after a transaction that was rolled back.
func leaseOtherContentAfterFailure(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	g := granted(tb, d, c, "a", longLease)
	if err := d.Release(tb.Context(), c.Key, "a", g.Token, dedupe.StateFree); err != nil {
		tb.Fatal(err)
	}
	other := withContent(c, "other")
	completed(tb, d, other, "b", granted(tb, d, other, "b", longLease), nil)
	if _, r, err := d.Acquire(tb.Context(), c, "c", longLease); err != nil || r == nil || r.Fingerprint != other.Fingerprint {
		tb.Errorf("the first content afterwards: %+v, %v; want the record of the one that is done", r, err)
	}
}

func leaseConflictFields(tb testing.TB, h LeaseHarness) {
	st := dedupe.NewLeaseStore(h.Driver(), nil)
	for i, doc := range []string{`{"amount":1,"to":"Ann"}`, `{"amount":2,"to":"Ann"}`, `{"amount":2,"to":"Ann"}`} {
		want := dedupe.Conflict
		if i == 0 {
			want = dedupe.Processed
		}
		res, err := st.Once(tb.Context(), document("1", doc), func(context.Context, *dedupe.Lease) ([]byte, error) { return nil, nil })
		if err != nil || res.Outcome != want {
			tb.Fatalf("claim %d: %v, %v; want %v", i, res.Outcome, err, want)
		}
	}
	k := document("1", "{}").Key
	found, err := h.Admin().Conflicts(tb.Context(), k.Stored())
	if err != nil || len(found) != 1 || strings.Join(found[0].Fields, " ") != "/amount" || found[0].Key != k ||
		found[0].Reason != dedupe.ReasonContent || found[0].First == found[0].Fingerprint || found[0].SeenAt.IsZero() {
		tb.Errorf("the conflict is %+v, %v", found, err)
	}
	if e, err := h.Admin().Find(tb.Context(), k.Stored()); err != nil || e.Conflicts != 1 || e.State != dedupe.StateDone {
		tb.Errorf("the key is %+v, %v", e, err)
	}
	if got := listed(tb, h.Admin(), dedupe.Filter{InConflict: true}); len(got) != 1 || got[k.Stored()] == 0 {
		tb.Errorf("in conflict are %v", got)
	}
	if err := h.Admin().Settle(tb.Context(), k.Stored()); err != nil {
		tb.Fatal(err)
	}
	if found, err := h.Admin().Conflicts(tb.Context(), k.Stored()); err != nil || len(found) != 0 {
		tb.Errorf("after they were settled: %+v, %v", found, err)
	}
}

// leaseParks: under the policy Park nothing runs once an owner has vanished.
func leaseParks(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	vanish(tb, d, c, h.Admin())
	park := dedupe.NewLeaseStore(d, &dedupe.LeaseOptions{Unknown: dedupe.Park})
	for range 3 {
		if _, err := park.Once(tb.Context(), c, mustNot(tb)); !errors.Is(err, dedupe.ErrParked) {
			tb.Errorf("Once: %v, want ErrParked", err)
		}
	}
	rerun := dedupe.NewLeaseStore(d, nil) // another process with another policy
	if _, err := rerun.Once(tb.Context(), c, mustNot(tb)); !errors.Is(err, dedupe.ErrParked) {
		tb.Errorf("Once by another policy: %v, want ErrParked", err)
	}
	if err := h.Admin().Release(tb.Context(), c.Key.Stored()); err != nil {
		tb.Fatal(err)
	}
	res, err := park.Once(tb.Context(), c, func(_ context.Context, l *dedupe.Lease) ([]byte, error) {
		if l.Unknown {
			tb.Error("a person has said that it had no effect, and it is unknown still")
		}
		return []byte("done"), nil
	})
	if err != nil || res.Outcome != dedupe.Processed {
		tb.Errorf("after the release: %v, %v", res.Outcome, err)
	}
}

func leaseParked(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	g := granted(tb, d, c, "a", longLease)
	if err := d.Release(tb.Context(), c.Key, "a", g.Token, dedupe.StateParked); err != nil {
		tb.Fatal(err)
	}
	if _, _, err := d.Acquire(tb.Context(), c, "b", longLease); !errors.Is(err, dedupe.ErrParked) {
		tb.Errorf("acquire of a parked key: %v, want ErrParked", err)
	}
	for what, err := range stale(tb, d, c, "a", g) {
		if !errors.Is(err, dedupe.ErrLeaseLost) {
			tb.Errorf("%s of a parked key: %v, want ErrLeaseLost", what, err)
		}
	}
	if err := d.Release(tb.Context(), c.Key, "a", g.Token, dedupe.StateDone); !errors.Is(err, dedupe.ErrWrongState) {
		tb.Errorf("release as done: %v, want ErrWrongState", err)
	}
}

// leaseReplyTooLarge: the effect has been brought about, and is not forgotten.
func leaseReplyTooLarge(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	st := dedupe.NewLeaseStore(d, nil)
	_, err := st.Once(tb.Context(), c, func(context.Context, *dedupe.Lease) ([]byte, error) {
		return bytes.Repeat([]byte("x"), dedupe.DefaultMaxReply+1), nil
	})
	if !errors.Is(err, dedupe.ErrReplyTooLarge) {
		tb.Errorf("Once: %v, want ErrReplyTooLarge", err)
	}
	if g := granted(tb, d, c, "b", longLease); !g.Unknown {
		tb.Errorf("granted %+v, want unknown", g)
	}
}

func leaseExplained(tb testing.TB, h LeaseHarness) {
	d, a := h.Driver(), h.Admin()
	ctx := tb.Context()
	claims := map[dedupe.State]dedupe.Claim{}
	for _, s := range dedupe.States() {
		c := leaseClaim(s.String())
		claims[s] = c
		g := granted(tb, d, c, "process-7/a", longLease)
		var err error
		switch s {
		case dedupe.StateDone:
			err = d.Complete(ctx, c, "process-7/a", g.Token, []byte("reply"))
		case dedupe.StateRunning:
		default:
			err = d.Release(ctx, c.Key, "process-7/a", g.Token, s)
		}
		if err != nil {
			tb.Fatal(err)
		}
		e, err := a.Find(ctx, c.Key.Stored())
		if err != nil || e.State != s || e.Attempt != 1 || e.Token != g.Token || e.Holder != "process-7/a" || e.Key != c.Key || e.ID != c.Key.Stored() {
			tb.Errorf("%v: %+v, %v", s, e, err)
		}
		if (s == dedupe.StateRunning) == e.LeaseUntil.IsZero() || (s == dedupe.StateDone) == e.DoneAt.IsZero() || (s == dedupe.StateDone) != (e.ReplySize == 5) {
			tb.Errorf("%v: lease until %v, done at %v, reply of %d bytes", s, e.LeaseUntil, e.DoneAt, e.ReplySize)
		}
		if text := e.Explain(); !strings.Contains(text, s.String()+": ") || !strings.Contains(text, "process-7") || strings.Contains(text, "%!") {
			tb.Errorf("%v is explained as\n%s", s, text)
		}
	}
	for s, c := range claims {
		if got := listed(tb, a, dedupe.Filter{State: s}); len(got) != 1 || got[c.Key.Stored()] == 0 {
			tb.Errorf("as %v are listed %v", s, got)
		}
	}
	counts, err := a.Counts(ctx)
	for what, n := range map[string]int64{"running": counts.Running, "free": counts.Free, "unknown": counts.Unknown, "parked": counts.Parked} {
		if err != nil || n != 1 && n != -1 {
			tb.Errorf("%d are counted as %s, %v; want 1", n, what, err)
		}
	}
}

func leaseAdminRelease(tb testing.TB, h LeaseHarness) {
	d, a := h.Driver(), h.Admin()
	ctx := tb.Context()
	if err := a.Release(ctx, leaseClaim("none").Key.Stored()); !errors.Is(err, dedupe.ErrNotFound) {
		tb.Errorf("release of no key: %v, want ErrNotFound", err)
	}
	vanished := leaseClaim("vanished")
	old := vanish(tb, d, vanished, a)
	if err := a.Release(ctx, vanished.Key.Stored()); err != nil {
		tb.Errorf("release of a vanished owner's key: %v", err)
	}
	if err := d.Complete(ctx, vanished, "vanished", old.Token, nil); !errors.Is(err, dedupe.ErrLeaseLost) {
		tb.Errorf("the vanished owner completes a key that a person has released: %v, want ErrLeaseLost", err)
	}
	if g := granted(tb, d, vanished, "b", longLease); g.Unknown {
		tb.Errorf("after a release: %+v", g)
	}
	for _, s := range []dedupe.State{dedupe.StateRunning, dedupe.StateFree, dedupe.StateDone} {
		c := leaseClaim(s.String())
		g := granted(tb, d, c, "a", longLease)
		switch s {
		case dedupe.StateFree:
			_ = d.Release(ctx, c.Key, "a", g.Token, s)
		case dedupe.StateDone:
			_ = d.Complete(ctx, c, "a", g.Token, nil)
		}
		if err := a.Release(ctx, c.Key.Stored()); !errors.Is(err, dedupe.ErrWrongState) {
			tb.Errorf("release of a key that is %v: %v, want ErrWrongState", s, err)
		}
		inState(tb, a, c.Key, s)
	}
}

func leaseAdminEvict(tb testing.TB, h LeaseHarness) {
	d, a := h.Driver(), h.Admin()
	for i, done := range []bool{false, true} {
		c := leaseClaim(fmt.Sprint(i))
		g := granted(tb, d, c, "a", longLease)
		if done {
			completed(tb, d, c, "a", g, []byte("old"))
		}
		if err := a.Evict(tb.Context(), c.Key.Stored()); err != nil {
			tb.Fatal(err)
		}
		if err := a.Evict(tb.Context(), c.Key.Stored()); !errors.Is(err, dedupe.ErrNotFound) {
			tb.Errorf("evict again: %v, want ErrNotFound", err)
		}
		for what, err := range stale(tb, d, c, "a", g) {
			if !errors.Is(err, dedupe.ErrLeaseLost) {
				tb.Errorf("%s after the key was evicted: %v, want ErrLeaseLost", what, err)
			}
		}
		if next := granted(tb, d, c, "b", longLease); next.Token <= g.Token || next.Attempt != 1 || next.Unknown {
			tb.Errorf("granted %+v after %+v was evicted", next, g)
		}
	}
}

func leaseHolder(tb testing.TB, h LeaseHarness) {
	c := leaseClaim("1")
	st := dedupe.NewLeaseStore(h.Driver(), &dedupe.LeaseOptions{Holder: "payments-3"})
	_, err := st.Once(tb.Context(), c, func(ctx context.Context, _ *dedupe.Lease) ([]byte, error) {
		e, err := h.Admin().Find(ctx, c.Key.Stored())
		if err != nil || !strings.HasPrefix(e.Holder, "payments-3/") || len(e.Holder) < len("payments-3/")+20 {
			tb.Errorf("the holder is %q, %v", e.Holder, err)
		}
		return nil, nil
	})
	if err != nil {
		tb.Fatal(err)
	}
}

// leaseLifetimes: zero is no lifetime at all to one store and the end of it to
// another, and nobody means either.
func leaseLifetimes(tb testing.TB, h LeaseHarness) {
	d, c := h.Driver(), leaseClaim("1")
	bad := []time.Duration{0, -1, -time.Hour, time.Microsecond, time.Millisecond - 1}
	for _, lifetime := range bad {
		if _, _, err := d.Acquire(tb.Context(), c, "a", lifetime); !errors.Is(err, dedupe.ErrInvalidClaim) {
			tb.Errorf("acquire for %v: %v, want ErrInvalidClaim", lifetime, err)
		}
		short := c
		short.Retain = lifetime
		if _, _, err := d.Acquire(tb.Context(), short, "a", longLease); !errors.Is(err, dedupe.ErrInvalidClaim) {
			tb.Errorf("acquire with a retention of %v: %v, want ErrInvalidClaim", lifetime, err)
		}
	}
	if _, err := h.Admin().Find(tb.Context(), c.Key.Stored()); !errors.Is(err, dedupe.ErrNotFound) {
		tb.Errorf("claims that were refused have left the key: %v", err)
	}
	g := granted(tb, d, c, "a", longLease)
	for _, lifetime := range bad {
		if err := d.Extend(tb.Context(), c.Key, "a", g.Token, lifetime); !errors.Is(err, dedupe.ErrInvalidClaim) {
			tb.Errorf("extend for %v: %v, want ErrInvalidClaim", lifetime, err)
		}
		short := c
		short.Retain = lifetime
		if err := d.Complete(tb.Context(), short, "a", g.Token, nil); !errors.Is(err, dedupe.ErrInvalidClaim) {
			tb.Errorf("complete with a retention of %v: %v, want ErrInvalidClaim", lifetime, err)
		}
	}
	if e, err := h.Admin().Find(tb.Context(), c.Key.Stored()); err != nil || e.State != dedupe.StateRunning || time.Until(e.LeaseUntil) < longLease/2 {
		tb.Errorf("what was refused has changed the key: %+v, %v", e, err)
	}
	completed(tb, d, c, "a", g, nil)
}
