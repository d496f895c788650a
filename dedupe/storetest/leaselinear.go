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

const (
	linearClients = 4
	linearOps     = 12 // of each client
	// linearPatience bounds the check of one history. A check that is not done
	// by then has shown nothing, so it is a failure.
	linearPatience = 20 * time.Second
)

// RunLeaseLinear lets clients work on one key at once, with leases that run out
// and answers that get lost, n times on a key of its own, and checks that each of
// the n histories is linearizable: that there is an order of the operations in
// which each answer is the one that a single lease of paper would have given. It
// fails t at the first that is not, and prints it.
func RunLeaseLinear(t testing.TB, h LeaseHarness, n int) {
	t.Helper()
	for i := range n {
		if res, ops := leaseHistory(t.Context(), h, uint64(i)); res != porcupine.Ok {
			for _, op := range ops {
				t.Logf("%+v → %+v", op.Input, op.Output)
			}
			t.Fatalf("history %d is %s", i, res)
		}
	}
}

func leaseHistory(ctx context.Context, h LeaseHarness, seed uint64) (porcupine.CheckResult, []porcupine.Operation) {
	r := newRecorder(h)
	var wg sync.WaitGroup
	for c := range linearClients {
		wg.Go(func() { r.client(ctx, c, mathrand.New(mathrand.NewPCG(seed, uint64(c)))) })
	}
	wg.Wait()
	return porcupine.CheckOperationsTimeout(leaseModel(), r.ops, linearPatience), r.ops
}

// recorder asks a driver about one key, and notes what it was answered.
type recorder struct {
	d     dedupe.LeaseDriver
	admin dedupe.Admin
	key   dedupe.Key
	start time.Time

	mu  sync.Mutex
	ops []porcupine.Operation
}

func newRecorder(h LeaseHarness) *recorder {
	return &recorder{d: h.Driver(), admin: h.Admin(), start: time.Now(), key: dedupe.Key{Consumer: "linear", ID: rand.Text()}}
}

// client claims, extends, completes late and early, gives up, and loses answers.
func (r *recorder) client(ctx context.Context, id int, rnd *mathrand.Rand) {
	owner, token, claims, content := "", int64(0), 0, byte(0)
	for range linearOps {
		time.Sleep(time.Duration(rnd.IntN(3000)) * time.Microsecond)
		lease := time.Duration(2+rnd.IntN(15)) * time.Millisecond
		switch {
		case rnd.IntN(25) == 0:
			r.do(ctx, rnd, leaseOp{op: "rrv"[rnd.IntN(3)]})
		case owner == "" || rnd.IntN(4) == 0:
			if owner == "" || rnd.IntN(3) > 0 { // else the same claim is sent again
				claims++
				owner, token, content = fmt.Sprintf("%d.%d", id, claims), 0, byte(rnd.IntN(8)/7)
			}
			if out := r.do(ctx, rnd, leaseOp{op: 'a', owner: owner, lease: lease, content: content}); out.answer == 'g' {
				token = out.token
			}
		default:
			op := "eeecccfup"[rnd.IntN(9)]
			r.do(ctx, rnd, leaseOp{op: op, owner: owner, token: token, lease: lease, content: content, reply: fmt.Sprint(owner, "/", token)})
			if op == 'f' || op == 'u' || op == 'p' {
				owner = ""
			}
		}
	}
}

