package storetest

import (
	"testing"
	"time"
)

// The same claim is sent again after its lease has run out, and the answer is
// lost: it may have been made anew, so that the token of before is refused, or
// never have arrived.
func TestModelOfALostClaim(t *testing.T) {
	const ms = time.Millisecond
	owner := func(op byte, token int64, called time.Duration) leaseOp {
		return leaseOp{op: op, owner: "o", token: token, lease: 2 * ms, called: called}
	}
	for name, last := range map[string]leaseAnswer{
		"made anew":     {answer: 'l', returned: 41 * ms},
		"never arrived": {answer: 'o', returned: 41 * ms},
	} {
		states := leaseStep(leaseState{s: 'n'}, owner('a', 0, 0), leaseAnswer{answer: 'g', token: 7, attempt: 1, returned: ms})
		for _, step := range []struct {
			in  leaseOp
			out leaseAnswer
		}{
			{owner('a', 0, 20*ms), leaseAnswer{answer: 'x', returned: never}},
			{owner('f', 7, 40*ms), last},
		} {
			var next []leaseState
			for _, s := range states {
				next = append(next, leaseStep(s, step.in, step.out)...)
			}
			states = next
		}
		if len(states) == 0 {
			t.Errorf("%s: the model has it for impossible", name)
		}
	}
}
