package consumer

import (
	"context"
	"time"

	"github.com/unecho/unecho/dedupe"
)

// Step names a point on the way of a delivery.
type Step string

// The steps, in the order in which a delivery passes them.
const (
	// StepRetention: at the start, the handler keeps its keys for a shorter
	// time than messages can come again, and that was accepted (Err says what),
	// or the source could not be asked yet, and is asked again after Wait.
	StepRetention Step = "retention"
	// StepSmallPool: at the start, the pool of the handler's store has fewer
	// connections than Concurrency (Err says so).
	StepSmallPool Step = "small pool"
	// StepReceive: the source handed a delivery over.
	StepReceive Step = "receive"
	// StepIdentify: the envelope was read, or could not be (Err).
	StepIdentify Step = "identify"
	// StepIgnore: the event is of a type that nobody handles, and was declared
	// to be ignored.
	StepIgnore Step = "ignore"
	// StepHandle: the handler is about to run, in a scope that owns the key.
	StepHandle Step = "handle"
	// StepDecide: the store has answered, with Outcome or with Err.
	StepDecide Step = "decide"
	// StepShadow: the handler of a Wrap with Options.Shadow is about to run for a
	// delivery for which it would not have: of a duplicate or a conflict
	// (Outcome), or of one that names no event (Err).
	StepShadow Step = "shadow"
	// StepRetry: the delivery is tried again after Wait, here, by the broker, or
	// from the place where it waits.
	StepRetry Step = "retry"
	// StepDefer: the delivery was put into the place of RunOptions.Defer, to be
	// tried again after Wait, or could not be (Err).
	StepDefer Step = "defer"
	// StepJoin: the delivery was put there behind others of its key, without a
	// try, or could not be (Err).
	StepJoin Step = "join"
	// StepPause: something that messages need is out of reach, and they are held
	// up.
	StepPause Step = "pause"
	// StepResume: it is back.
	StepResume Step = "resume"
	// StepDeadLetter: the dead-letter hook was called, with success unless Err.
	StepDeadLetter Step = "dead letter"
	// StepAck: the delivery was acknowledged, or could not be (Err).
	StepAck Step = "ack"
	// StepReturn: the delivery was handed back, not started or cut short.
	StepReturn Step = "return"
)

// Event is what an [Observer] is told. Fields that make no sense at a step
// are zero. It never holds a payload, an identity, a key or a tenant.
type Event struct {
	Step Step
	// Consumer is the name given to Wrap; empty outside of it.
	Consumer string
	// Position is where the broker keeps the message.
	Position string
	// KeyHash is a prefix of a hash of the key, for logs. Never a metric label.
	KeyHash string
	// Outcome is set at StepDecide and StepShadow when Err is nil.
	Outcome dedupe.Outcome
	// Attempt counts the failures of this message known here, at StepRetry
	// and StepDeadLetter.
	Attempt int
	// Class says how an error was judged, at StepRetry and StepDeadLetter.
	Class Class
	Err   error
	// Took is how long the step took, Wait how long until the next try.
	Took, Wait time.Duration
}

// Observer is told what happens. Observe is called concurrently, on the path
// of the delivery: it must be quick and must not block.
type Observer interface {
	Observe(ctx context.Context, e Event)
}

// ObserverFunc makes an [Observer] of a function.
type ObserverFunc func(ctx context.Context, e Event)

// Observe calls f.
func (f ObserverFunc) Observe(ctx context.Context, e Event) { f(ctx, e) }

type observerKey struct{}

// withObserver lets what runs inside a handler, as Wrap does, report to the
// observer of the Run around it.
func withObserver(ctx context.Context, o Observer) context.Context {
	return context.WithValue(ctx, observerKey{}, o)
}

func observe(ctx context.Context, e Event) {
	if o, ok := ctx.Value(observerKey{}).(Observer); ok && o != nil {
		o.Observe(ctx, e)
	}
}
