package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
)

func batchCases[S any]() []Case[S] {
	return []Case[S]{
		{"batch: new, done and in conflict", batchMixed[S]},
		{"batch: twins", batchTwins[S]},
		{"batch: what fails leaves no trace", batchFails[S]},
		{"batch: handler panic", batchPanics[S]},
		{"batch: replies", batchReplies[S]},
		{"batch: what cannot be stored is refused alone", batchInvalid[S]},
		{"batch: two that cross", batchCross[S]},
		{"batch: in progress", batchInProgress[S]},
		{"batch: B33 commit applied, answer lost", func(tb testing.TB, open Open[S]) { batchLostCommit(tb, open, true) }},
		{"batch: B33 commit lost on its way", func(tb testing.TB, open Open[S]) { batchLostCommit(tb, open, false) }},
		{"batch: the same effects as one by one", batchEqualsSingle[S]},
	}
}

// batching returns the store's power, or ends the case.
func (e *env[S]) batching() dedupe.Batcher[S] {
	e.tb.Helper()
	b, ok := e.h.Store().(dedupe.Batcher[S])
	if !ok {
		e.tb.Skip("n/a: the store is no Batcher")
	}
	return b
}

// each claims a batch whose handler writes one effect for each fresh claim, named
// by its id.
func (e *env[S]) each(claims ...dedupe.Claim) []dedupe.Answer {
	e.tb.Helper()
	answers, err := e.batching().OnceEach(e.ctx, claims, e.addEach(claims))
	if err != nil {
		e.tb.Fatalf("OnceEach: %v", err)
	}
	if len(answers) != len(claims) {
		e.tb.Fatalf("OnceEach: %d answers for %d claims", len(answers), len(claims))
	}
	return answers
}

func (e *env[S]) addEach(claims []dedupe.Claim) func(context.Context, S, []int) ([][]byte, error) {
	return func(ctx context.Context, scope S, fresh []int) ([][]byte, error) {
		e.runs.Add(1)
		var replies [][]byte
		for _, i := range fresh {
			if err := e.h.Add(ctx, scope, claims[i].Key.ID); err != nil {
				return nil, err
			}
			replies = append(replies, []byte("of "+claims[i].Key.ID))
		}
		return replies, nil
	}
}

// wantOutcomes compares answers; the zero Outcome is an error of the claim.
func (e *env[S]) wantOutcomes(answers []dedupe.Answer, want ...dedupe.Outcome) {
	e.tb.Helper()
	for i, a := range answers {
		if a.Outcome != want[i] || (a.Err != nil) != (want[i] == 0) {
			e.tb.Errorf("answer %d: %v, %v; want %v", i, a.Outcome, a.Err, want[i])
		}
	}
}

func batchMixed[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	e.batching()
	e.once(claim("done"), e.effect("done", []byte("of before")), dedupe.Processed)
	e.once(claim("met"), e.effect("met", nil), dedupe.Processed)
	e.runs.Store(0)
	claims := []dedupe.Claim{claim("z"), claim("done"), claim("a"), claimOf(claim("met").Key, "other"), claim("m")}
	for round := range 2 {
		answers := e.each(claims...)
		fresh := dedupe.Processed
		if round > 0 {
			fresh = dedupe.Duplicate
		}
		e.wantOutcomes(answers, fresh, dedupe.Duplicate, fresh, dedupe.Conflict, fresh)
		for i, want := range []string{"of z", "of before", "of a", "", "of m"} {
			if string(answers[i].Reply) != want {
				tb.Errorf("round %d: reply %d is %q, want %q", round, i, answers[i].Reply, want)
			}
		}
	}
	for _, id := range []string{"z", "done", "a", "met", "m"} {
		e.wantCount(id, 1)
	}
	e.wantRuns(1) // nothing was fresh in the second round
	if n := e.h.Conflicts(tb); n != 1 {
		tb.Errorf("%d conflicts are recorded, want 1", n)
	}
	if answers := e.each(); len(answers) != 0 {
		tb.Errorf("no claims have %d answers", len(answers))
	}
	e.wantIdle()
}

// batchTwins: the first claim of a key decides about the others in the batch.
func batchTwins[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	e.batching()
	answers := e.each(claim("1"), claim("2"), claim("1"), claimOf(claim("1").Key, "other"), claim("1"), claimOf(claim("2").Key, "other"))
	e.wantOutcomes(answers, dedupe.Processed, dedupe.Processed, dedupe.Duplicate, dedupe.Conflict, dedupe.Duplicate, dedupe.Conflict)
	if string(answers[2].Reply) != "of 1" || answers[3].Reply != nil {
		tb.Errorf("the replies of the twins are %q and %q", answers[2].Reply, answers[3].Reply)
	}
	e.wantCount("1", 1)
	e.wantCount("2", 1)
	if n := e.h.Conflicts(tb); n != 2 {
		tb.Errorf("%d conflicts are recorded, want 2", n)
	}
	e.once(claim("1"), e.no("it was done"), dedupe.Duplicate)
}

