// Package linear checks that lease drivers are linearizable: whatever clients do
// at once, with answers that get lost and leases that run out, there is an order
// of their operations in which each answer is the one that a single lease of
// paper would have given.
package linear

import (
	"time"

	"github.com/anishathalye/porcupine"
)

// slack is how far the store's milliseconds and our clock may be apart.
const slack = 3 * time.Millisecond

// state is one key.
type state struct {
	s      byte // n none, h held, f given up, d done
	owner  string
	token  int64 // -1: the answer of the grant was lost
	max    int64 // greatest token that was seen
	reply  string
	lo, hi time.Duration // the lease began between the two, since the start of the history
	lease  time.Duration
}

// input is what a client asked.
type input struct {
	op     byte // a acquire, e extend, c complete, r release
	owner  string
	token  int64
	lease  time.Duration
	reply  string
	called time.Duration
}

// output is what it was answered.
type output struct {
	answer   byte // g granted, b busy, d done, o ok, l lost lease, u unknown
	token    int64
	reply    string
	returned time.Duration
}

// never is when an operation returned whose answer was lost: it may take effect
// at any time later.
const never = time.Duration(1<<63 - 1)

func model() porcupine.Model {
	nm := porcupine.NondeterministicModel{
		Init: func() []any { return []any{state{s: 'n'}} },
		Step: func(st, in, out any) []any {
			var next []any
			for _, s := range step(st.(state), in.(input), out.(output)) {
				next = append(next, s)
			}
			return next
		},
	}
	return nm.ToModel()
}

// step returns what a key may be after an operation; nothing if the answer is
// impossible.
func step(s state, in input, out output) []state {
	if out.answer == 'u' {
		return lost(s, in)
	}
	switch in.op {
	case 'a':
		return acquire(s, in, out)
	case 'e':
		return verdict(s, in, out, s.s == 'h', func(n *state) { n.lo, n.hi, n.lease = in.called, out.returned, in.lease })
	case 'c':
		return verdict(s, in, out, s.s == 'h' || s.s == 'd', func(n *state) {
			if n.s == 'h' {
				n.s, n.reply = 'd', in.reply
			}
		})
	}
	return verdict(s, in, out, s.s == 'h', func(n *state) { n.s = 'f' })
}

// lost: the operation was done, or was not.
func lost(s state, in input) []state {
	out := output{answer: 'o', returned: never}
	if in.op == 'a' {
		out = output{answer: 'g', token: -1, returned: never}
	}
	return append(step(s, in, out), s)
}

// verdict is the answer to an operation of an owner: ok if, and only if, the
// claim is still the caller's.
func verdict(s state, in input, out output, fits bool, change func(*state)) []state {
	ours := fits && s.owner == in.owner && s.token == in.token
	if ours != (out.answer == 'o') {
		return nil
	}
	if ours {
		change(&s)
	}
	return []state{s}
}

func acquire(s state, in input, out output) []state {
	over := out.returned == never || out.returned+slack >= s.lo+s.lease
	running := s.hi == never || in.called-slack <= s.hi+s.lease
	free := s.s == 'n' || s.s == 'f' || s.s == 'h' && over
	switch out.answer {
	case 'g':
		if s.s == 'h' && s.owner == in.owner && (s.token == out.token || s.token == -1 || out.token == -1) {
			if s.token == -1 { // the answer comes with the second try
				s.token = out.token
				s.max = max(s.max, out.token)
			}
			return []state{s}
		}
		if !free || out.token != -1 && out.token <= s.max {
			return nil
		}
		return []state{{s: 'h', owner: in.owner, token: out.token, max: max(s.max, out.token), lo: in.called, hi: out.returned, lease: in.lease}}
	case 'b':
		if s.s == 'h' && s.owner != in.owner && running {
			return []state{s}
		}
	case 'd':
		if s.s == 'd' && s.reply == out.reply {
			return []state{s}
		}
	}
	return nil
}
