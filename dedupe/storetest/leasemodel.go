package storetest

import (
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

// slack is how far the store's milliseconds and our clock may be apart.
const slack = 3 * time.Millisecond

// never is when an operation returned whose answer was lost: it may take effect
// at any time later.
const never = time.Duration(1<<63 - 1)

// leaseState is one key, as a lease of paper would have it.
type leaseState struct {
	s       byte // n none, h held, f free, p parked, d done
	unknown bool
	content byte
	owner   string
	token   int64 // -1: the answer of the grant was lost
	max     int64 // greatest token that was seen
	attempt int
	reply   string
	lo, hi  time.Duration // the lease began between the two, since the start of the history
	lease   time.Duration
}

// leaseOp is what somebody asked.
type leaseOp struct {
	// a acquire, e extend, c complete; f, u and p release as free, unknown and
	// parked; r and v are an admin's release and eviction
	op      byte
	content byte
	owner   string
	token   int64
	lease   time.Duration
	reply   string
	called  time.Duration
}

// leaseAnswer is what was answered.
type leaseAnswer struct {
	// g granted, b busy, k parked, d a record; o ok, l lost lease, w wrong
	// state, m missing; x no answer
	answer   byte
	token    int64
	attempt  int
	unknown  bool
	done     bool // of a record: the key is done
	content  byte // of a record
	reply    string
	returned time.Duration
}

// leaseModel is the step in the form that porcupine takes.
func leaseModel() porcupine.Model {
	return stepModel(leaseState{s: 'n'}, leaseStep)
}

// leaseStep returns what a key may be after an operation; nothing if the answer
// is impossible. It is the one oracle of the state machine and of the histories.
func leaseStep(s leaseState, in leaseOp, out leaseAnswer) []leaseState {
	if out.answer == 'x' {
		return leaseLost(s, in)
	}
	switch in.op {
	case 'a':
		return leaseAcquire(s, in, out)
	case 'e':
		return leaseVerdict(s, in, out, "h", func(n *leaseState) { n.lo, n.hi, n.lease = in.called, out.returned, in.lease })
	case 'c':
		return leaseVerdict(s, in, out, "hd", func(n *leaseState) {
			if n.s == 'h' {
				n.s, n.reply, n.unknown = 'd', in.reply, false
			}
		})
	case 'f', 'u':
		return leaseVerdict(s, in, out, "h", func(n *leaseState) { n.s, n.unknown = 'f', in.op == 'u' })
	case 'p':
		return leaseVerdict(s, in, out, "h", func(n *leaseState) { n.s, n.unknown = 'p', true })
	case 'r':
		return leaseAdmin(s, in, out)
	}
	return leaseEvict(s, out)
}

// leaseLost: the operation was done, or was not.
func leaseLost(s leaseState, in leaseOp) []leaseState {
	out := leaseAnswer{answer: 'o', returned: never}
	if in.op == 'a' {
		out = leaseAnswer{answer: 'g', token: -1, returned: never}
	}
	return append(leaseStep(s, in, out), s)
}

// leaseVerdict is the answer to an operation of an owner: ok if, and only if,
// the claim is still the caller's, in one of some states.
func leaseVerdict(s leaseState, in leaseOp, out leaseAnswer, states string, change func(*leaseState)) []leaseState {
	ours := slices.Contains([]byte(states), s.s) && s.owner == in.owner && s.token == in.token
	if ours != (out.answer == 'o') || !ours && out.answer != 'l' {
		return nil
	}
	if ours {
		change(&s)
	}
	return []leaseState{s}
}

// over and running say whether the lease of a held key may have run out when an
// operation took effect, and whether it may not have.
func (s leaseState) over(out leaseAnswer) bool {
	return out.returned == never || out.returned+slack >= s.lo+s.lease
}

func (s leaseState) running(in leaseOp) bool { return s.hi == never || in.called-slack <= s.hi+s.lease }

// open reports that it is not known what came of the content.
func (s leaseState) open() bool { return s.s == 'h' || s.s == 'p' || s.s == 'f' && s.unknown }

func leaseAcquire(s leaseState, in leaseOp, out leaseAnswer) []leaseState {
	same := in.content == s.content
	switch {
	case out.answer == 'g' && s.s == 'h' && s.owner == in.owner && same:
		// Without the answer nobody knows whether the claim still ran, and was
		// answered as before, or had run out and was made anew.
		return append(s.again(out), s.grant(in, out)...)
	case out.answer == 'g':
		return s.grant(in, out)
	case out.answer == 'd' && out.content == s.content && out.reply == s.reply && out.done == (s.s == 'd') && (s.s == 'd' || s.open() && !same),
		out.answer == 'b' && s.s == 'h' && same && s.owner != in.owner && s.running(in),
		out.answer == 'k' && s.s == 'p' && same:
		return []leaseState{s}
	}
	return nil
}

// again: the same claim is answered as before, or for the first time if the
// answer was lost.
func (s leaseState) again(out leaseAnswer) []leaseState {
	if s.token != out.token && s.token != -1 && out.token != -1 {
		return nil
	}
	if out.token != -1 && (out.attempt != s.attempt || out.unknown != s.unknown || s.token == -1 && out.token <= s.max) {
		return nil
	}
	if s.token == -1 {
		s.token = out.token
		s.max = max(s.max, out.token)
	}
	return []leaseState{s}
}

// grant makes the key the caller's, if it is free.
func (s leaseState) grant(in leaseOp, out leaseAnswer) []leaseState {
	same := in.content == s.content
	free := s.s == 'n' || s.s == 'f' && (same || !s.unknown) || s.s == 'h' && same && s.over(out)
	n := leaseState{s: 'h', content: in.content, owner: in.owner, token: out.token, max: max(s.max, out.token),
		attempt: s.attempt + 1, unknown: s.s == 'h' || s.unknown, lo: in.called, hi: out.returned, lease: in.lease}
	if !free || out.token != -1 && (out.token <= s.max || out.attempt != n.attempt || out.unknown != n.unknown) {
		return nil
	}
	return []leaseState{n}
}

// leaseAdmin is a person's release of what is unknown or parked.
func leaseAdmin(s leaseState, in leaseOp, out leaseAnswer) []leaseState {
	may := s.s == 'p' || s.s == 'f' && s.unknown || s.s == 'h' && s.over(out)
	must := may && (s.s != 'h' || !s.running(in))
	switch {
	case out.answer == 'o' && may:
		s.s, s.unknown = 'f', false
		return []leaseState{s}
	case out.answer == 'w' && s.s != 'n' && !must, out.answer == 'm' && s.s == 'n':
		return []leaseState{s}
	}
	return nil
}

func leaseEvict(s leaseState, out leaseAnswer) []leaseState {
	switch {
	case out.answer == 'o' && s.s != 'n':
		return []leaseState{{s: 'n', max: s.max}} // tokens rise even so
	case out.answer == 'm' && s.s == 'n':
		return []leaseState{s}
	}
	return nil
}