func batchFails[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 2})
	b := e.batching()
	claims := []dedupe.Claim{claim("1"), claim("2"), claim("3")}
	e.once(claim("2"), e.effect("2", nil), dedupe.Processed)
	for range 5 {
		answers, err := b.OnceEach(e.ctx, claims, func(ctx context.Context, scope S, fresh []int) ([][]byte, error) {
			if !slices.Equal(fresh, []int{0, 2}) {
				tb.Errorf("fresh are %v, want the first and the last", fresh)
			}
			if _, err := e.addEach(claims)(ctx, scope, fresh); err != nil {
				return nil, err
			}
			return nil, errHandler
		})
		if !errors.Is(err, errHandler) || answers != nil {
			tb.Errorf("OnceEach: %v, %v; want the handler's error", answers, err)
		}
	}
	e.wantCount("1", 0)
	e.wantCount("3", 0)
	e.wantOutcomes(e.each(claims...), dedupe.Processed, dedupe.Duplicate, dedupe.Processed)
	for _, id := range []string{"1", "2", "3"} {
		e.wantCount(id, 1)
	}
	e.wantIdle()
}

func batchPanics[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 1})
	b := e.batching()
	claims := []dedupe.Claim{claim("1"), claim("2")}
	func() {
		defer func() {
			if err, _ := recover().(error); !errors.Is(err, errHandler) {
				tb.Error("the panic was swallowed")
			}
		}()
		_, _ = b.OnceEach(e.ctx, claims, func(ctx context.Context, scope S, fresh []int) ([][]byte, error) {
			_, _ = e.addEach(claims)(ctx, scope, fresh)
			panic(errHandler)
		})
	}()
	e.wantCount("1", 0)
	e.wantIdle()
	e.wantOutcomes(e.each(claims...), dedupe.Processed, dedupe.Processed)
}

func batchReplies[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	b := e.batching()
	replies := [][]byte{nil, {}, {0, 0xff, '\'', '\\'}, []byte("text"), bytes.Repeat([]byte("x"), dedupe.DefaultMaxReply)}
	var claims []dedupe.Claim
	for i := range replies {
		claims = append(claims, claim(fmt.Sprint(i)))
	}
	for round := range 2 {
		answers, err := b.OnceEach(e.ctx, claims, func(context.Context, S, []int) ([][]byte, error) { return replies, nil })
		if err != nil {
			tb.Fatal(err)
		}
		for i, a := range answers {
			if !bytes.Equal(a.Reply, replies[i]) || (a.Reply == nil) != (replies[i] == nil) {
				tb.Errorf("round %d: reply %d is %d bytes, nil: %v; want %d, nil: %v", round, i, len(a.Reply), a.Reply == nil, len(replies[i]), replies[i] == nil)
			}
		}
	}
	for name, bad := range map[string][][]byte{"one for two": {nil}, "over the cap": {nil, make([]byte, dedupe.DefaultMaxReply+1)}} {
		if _, err := b.OnceEach(e.ctx, []dedupe.Claim{claim("x"), claim("y")}, func(context.Context, S, []int) ([][]byte, error) { return bad, nil }); err == nil {
			tb.Errorf("%s: no error", name)
		}
	}
	e.wantOutcomes(e.each(claim("x"), claim("y")), dedupe.Processed, dedupe.Processed)
}

func batchInvalid[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	e.batching()
	bad, negative := claim(""), claim("n")
	negative.Retain = -1
	answers := e.each(bad, claim("1"), negative, claim("2"))
	e.wantOutcomes(answers, 0, dedupe.Processed, 0, dedupe.Processed)
	if !errors.Is(answers[0].Err, dedupe.ErrInvalidKey) || !errors.Is(answers[2].Err, dedupe.ErrInvalidClaim) {
		tb.Errorf("the errors are %v and %v", answers[0].Err, answers[2].Err)
	}
	e.wantCount("1", 1)
	e.wantCount("n", 0)
}

