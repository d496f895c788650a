package storetest

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
)

// ClaimHarness is what the suite needs of claims in transactions that the caller
// owns, and of the database behind them. All methods may be called concurrently.
type ClaimHarness[Tx any] interface {
	// Begin opens a transaction.
	Begin(ctx context.Context) (Tx, error)
	Commit(ctx context.Context, tx Tx) error
	Rollback(ctx context.Context, tx Tx) error
	// Claim and SetReply are what is tested.
	Claim(ctx context.Context, tx Tx, c dedupe.Claim) (*dedupe.Result, error)
	SetReply(ctx context.Context, tx Tx, k dedupe.Key, reply []byte) error
	// Add writes one effect in tx, and Count returns how many are committed.
	Add(ctx context.Context, tx Tx, name string) error
	Count(tb testing.TB, name string) int
	Conflicts(tb testing.TB) int
}

// OneWriter is a harness of a database that has one open transaction that writes
// at a time: there is nobody else who could hold a key.
type OneWriter interface {
	// OneWriter does nothing.
	OneWriter()
}

// ClaimCase is one case of the suite of claims.
type ClaimCase[Tx any] struct {
	Name string
	Func func(tb testing.TB, h ClaimHarness[Tx])
}

// RunClaim runs the suite of claims in transactions that the caller owns. open
// returns a harness on a database that holds no keys; a claim waits for 100 ms.
func RunClaim[Tx any](t *testing.T, open func(tb testing.TB) ClaimHarness[Tx]) {
	for _, c := range ClaimCases[Tx]() {
		t.Run(c.Name, func(t *testing.T) { c.Func(t, open(t)) })
	}
}

// ClaimCases returns the suite.
func ClaimCases[Tx any]() []ClaimCase[Tx] {
	return []ClaimCase[Tx]{
		{"new, then a duplicate with its reply", claimOnce[Tx]},
		{"rolled back is new again", claimRolledBack[Tx]},
		{"a conflict is recorded with the commit", claimConflict[Tx]},
		{"in progress leaves the transaction usable", claimInProgress[Tx]},
		{"copies at once", claimCopies[Tx]},
		{"several keys in one transaction", claimSeveral[Tx]},
		{"what cannot be stored is refused", claimInvalid[Tx]},
	}
}

// deliver is a delivery in a transaction of its own, that ends as it should.
func deliver[Tx any](ctx context.Context, h ClaimHarness[Tx], c dedupe.Claim, name string, reply []byte) (res *dedupe.Result, err error) {
	tx, err := h.Begin(ctx)
	if err != nil {
		return nil, err
	}
	res, err = h.Claim(ctx, tx, c)
	if err == nil && res == nil {
		if err = h.Add(ctx, tx, name); err == nil {
			err = h.SetReply(ctx, tx, c.Key, reply)
		}
	}
	if err != nil {
		return nil, errors.Join(err, h.Rollback(ctx, tx))
	}
	return res, h.Commit(ctx, tx)
}

func claimOnce[Tx any](tb testing.TB, h ClaimHarness[Tx]) {
	ctx := tb.Context()
	for i, reply := range [][]byte{nil, {}, []byte("reply\x00")} {
		c := claim(string(rune('a' + i)))
		for j := range 3 {
			res, err := deliver(ctx, h, c, c.Key.ID, reply)
			switch {
			case err != nil:
				tb.Fatal(err)
			case j == 0 && res != nil, j > 0 && (res == nil || res.Outcome != dedupe.Duplicate || !bytes.Equal(res.Reply, reply) || (res.Reply == nil) != (reply == nil)):
				tb.Errorf("delivery %d with the reply %q: %+v", j, reply, res)
			}
		}
		if n := h.Count(tb, c.Key.ID); n != 1 {
			tb.Errorf("%d effects, want 1", n)
		}
	}
}

func claimRolledBack[Tx any](tb testing.TB, h ClaimHarness[Tx]) {
	ctx := tb.Context()
	for range 2 {
		tx := begun(tb, h)
		res, err := h.Claim(ctx, tx, claim("1"))
		if err != nil || res != nil {
			tb.Fatalf("claim: %+v, %v; want a new key", res, err)
		}
		if err := errors.Join(h.Add(ctx, tx, "e"), h.SetReply(ctx, tx, claim("1").Key, []byte("of the failed")), h.Rollback(ctx, tx)); err != nil {
			tb.Fatal(err)
		}
	}
	for i := range 2 {
		if res, err := deliver(ctx, h, claim("1"), "e", nil); err != nil || (res == nil) != (i == 0) || res != nil && res.Reply != nil {
			tb.Errorf("delivery %d: %+v, %v", i, res, err)
		}
	}
	if n := h.Count(tb, "e"); n != 1 {
		tb.Errorf("%d effects, want 1", n)
	}
}

