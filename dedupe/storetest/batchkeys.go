package storetest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/unecho/unecho/dedupe"
)

func batchKeyCases[S any]() []Case[S] {
	return []Case[S]{
		{"batch: a thousand claims", batchThousand[S]},
		{"batch: keys are claimed in order", batchOrder[S]},
		{"batch: B14 a conflict names the fields that differ", batchConflictFields[S]},
	}
}

// reversedClaims are n claims, in the reverse of the order of their ids.
func reversedClaims(n int, change func(*dedupe.Claim)) (claims []dedupe.Claim) {
	for i := range n {
		c := claim(fmt.Sprint(i))
		change(&c)
		claims = append(claims, c)
	}
	slices.SortFunc(claims, func(a, b dedupe.Claim) int {
		return -cmp.Compare(a.Key.Stored().String(), b.Key.Stored().String())
	})
	return claims
}

// batchThousand: more keys and bytes than one statement of some databases takes.
// If the store divides the claims, no part may be taken for the whole. The keys
// that are done already are among the last ones by the order of ids, so that the
// store meets them when it has inserted many, and must not take these for done.
func batchThousand[S any](tb testing.TB, open Open[S]) {
	const n = 1000
	e := start(tb, open, Settings{})
	b := e.batching()
	claims := reversedClaims(n, func(c *dedupe.Claim) { c.Key.Source = "/" + strings.Repeat("long", 150) })
	done := []int{0, 100} // the claims are in reverse
	for _, i := range done {
		e.once(claims[i], e.effect("before", replyTo(claims[i])), dedupe.Processed)
	}
	handle := func(end error) func(context.Context, S, []int) ([][]byte, error) {
		return func(ctx context.Context, scope S, fresh []int) ([][]byte, error) {
			if len(fresh) != n-len(done) || slices.ContainsFunc(done, func(i int) bool { return slices.Contains(fresh, i) }) {
				tb.Errorf("%d claims are fresh, want all but %v", len(fresh), done)
			}
			replies := make([][]byte, len(fresh))
			for k, i := range fresh {
				replies[k] = replyTo(claims[i])
			}
			return replies, errors.Join(e.h.Add(ctx, scope, "e"), end)
		}
	}
	if _, err := b.OnceEach(e.ctx, claims, handle(errHandler)); !errors.Is(err, errHandler) {
		tb.Fatalf("OnceEach: %v, want the handler's error", err)
	}
	e.wantCount("e", 0)
	for round, fresh := range []dedupe.Outcome{dedupe.Processed, dedupe.Duplicate} {
		answers, err := b.OnceEach(e.ctx, claims, handle(nil))
		if err != nil || len(answers) != n {
			tb.Fatalf("OnceEach, round %d: %d answers, %v", round, len(answers), err)
		}
		for i, a := range answers {
			want := fresh
			if slices.Contains(done, i) {
				want = dedupe.Duplicate
			}
			if a.Outcome != want || string(a.Reply) != string(replyTo(claims[i])) {
				tb.Fatalf("round %d, answer %d: %v, a reply of %d bytes, %v; want %v and the claim's own", round, i, a.Outcome, len(a.Reply), a.Err, want)
			}
		}
	}
	e.wantCount("e", 1)
	e.wantCount("before", len(done))
	e.wantIdle()
}

// replyTo is a reply of three kibibytes that no other claim has, and none at all to
// some.
func replyTo(c dedupe.Claim) []byte {
	id := c.Key.Stored()
	if id[15]%8 == 0 {
		return nil
	}
	return []byte(strings.Repeat(id.String(), 90))
}

// batchOrder: by the order of their ids, or two batches that share keys could
// wait for each other.
func batchOrder[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	b := e.batching()
	claimed := power[ClaimLog](tb, e.h).LogClaims(tb)
	claims := reversedClaims(50, func(*dedupe.Claim) {})
	claims[10], claims[40] = claims[40], claims[10] // not simply from behind, either
	if _, err := b.OnceEach(e.ctx, claims, e.addEach(claims)); err != nil {
		tb.Fatal(err)
	}
	ids := claimed()
	if len(ids) != len(claims) {
		tb.Errorf("%d keys were claimed, want %d", len(ids), len(claims))
	}
	if !slices.IsSortedFunc(ids, func(a, b dedupe.KeyID) int { return cmp.Compare(a.String(), b.String()) }) {
		tb.Error("the keys were not claimed in the order of Key.Stored")
	}
}

func batchConflictFields[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	e.batching()
	a := power[Administered](tb, e.h).Admin()
	before := func(id string) dedupe.Claim { return document(id, `{"amount": 100, "city": "Oslo"}`) }
	after := func(id string) dedupe.Claim { return document(id, `{"amount": 100, "city": "Bergen"}`) }
	e.wantOutcomes(e.each(before("1"), before("2")), dedupe.Processed, dedupe.Processed)
	e.wantOutcomes(e.each(after("2"), before("3"), after("3"), after("1")),
		dedupe.Conflict, dedupe.Processed, dedupe.Conflict, dedupe.Conflict)
	for _, id := range []string{"1", "2", "3"} {
		found, err := a.Conflicts(e.ctx, before(id).Key.Stored())
		if err != nil || len(found) != 1 {
			tb.Errorf("Conflicts: %d records, %v; want 1", len(found), err)
			continue
		}
		if r := found[0]; r.Key != (dedupe.Key{}) && !slices.Equal(r.Fields, []string{"/city"}) { // else the store keeps nothing for people
			tb.Errorf("the fields that differ are %q, want /city", r.Fields)
		}
	}
}
