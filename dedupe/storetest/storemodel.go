package storetest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"pgregory.net/rapid"

	"github.com/unecho/unecho/dedupe"
)

// onceState is one key of a transactional store.
type onceState struct {
	done    bool
	content byte
	reply   string
}

// onceOp is one claim with a handler, or an eviction.
type onceOp struct {
	evict   bool
	content byte
	fails   bool // the handler
	reply   string
}

// onceAnswer is what it was answered.
type onceAnswer struct {
	// p processed, d duplicate, c conflict, f the handler's error, b busy,
	// o evicted, m nothing to evict; x no answer
	answer byte
	reply  string
}

// onceStep returns what a key may be after an operation; nothing if the answer
// is impossible. It is the one oracle of the state machine and of the histories.
func onceStep(s onceState, in onceOp, out onceAnswer) []onceState {
	after := onceState{done: true, content: in.content, reply: in.reply}
	switch {
	case out.answer == 'x' && in.evict:
		return []onceState{s, {}}
	case out.answer == 'x' && !s.done && !in.fails:
		return []onceState{s, after}
	case out.answer == 'x', out.answer == 'b':
		return []onceState{s}
	case in.evict && (s.done && out.answer == 'o' || !s.done && out.answer == 'm'):
		return []onceState{{}}
	case in.evict:
		return nil
	case out.answer == 'p' && !s.done && !in.fails && out.reply == in.reply:
		return []onceState{after}
	case out.answer == 'f' && !s.done && in.fails,
		out.answer == 'd' && s.done && s.content == in.content && s.reply == out.reply,
		out.answer == 'c' && s.done && s.content != in.content && out.reply == "":
		return []onceState{s}
	}
	return nil
}

func onceModel() porcupine.Model {
	return stepModel(onceState{}, onceStep)
}

// stepModel is a step from one state to those that an answer leaves possible, in
// the form that porcupine takes.
func stepModel[S, I, O any](first S, step func(S, I, O) []S) porcupine.Model {
	nm := porcupine.NondeterministicModel{
		Init: func() []any { return []any{first} },
		Step: func(state, in, out any) []any {
			var next []any
			for _, s := range step(state.(S), in.(I), out.(O)) {
				next = append(next, s)
			}
			return next
		},
	}
	return nm.ToModel()
}

// oneKey claims one key of a store, and counts effects.
type oneKey[S any] struct {
	h   Harness[S]
	a   dedupe.Admin
	key dedupe.Key
}

func newOneKey[S any](tb testing.TB, h Harness[S]) *oneKey[S] {
	tb.Helper()
	return &oneKey[S]{h: h, a: power[Administered](tb, h).Admin(), key: dedupe.Key{Consumer: "model", ID: rand.Text()}}
}

func (k *oneKey[S]) ask(ctx context.Context, in onceOp) onceAnswer {
	if in.evict {
		err := k.a.Evict(ctx, k.key.Stored())
		switch {
		case err == nil:
			return onceAnswer{answer: 'o'}
		case errors.Is(err, dedupe.ErrNotFound):
			return onceAnswer{answer: 'm'}
		}
		return onceAnswer{answer: 'x'}
	}
	c := dedupe.Claim{Key: k.key, Fingerprint: dedupe.Fingerprint(k.key, []byte{in.content})}
	res, err := k.h.Store().Once(ctx, c, func(ctx context.Context, scope S) ([]byte, error) {
		if err := k.h.Add(ctx, scope, k.key.ID); err != nil {
			return nil, err
		}
		if in.fails {
			return nil, errHandler
		}
		return []byte(in.reply), nil
	})
	return answerOf(res, err)
}

func answerOf(res dedupe.Result, err error) onceAnswer {
	switch {
	case errors.Is(err, errHandler):
		return onceAnswer{answer: 'f'}
	case errors.Is(err, dedupe.ErrInProgress), errors.Is(err, dedupe.ErrContention):
		return onceAnswer{answer: 'b'}
	case err != nil:
		return onceAnswer{answer: 'x'}
	}
	return onceAnswer{answer: " pdc"[res.Outcome], reply: string(res.Reply)}
}