func begun[Tx any](tb testing.TB, h ClaimHarness[Tx]) Tx {
	tb.Helper()
	tx, err := h.Begin(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	return tx
}

func claimConflict[Tx any](tb testing.TB, h ClaimHarness[Tx]) {
	ctx := tb.Context()
	if _, err := deliver(ctx, h, claim("1"), "e", []byte("first")); err != nil {
		tb.Fatal(err)
	}
	other := claimOf(claim("1").Key, "other")
	tx := begun(tb, h)
	if res, err := h.Claim(ctx, tx, other); err != nil || res == nil || res.Outcome != dedupe.Conflict {
		tb.Fatalf("claim of another content: %+v, %v", res, err)
	}
	if err := h.Rollback(ctx, tx); err != nil {
		tb.Fatal(err)
	}
	if n := h.Conflicts(tb); n != 0 {
		tb.Errorf("%d conflicts are recorded by a transaction that was rolled back", n)
	}
	for range 2 {
		if res, err := deliver(ctx, h, other, "e", nil); err != nil || res == nil || res.Outcome != dedupe.Conflict || res.Reply != nil {
			tb.Errorf("delivery of another content: %+v, %v", res, err)
		}
	}
	if n := h.Conflicts(tb); n != 1 {
		tb.Errorf("%d conflicts are recorded, want 1", n)
	}
	if res, err := deliver(ctx, h, claim("1"), "e", nil); err != nil || res == nil || res.Outcome != dedupe.Duplicate || string(res.Reply) != "first" {
		tb.Errorf("the first content afterwards: %+v, %v", res, err)
	}
	if n := h.Count(tb, "e"); n != 1 {
		tb.Errorf("%d effects, want 1", n)
	}
}

func claimInProgress[Tx any](tb testing.TB, h ClaimHarness[Tx]) {
	if _, ok := h.(OneWriter); ok {
		tb.Skip("n/a: the database has one writer at a time")
	}
	ctx := tb.Context()
	owner, other := begun(tb, h), begun(tb, h)
	if res, err := h.Claim(ctx, owner, claim("1")); err != nil || res != nil {
		tb.Fatalf("claim: %+v, %v", res, err)
	}
	if res, err := h.Claim(ctx, other, claim("1")); !errors.Is(err, dedupe.ErrInProgress) || res != nil {
		tb.Errorf("claim of a key that another transaction holds: %+v, %v; want ErrInProgress", res, err)
	}
	if err := errors.Join(h.Add(ctx, owner, "owner"), h.Commit(ctx, owner)); err != nil {
		tb.Fatal(err)
	}
	// The other transaction had begun nothing, and goes on.
	if err := errors.Join(h.Add(ctx, other, "other"), h.Commit(ctx, other)); err != nil {
		tb.Errorf("the transaction whose claim was in progress cannot go on: %v", err)
	}
	if a, b := h.Count(tb, "owner"), h.Count(tb, "other"); a != 1 || b != 1 {
		tb.Errorf("%d and %d effects, want 1 of each", a, b)
	}
}

func claimCopies[Tx any](tb testing.TB, h ClaimHarness[Tx]) {
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	defer cancel()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for {
				_, err := deliver(ctx, h, claim("1"), "e", []byte("reply"))
				switch {
				case err == nil:
					return
				case ctx.Err() != nil:
					tb.Errorf("no answer within %v: %v", patience, err)
					return
				case !errors.Is(err, dedupe.ErrInProgress) && !errors.Is(err, dedupe.ErrContention):
					tb.Errorf("deliver: %v", err)
					return
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
	wg.Wait()
	if n := h.Count(tb, "e"); n != 1 {
		tb.Errorf("%d effects, want 1", n)
	}
}

func claimSeveral[Tx any](tb testing.TB, h ClaimHarness[Tx]) {
	ctx := tb.Context()
	if _, err := deliver(ctx, h, claim("b"), "b", nil); err != nil {
		tb.Fatal(err)
	}
	tx := begun(tb, h)
	for _, id := range []string{"a", "b", "c"} {
		res, err := h.Claim(ctx, tx, claim(id))
		if err != nil || (res == nil) != (id != "b") {
			tb.Fatalf("claim %s: %+v, %v", id, res, err)
		}
		if res == nil {
			if err := h.Add(ctx, tx, id); err != nil {
				tb.Fatal(err)
			}
		}
	}
	if res, err := h.Claim(ctx, tx, claim("a")); err != nil || res == nil || res.Outcome != dedupe.Duplicate {
		tb.Errorf("a twin in one transaction: %+v, %v; want a duplicate", res, err)
	}
	if err := h.Commit(ctx, tx); err != nil {
		tb.Fatal(err)
	}
	for _, id := range []string{"a", "b", "c"} {
		if n := h.Count(tb, id); n != 1 {
			tb.Errorf("%d effects %s, want 1", n, id)
		}
	}
}

func claimInvalid[Tx any](tb testing.TB, h ClaimHarness[Tx]) {
	ctx := tb.Context()
	tx := begun(tb, h)
	if _, err := h.Claim(ctx, tx, dedupe.Claim{Key: dedupe.Key{Consumer: "c"}}); !errors.Is(err, dedupe.ErrInvalidKey) {
		tb.Errorf("claim without an id: %v, want ErrInvalidKey", err)
	}
	if _, err := h.Claim(ctx, tx, dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: "1"}, Retain: -1}); !errors.Is(err, dedupe.ErrInvalidClaim) {
		tb.Errorf("claim with a negative retention: %v, want ErrInvalidClaim", err)
	}
	if err := h.SetReply(ctx, tx, claim("1").Key, []byte("reply")); !errors.Is(err, dedupe.ErrNotFound) {
		tb.Errorf("reply of a key that was not claimed: %v, want ErrNotFound", err)
	}
	if res, err := h.Claim(ctx, tx, claim("1")); err != nil || res != nil {
		tb.Fatalf("claim after all that: %+v, %v", res, err)
	}
	if err := h.SetReply(ctx, tx, claim("1").Key, make([]byte, dedupe.DefaultMaxReply+1)); !errors.Is(err, dedupe.ErrReplyTooLarge) {
		tb.Errorf("a reply over the cap: %v, want ErrReplyTooLarge", err)
	}
	if err := errors.Join(h.Add(ctx, tx, "e"), h.Commit(ctx, tx)); err != nil {
		tb.Fatal(err)
	}
	if n := h.Count(tb, "e"); n != 1 {
		tb.Errorf("%d effects, want 1", n)
	}
}
