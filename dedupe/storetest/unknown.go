package storetest

import (
	"errors"
	"fmt"
	"testing"

	"github.com/unecho/unecho/dedupe"
)

func unknownCases[S any]() []Case[S] {
	return []Case[S]{
		{"B33 commit applied, answer lost", func(tb testing.TB, open Open[S]) { lostCommit(tb, open, true) }},
		{"B33 commit lost on its way", func(tb testing.TB, open Open[S]) { lostCommit(tb, open, false) }},
	}
}

// lostCommit: the outcome is unknown, the store says so, and the next claim
// finds out.
func lostCommit[S any](tb testing.TB, open Open[S], applied bool) {
	e := start(tb, open, Settings{Conns: 2})
	cut := power[Cutter](tb, e.h)
	want, runs := dedupe.Duplicate, int64(1)
	if !applied {
		want, runs = dedupe.Processed, 2
	}
	for _, reply := range [][]byte{nil, []byte("reply")} {
		e.runs.Store(0)
		name := fmt.Sprintf("lost with reply %q", reply)
		c := claim(name)
		cut.CutCommit(applied)
		err := e.fails(c, e.effect(name, reply), dedupe.ErrUnknownOutcome)
		if errors.Is(err, dedupe.ErrUnavailable) || errors.Is(err, dedupe.ErrInProgress) || errors.Is(err, dedupe.ErrScope) {
			tb.Errorf("Once: %v: unknown is a state of its own", err)
		}
		e.wantRuns(1) // a store that runs it again by itself hides the first run
		var res dedupe.Result
		e.within("the outcome is known", func() bool {
			res, err = e.h.Store().Once(e.ctx, c, e.effect(name, reply))
			return !errors.Is(err, dedupe.ErrUnavailable) && !errors.Is(err, dedupe.ErrInProgress)
		})
		if err != nil || res.Outcome != want || string(res.Reply) != string(reply) {
			tb.Errorf("the redelivery: %v, %q, %v; want %v, %q", res.Outcome, res.Reply, err, want, reply)
		}
		e.wantRuns(runs)
		e.wantCount(name, 1)
	}
	e.wantIdle()
}