// RunMachine checks a store against the model by random sequences of claims, one
// after the other, each sequence on a key of its own. rapid decides how many,
// and shrinks one that fails.
func RunMachine[S any](t *testing.T, h Harness[S]) {
	_, eager := h.(Eager)
	rapid.Check(t, func(rt *rapid.T) {
		k := newOneKey(t, h)
		state, processed := onceState{}, 0
		rt.Repeat(map[string]func(*rapid.T){
			"": func(*rapid.T) {},
			"step": func(rt *rapid.T) {
				in := drawOnceOp(rt)
				out := k.ask(t.Context(), in)
				if out.answer == 'b' || out.answer == 'x' {
					rt.Fatalf("%+v was answered %q with nobody else there", in, out.answer)
				}
				if eager && in.fails && out.answer == 'f' {
					return // the handler has failed before the store has looked
				}
				next := onceStep(state, in, out)
				if len(next) != 1 {
					rt.Fatalf("%+v was answered %+v, the key was %+v", in, out, state)
				}
				if state = next[0]; out.answer == 'p' {
					processed++
				}
			},
		})
		if n := h.Count(t, k.key.ID); n != processed {
			rt.Fatalf("%d effects of %d claims that were processed", n, processed)
		}
	})
}

func drawOnceOp(rt *rapid.T) onceOp {
	return onceOp{
		evict:   rapid.IntRange(0, 9).Draw(rt, "evict") == 9,
		content: rapid.SampledFrom([]byte{0, 0, 1}).Draw(rt, "content"),
		fails:   rapid.IntRange(0, 3).Draw(rt, "fails") == 3,
		reply:   rapid.SampledFrom([]string{"", "r", "\x00\xff"}).Draw(rt, "reply"),
	}
}

// RunLinear lets clients claim one key at once, n times a key of its own, and
// checks that each of the n histories is linearizable, and that there are as
// many effects as claims that were processed.
func RunLinear[S any](t testing.TB, h Harness[S], n int) {
	t.Helper()
	for i := range n {
		k := newOneKey(t, h)
		ops := k.history(t.Context(), uint64(i))
		if res := porcupine.CheckOperationsTimeout(onceModel(), ops, linearPatience); res != porcupine.Ok {
			for _, op := range ops {
				t.Logf("%+v → %+v", op.Input, op.Output)
			}
			t.Fatalf("history %d is %s", i, res)
		}
		processed := 0
		for _, op := range ops {
			if op.Output.(onceAnswer).answer == 'p' {
				processed++
			}
		}
		if effects := h.Count(t, k.key.ID); effects != processed {
			t.Fatalf("history %d has %d effects of %d claims that were processed", i, effects, processed)
		}
	}
}

func (k *oneKey[S]) history(ctx context.Context, seed uint64) []porcupine.Operation {
	start := time.Now()
	_, eager := k.h.(Eager)
	var mu sync.Mutex
	var ops []porcupine.Operation
	var wg sync.WaitGroup
	for c := range linearClients {
		rnd := mathrand.New(mathrand.NewPCG(seed, uint64(c)))
		wg.Go(func() {
			for i := range linearOps / 2 {
				in := onceOp{evict: rnd.IntN(10) == 0, content: byte(rnd.IntN(4) / 3), fails: !eager && rnd.IntN(3) == 0, reply: fmt.Sprint(c, ".", i)}
				called := time.Since(start)
				out := k.ask(ctx, in)
				returned := time.Since(start)
				if out.answer == 'x' {
					returned = never
				}
				mu.Lock()
				ops = append(ops, porcupine.Operation{ClientId: len(ops), Input: in, Call: int64(called), Output: out, Return: int64(returned)})
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return ops
}
