package consumer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

// RedriveOptions are the settings of [Redrive]. The zero value, and nil, is the
// default.
type RedriveOptions struct {
	// AcceptLate also runs messages that were parked for longer than the
	// handler keeps its keys. If the effect of one was there already, its key
	// may be pruned: then the effect will be there twice.
	AcceptLate bool
	// Consumer is that of the messages; those of another one are refused.
	// Defaults to the name given to Wrap. With a Route to handlers of several
	// names the default is any.
	Consumer string
	// HandlerTimeout bounds one run of the handler. Defaults to 1 minute; -1 is
	// no bound.
	HandlerTimeout time.Duration
	// Observer is told what happens. Defaults to none.
	Observer Observer
}

// RedriveOutcome says what came of one message.
type RedriveOutcome string

const (
	// RedriveNotRun: an outage, or the end of the context, came before it. It
	// is the same as before.
	RedriveNotRun RedriveOutcome = ""
	// RedriveDone: the handler ran, and its effect is durable. The record is
	// ParkedRedriven.
	RedriveDone RedriveOutcome = "redriven"
	// RedriveSkipped: the event was done before. The record is ParkedSkipped.
	RedriveSkipped RedriveOutcome = "skipped"
	// RedriveConflict: the event's identity was done with another content, so
	// the handler did not run. It stays parked, with the reason ReasonConflict:
	// Edit gives it an identity of its own.
	RedriveConflict RedriveOutcome = "conflict"
	// RedriveFailed: the handler failed. It stays parked, with one attempt more
	// and the new error.
	RedriveFailed RedriveOutcome = "failed"
	// RedriveUndecided: the answer to the commit was lost, or somebody else is
	// at work on the event. It stays parked as it was. Redrive it again: the
	// key decides.
	RedriveUndecided RedriveOutcome = "undecided"
	// RedriveRefused: the handler was not run; Err says why and what to do. It
	// stays as it was.
	RedriveRefused RedriveOutcome = "refused"
)

// Redelivery is what came of one message.
type Redelivery struct {
	ID      string
	Outcome RedriveOutcome
	// Err says more about an outcome that leaves the message parked. Beside
	// RedriveDone and RedriveSkipped it means that the outcome could not be
	// written down: redrive it again, it will be skipped.
	Err error
}

var (
	// ErrLateRedrive: the message was parked for longer than the handler keeps
	// its keys, so nobody can tell any more whether it had its effect. Find out,
	// and discard it, or set RedriveOptions.AcceptLate.
	ErrLateRedrive = errors.New("consumer: the message was parked for longer than keys are kept")
	// ErrOtherConsumer: the message was parked by another consumer than the one
	// that the handler is.
	ErrOtherConsumer = errors.New("consumer: the message was parked by another consumer")
	// ErrUndeduplicated: the handler has returned nil without asking a store,
	// because middleware answered for it or a Route ignores the type.
	ErrUndeduplicated = errors.New("consumer: the handler has not asked the store")
)

// ReasonConflict is the reason of a parked message whose event's identity was
// done with another content.
const ReasonConflict = "conflict"