// do does one operation and records it. Every twelfth answer gets lost: the
// client does not hear it, and the history does not know.
func (r *recorder) do(ctx context.Context, rnd *mathrand.Rand, in leaseOp) leaseAnswer {
	in.called = time.Since(r.start)
	out := r.ask(ctx, in)
	out.returned = time.Since(r.start)
	op := porcupine.Operation{Input: in, Call: int64(in.called), Output: out, Return: int64(out.returned)}
	if rnd.IntN(12) == 0 || out.answer == 'x' {
		out = leaseAnswer{answer: 'x', returned: never}
		op.Output, op.Return = out, int64(never)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	op.ClientId = len(r.ops) // an operation without an answer must not block its client's next
	r.ops = append(r.ops, op)
	return out
}

func (r *recorder) claim(content byte) dedupe.Claim {
	return dedupe.Claim{Key: r.key, Retain: time.Hour, Fingerprint: dedupe.Fingerprint(r.key, []byte{content})}
}

func (r *recorder) ask(ctx context.Context, in leaseOp) leaseAnswer {
	c := r.claim(in.content)
	var err error
	switch in.op {
	case 'a':
		return r.acquire(ctx, c, in)
	case 'e':
		err = r.d.Extend(ctx, c.Key, in.owner, in.token, in.lease)
	case 'c':
		err = r.d.Complete(ctx, c, in.owner, in.token, []byte(in.reply))
	case 'f':
		err = r.d.Release(ctx, c.Key, in.owner, in.token, dedupe.StateFree)
	case 'u':
		err = r.d.Release(ctx, c.Key, in.owner, in.token, dedupe.StateUnknown)
	case 'p':
		err = r.d.Release(ctx, c.Key, in.owner, in.token, dedupe.StateParked)
	case 'r':
		err = r.admin.Release(ctx, c.Key.Stored())
	case 'v':
		err = r.admin.Evict(ctx, c.Key.Stored())
	}
	for answer, verdict := range map[byte]error{'l': dedupe.ErrLeaseLost, 'w': dedupe.ErrWrongState, 'm': dedupe.ErrNotFound} {
		if errors.Is(err, verdict) {
			return leaseAnswer{answer: answer}
		}
	}
	if err != nil {
		return leaseAnswer{answer: 'x'}
	}
	return leaseAnswer{answer: 'o'}
}

func (r *recorder) acquire(ctx context.Context, c dedupe.Claim, in leaseOp) leaseAnswer {
	g, rec, err := r.d.Acquire(ctx, c, in.owner, in.lease)
	switch {
	case err == nil && rec != nil:
		out := leaseAnswer{answer: 'd', reply: string(rec.Reply), done: rec.DoneAt.Unix() > 0}
		if rec.Fingerprint != c.Fingerprint {
			out.content = 1 - in.content
			if rec.Fingerprint != r.claim(out.content).Fingerprint {
				out.content = 0xff // nobody's
			}
		} else {
			out.content = in.content
		}
		return out
	case err == nil:
		return leaseAnswer{answer: 'g', token: g.Token, attempt: g.Attempt, unknown: g.Unknown}
	case errors.Is(err, dedupe.ErrInProgress):
		return leaseAnswer{answer: 'b'}
	case errors.Is(err, dedupe.ErrParked):
		return leaseAnswer{answer: 'k'}
	}
	return leaseAnswer{answer: 'x'}
}

// RunLeaseMachine checks a driver against the model by random sequences of
// operations of several owners and a person, one after the other, each sequence
// on a key of its own. rapid decides how many, and shrinks one that fails.
func RunLeaseMachine(t *testing.T, h LeaseHarness) {
	rapid.Check(t, func(rt *rapid.T) {
		r := newRecorder(h)
		states := []leaseState{{s: 'n'}}
		tokens := map[string]int64{} // of each owner, the latest
		rt.Repeat(map[string]func(*rapid.T){
			"": func(*rapid.T) {},
			"step": func(rt *rapid.T) {
				in := drawLeaseOp(rt, tokens)
				in.called = time.Since(r.start)
				out := r.ask(t.Context(), in)
				out.returned = time.Since(r.start)
				var next []leaseState
				for _, s := range states {
					next = append(next, leaseStep(s, in, out)...)
				}
				if len(next) == 0 {
					rt.Fatalf("%+v was answered %+v, the key was %+v", in, out, states)
				}
				if states = next; out.answer == 'g' {
					tokens[in.owner] = out.token
				}
			},
			"wait": func(*rapid.T) { time.Sleep(2 * slack) }, // a short lease runs out, by the server's clock
		})
	})
}

// drawLeaseOp draws an operation of one of three owners, who may send a claim
// again, or act by the token of another.
func drawLeaseOp(rt *rapid.T, tokens map[string]int64) leaseOp {
	in := leaseOp{
		op:      rapid.SampledFrom([]byte("aaaaeeccfuprv")).Draw(rt, "op"),
		owner:   rapid.SampledFrom([]string{"x", "y", "z"}).Draw(rt, "owner"),
		content: rapid.SampledFrom([]byte{0, 0, 0, 1}).Draw(rt, "content"),
		lease:   rapid.SampledFrom([]time.Duration{time.Millisecond, time.Minute}).Draw(rt, "lease"),
		reply:   rapid.SampledFrom([]string{"", "r", "\x00\xff"}).Draw(rt, "reply"),
	}
	in.token = tokens[in.owner]
	if rapid.IntRange(0, 9).Draw(rt, "whose") == 0 {
		in.token = tokens[rapid.SampledFrom([]string{"x", "y", "z"}).Draw(rt, "other")]
	}
	return in
}
