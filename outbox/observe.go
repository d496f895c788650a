package outbox

import (
	"context"
	"time"
)

// Step names a point on the way of a batch.
type Step string

// The steps, in the order in which a batch passes them.
const (
	// StepLease: this relay has taken the lease.
	StepLease Step = "lease"
	// StepRead: rows were read.
	StepRead Step = "read"
	// StepPublish: the publisher has answered; Err is the first failure.
	StepPublish Step = "publish"
	// StepSettle: the answers are recorded.
	StepSettle Step = "settle"
	// StepFenced: another relay has taken over.
	StepFenced Step = "fenced"
	// StepDown: what went to a topic or partition met an outage, and the broker does
	// not have one, or there is no such topic. Its rows are held aside, others go on.
	// Err is what one of them met.
	StepDown Step = "down"
	// StepUp: a topic or partition that was down serves again. Took is for how
	// long it did not.
	StepUp Step = "up"
	// StepFailed: the store or the broker did not do its part. Run goes on.
	StepFailed Step = "failed"
)

// Event is what an [Observer] is told. Fields that make no sense at a step
// are zero. Rows and Settled belong to the relay and are valid during the call;
// nothing of the messages in them may end up in a log or a label.
type Event struct {
	Step    Step
	Epoch   int64
	Rows    []Row
	Settled []Settlement
	Err     error
	Took    time.Duration
	// Destination is the topic or partition of StepDown and StepUp, as the publisher
	// names it.
	Destination string
}

// Observer is told what happens, on the path of the batch and in turn: Observe
// must be quick and must not block.
type Observer interface {
	Observe(ctx context.Context, e Event)
}

// ObserverFunc makes an [Observer] of a function.
type ObserverFunc func(ctx context.Context, e Event)

// Observe calls f.
func (f ObserverFunc) Observe(ctx context.Context, e Event) { f(ctx, e) }