// Redrive runs parked messages through h once more, as they were on the wire, one
// after the other, and writes down what came of each. h is the handler that was
// given to Run: one of Wrap or Route, through Chain if there is middleware. The
// key of the event decides as at any delivery, so a message that was done
// meanwhile has no second effect, also if two people redrive it at once, and
// also if h is in shadow mode.
//
// There is one answer for each id, in their order. A message that was parked for
// longer than h keeps its keys is refused with ErrLateRedrive. One whose key is
// parked in a store of leases (dedupe.ErrParked) is refused until a person has
// released the key.
//
// The error is not nil if the work could not go on: an outage, of the lot or of
// what the handler needs, or the end of ctx. The messages that were not run
// then have the outcome RedriveNotRun. It is not nil either, with no answers, if h
// has no handler of Wrap in sight.
func Redrive(ctx context.Context, lot ParkingLot, h Handler, o *RedriveOptions, ids ...string) ([]Redelivery, error) {
	r := redriver{lot: lot, h: h}
	if o != nil {
		r.o = *o
	}
	if r.o.HandlerTimeout == 0 {
		r.o.HandlerTimeout = time.Minute
	}
	w := windowOf(h)
	if w == nil {
		return nil, errors.New("consumer: Redrive: there is no handler of Wrap in sight, so nothing would keep an effect from happening twice; " +
			"give it the handler that Run has, with its middleware by Chain")
	}
	if isKeyless(h) {
		return nil, errors.New("consumer: Redrive: the handler is one of WrapWatermark without an Extractor: its position has passed what is parked, " +
			"and there is no key that would keep an effect from happening twice; publish the messages again instead")
	}
	var name string
	name, r.keeps = w.window()
	if r.o.Consumer == "" && !strings.Contains(name, ", ") {
		r.o.Consumer = name
	}
	answers := make([]Redelivery, len(ids))
	for i, id := range ids {
		answers[i].ID = id
	}
	for i, id := range ids {
		if err := ctx.Err(); err != nil {
			return answers, fmt.Errorf("consumer: redrive: %w", err)
		}
		var err error
		if answers[i].Outcome, answers[i].Err, err = r.redrive(ctx, id); err != nil {
			return answers, fmt.Errorf("consumer: redrive %s: %w", id, err)
		}
	}
	return answers, nil
}

type redriver struct {
	lot   ParkingLot
	h     Handler
	o     RedriveOptions
	keeps time.Duration
}

// redrive is one message. stop is what keeps the others from being run.
func (r *redriver) redrive(ctx context.Context, id string) (out RedriveOutcome, why, stop error) {
	p, err := findWaiting(ctx, r.lot, id)
	switch {
	case errors.Is(err, ErrNotParked), errors.Is(err, ErrParkedChanged):
		return RedriveRefused, err, nil
	case err != nil:
		return RedriveNotRun, nil, err
	}
	if err := r.check(p); err != nil {
		return RedriveRefused, err, nil
	}
	decided, err := r.run(ctx, p.Message.Clone())
	switch class := Classify(err); class {
	case ClassNone:
		return r.handled(ctx, p, decided)
	case ClassUnavailable:
		return RedriveNotRun, nil, err
	case ClassUnknown, ClassInProgress, ClassContention:
		return RedriveUndecided, err, nil
	case ClassUncertain:
		return RedriveRefused, fmt.Errorf("consumer: the event's key is parked in the store of leases: find out what came of the earlier attempt, "+
			"then Release the key (dedupe.Admin, or relay keys release) and redrive again, or discard the message: %w", err), nil
	default:
		if ctx.Err() != nil { // no fault of the message
			return RedriveNotRun, nil, err
		}
		return RedriveFailed, err, r.note(ctx, p, func(p *Parked) {
			p.Class, p.Reason, p.Error = class, reason(class, err), parkedError(err)
			p.Attempts++
		})
	}
}

// check refuses what must not be run.
func (r *redriver) check(p *Parked) error {
	switch {
	case r.o.Consumer != "" && p.Consumer != r.o.Consumer:
		return fmt.Errorf("%w: %q, and the handler is %q; see RedriveOptions.Consumer", ErrOtherConsumer, p.Consumer, r.o.Consumer)
	case p.Age > r.keeps && !r.o.AcceptLate:
		return fmt.Errorf("%w: %v ago, and keys are kept for %v; if it had its effect then, it would have it twice: "+
			"find out and discard it, or set RedriveOptions.AcceptLate", ErrLateRedrive, p.Age.Round(time.Millisecond), r.keeps)
	}
	return nil
}

// run calls the handler once, guarded as Run does.
func (r *redriver) run(ctx context.Context, m *envelope.Message) (decided dedupe.Outcome, err error) {
	if r.o.HandlerTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, r.o.HandlerTimeout)
		defer cancel()
	}
	ctx = context.WithValue(ctx, byKey{}, true)
	v := &verdict{next: r.o.Observer}
	err = guarded(func() error { return r.h.Handle(withObserver(ctx, v), m) })
	return v.get(), err
}