// batchCross: two batches with the same keys in another order do not wait for
// each other, and share the keys. In every other round some keys are done, so
// that no batch owns all that it claims.
func batchCross[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 4})
	b := e.batching()
	for round := range 5 {
		var claims []dedupe.Claim
		for i := range 20 {
			claims = append(claims, claim(fmt.Sprint(round, ".", i)))
		}
		var processed atomic.Int64
		if round%2 > 0 {
			for i := 0; i < len(claims); i += 4 {
				e.once(claims[i], e.effect(claims[i].Key.ID, nil), dedupe.Processed)
				processed.Add(1)
			}
		}
		var wg sync.WaitGroup
		for worker := range 4 {
			mine := slices.Clone(claims)
			if worker%2 > 0 {
				slices.Reverse(mine)
			}
			wg.Go(func() {
				for e.ctx.Err() == nil {
					answers, err := b.OnceEach(e.ctx, mine, e.addEach(mine))
					switch {
					case err == nil:
						for _, a := range answers {
							if a.Outcome == dedupe.Processed {
								processed.Add(1)
							}
						}
						return
					case !errors.Is(err, dedupe.ErrInProgress) && !errors.Is(err, dedupe.ErrContention):
						tb.Errorf("OnceEach: %v", err)
						return
					}
				}
			})
		}
		wg.Wait()
		if n := processed.Load(); n != 20 {
			tb.Errorf("%d claims were processed, want 20", n)
		}
		for _, c := range claims {
			e.wantCount(c.Key.ID, 1)
		}
	}
	e.wantIdle()
}

// batchInProgress: another holder's key is neither new nor done, also where the
// store has to look up who has done another key of the batch before it gets to
// that one.
func batchInProgress[S any](tb testing.TB, open Open[S]) {
	e := startHolding(tb, open, Settings{Wait: 30 * time.Millisecond})
	b := e.batching()
	claims := []dedupe.Claim{claim("1"), claim("held"), claim("2")}
	want := []dedupe.Outcome{dedupe.Processed, dedupe.Duplicate, dedupe.Processed}
	for i := range 10 { // some of them are before the one that is held
		c := claim(fmt.Sprint("done ", i))
		e.once(c, e.effect("done", nil), dedupe.Processed)
		claims, want = append(claims, c), append(want, dedupe.Duplicate)
	}
	release, done := e.owner(claim("held"), "held")
	_, err := b.OnceEach(e.ctx, claims, func(context.Context, S, []int) ([][]byte, error) {
		tb.Error("the handler ran although another one is at work on a key")
		return nil, nil
	})
	if !errors.Is(err, dedupe.ErrInProgress) {
		tb.Errorf("OnceEach: %v, want ErrInProgress", err)
	}
	release <- nil
	if err := <-done; err != nil {
		tb.Error(err)
	}
	e.wantOutcomes(e.each(claims...), want...)
	e.wantIdle()
}

func batchLostCommit[S any](tb testing.TB, open Open[S], applied bool) {
	e := start(tb, open, Settings{Conns: 2})
	b := e.batching()
	cut := power[Cutter](tb, e.h)
	claims := []dedupe.Claim{claim("1"), claim("2")}
	cut.CutCommit(applied)
	if _, err := b.OnceEach(e.ctx, claims, e.addEach(claims)); !errors.Is(err, dedupe.ErrUnknownOutcome) {
		tb.Errorf("OnceEach: %v, want ErrUnknownOutcome", err)
	}
	want := dedupe.Processed
	if applied {
		want = dedupe.Duplicate
	}
	var answers []dedupe.Answer
	e.within("the outcome is known", func() bool {
		var err error
		answers, err = b.OnceEach(e.ctx, claims, e.addEach(claims))
		return err == nil
	})
	e.wantOutcomes(answers, want, want)
	e.wantCount("1", 1)
	e.wantCount("2", 1)
}

// batchEqualsSingle: one history, in batches and one by one, gives one table.
func batchEqualsSingle[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	e.batching()
	var history []dedupe.Claim
	for i := range 120 {
		id := fmt.Sprint((i * 7) % 40)
		c := claim(id)
		if i%11 == 0 {
			c = claimOf(c.Key, "other")
		}
		history = append(history, c)
	}
	var outcomes [2][]dedupe.Outcome
	for mode, prefix := range []string{"single ", "batch "} {
		named := slices.Clone(history)
		for i := range named {
			named[i].Key.Consumer = prefix + named[i].Key.Consumer // the same events, for another consumer
			named[i].Key.ID = prefix + named[i].Key.ID
		}
		for chunk := range slices.Chunk(named, []int{1, 16}[mode]) {
			if mode == 1 {
				for _, a := range e.each(chunk...) {
					outcomes[mode] = append(outcomes[mode], a.Outcome)
				}
				continue
			}
			res, err := e.h.Store().Once(e.ctx, chunk[0], e.effect(chunk[0].Key.ID, nil))
			if err != nil {
				tb.Fatal(err)
			}
			outcomes[mode] = append(outcomes[mode], res.Outcome)
		}
	}
	if !slices.Equal(outcomes[0], outcomes[1]) {
		tb.Errorf("one by one: %v\nin batches: %v", outcomes[0], outcomes[1])
	}
	for i := range 40 {
		e.wantCount(fmt.Sprint("single ", i), 1)
		e.wantCount(fmt.Sprint("batch ", i), 1)
	}
}