// verdict hears what the store has decided, wherever under middleware and routes
// the handler of Wrap is.
type verdict struct {
	next Observer

	mu      sync.Mutex
	outcome dedupe.Outcome
}

// Observe implements [Observer]. Where several handlers were asked, an effect
// outweighs a conflict, and that a duplicate.
func (v *verdict) Observe(ctx context.Context, e Event) {
	if e.Step == StepDecide && e.Err == nil {
		v.mu.Lock()
		if v.outcome != dedupe.Processed && v.outcome != dedupe.Conflict || e.Outcome == dedupe.Processed {
			v.outcome = e.Outcome
		}
		v.mu.Unlock()
	}
	if v.next != nil {
		v.next.Observe(ctx, e)
	}
}

func (v *verdict) get() dedupe.Outcome {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.outcome
}

// handled writes down what was decided. That it cannot be written down does not
// change it, but stops the others.
func (r *redriver) handled(ctx context.Context, p *Parked, decided dedupe.Outcome) (out RedriveOutcome, why, stop error) {
	switch decided {
	case dedupe.Processed:
		err := r.note(ctx, p, func(p *Parked) { p.State = ParkedRedriven })
		if errors.Is(err, ErrParkedChanged) {
			return RedriveDone, err, nil
		}
		return RedriveDone, err, err
	case dedupe.Duplicate:
		err := r.note(ctx, p, func(p *Parked) { p.State = ParkedSkipped })
		return RedriveSkipped, err, err
	case dedupe.Conflict:
		why := errors.New("consumer: the event's identity was done with another content, and the conflict is recorded; edit the message to give it an identity of its own, or discard it")
		return RedriveConflict, why, r.note(ctx, p, func(p *Parked) { p.Reason, p.Error = ReasonConflict, parkedError(why) })
	}
	return RedriveRefused, ErrUndeduplicated, nil
}

// maxNotes is how often a change is tried anew because somebody else has changed
// the record.
const maxNotes = 10

// note changes the record, against whatever was done to it meanwhile. Two people
// redrive a message at once:
//
//	A's handler commits; B is told that the event is done
//	B writes skipped, and A finds another version: its redriven replaces skipped
//
// or A's handler fails after B's has committed and was written down as redriven:
// then A finds another state, and its failure is of no interest any more.
func (r *redriver) note(ctx context.Context, p *Parked, change func(*Parked)) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	for n := 1; ; n++ {
		next := *p
		change(&next)
		if p.State == ParkedEdited && next.State == ParkedRedriven {
			return fmt.Errorf("%w: it was edited while its handler ran, so the effect of the original is there; discard the edited copy %s unless its effect is wanted as well",
				ErrParkedChanged, p.EditedInto)
		}
		if next == *p || !mayBecome(p.State, next.State) {
			return nil
		}
		err := r.lot.Update(ctx, &next)
		lost := errors.Is(err, dedupe.ErrUnknownOutcome)
		if err == nil || n == maxNotes || !lost && !errors.Is(err, ErrParkedChanged) {
			return err
		}
		before := p.Version
		if p, err = r.lot.Find(ctx, p.ID); errors.Is(err, ErrNotParked) {
			return nil // pruned, so somebody had settled it
		} else if err != nil {
			return err
		}
		if lost && p.Version == before+1 && p.State == next.State && p.Error == next.Error && p.Attempts == next.Attempts {
			return nil // the change whose answer was lost
		}
	}
}

// mayBecome reports whether what a redrive has found out replaces a state. A
// decision of a person does not hide that the effect is there; an edited record
// keeps pointing to the one that has replaced it.
func mayBecome(from, to ParkedState) bool {
	switch from {
	case ParkedWaiting:
		return true
	case ParkedSkipped, ParkedDiscarded:
		return to == ParkedRedriven
	}
	return false
}
