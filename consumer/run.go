package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/unecho/unecho/brokers"
)

// RunOptions are the settings of [Run].
type RunOptions struct {
	// DeadLetter takes the messages that cannot be handled: the envelope is
	// malformed, the handler said Permanent, or its attempts are spent.
	// Mandatory, because every default would either lose such a message or
	// let it block what is behind it. See DeadLetterTo and Discard.
	DeadLetter DeadLetter
	// Concurrency is how many handlers run at once. Defaults to 16.
	Concurrency int
	// Order says what is handled one after the other. Defaults to the deliveries
	// of a lane (a Kafka partition).
	Order Order
	// MaxInFlight is how many deliveries may be received and not settled,
	// beside the source's own bound. Defaults to 4096, at least Concurrency.
	MaxInFlight int
	// MaxAttempts is after how many failures of the handler a message goes to
	// the dead letters. Outages, unknown commits, messages in progress
	// elsewhere and handlers that were cut short by a drain are no failures.
	// Defaults to 10; -1 is no limit.
	MaxAttempts int
	// Backoff is the wait between the attempts at a message, and between
	// probes during an outage.
	Backoff Backoff
	// HandlerTimeout bounds one run of the handler, in a group too: its context ends then,
	// and the run counts as failed. Defaults to 1 minute; -1 is no bound.
	HandlerTimeout time.Duration
	// Grace is how long running handlers may go on after Run's context is
	// done, under a context that is not. Then they are cancelled.
	// Defaults to 20 s.
	Grace time.Duration
	// Redelivery declares for how long after it was written a message can come
	// again, in place of what the source says: for those who know more than
	// the broker's settings, such as that nobody rewinds. Defaults to asking.
	Redelivery time.Duration
	// Replay is how much further back than the broker keeps messages you will
	// ever replay them from elsewhere, an archive or a dead-letter topic. It
	// adds to Redelivery, or to what the source says.
	Replay time.Duration
	// AcceptShortRetention starts although the handler keeps its keys for a
	// shorter time than messages can come again: what comes later than that is
	// handled again. The Observer is told (StepRetention), and so is Health.
	AcceptShortRetention bool
	// Classify judges what handlers return: ClassFailed, ClassPermanent,
	// ClassContention (later, and no attempt is spent) or ClassUnavailable. Any
	// other answer, such as ClassNone, leaves it to the function [Classify]. It is
	// not asked about what the store or the broker says, nor about messages that
	// name no event. It must be safe for concurrent use. Defaults to no opinion.
	Classify func(error) Class
	// CrashLoop, if it has a Counter, dead-letters messages that end the process.
	CrashLoop CrashLoop
	// Defer, if it has a Place, has messages that fail wait outside of the log.
	Defer Defer
	// Batch, if it has a Max, commits in groups.
	Batch Batch
	// Control, if there is one, pauses this run and tells how it is.
	Control *Control
	// Observer is told what happens. Defaults to none.
	Observer Observer
}

// cancelGrace is how long handlers that were cancelled have to return.
const cancelGrace = 5 * time.Second

// errDraining is why a handler's context ends after the grace.
var errDraining = errors.New("consumer: the grace of the shutdown is over")

// ErrHandlerStuck is matched by the error of Run when a handler did not return
// although its context had ended: its goroutine and its delivery are left
// behind, and the process should exit. The delivery will come back.
var ErrHandlerStuck = errors.New("consumer: a handler does not return")

// Run receives from src and hands what it gets to h, until ctx is done or src
// cannot go on, and settles every delivery by the answer:
//
//   - nil: acknowledged.
//   - a failure: tried again after a back-off, by the broker if it can wait
//     (brokers.Nacker) and there is no order to keep, otherwise here, with what
//     is behind it in its order waiting: its key or, with OrderByLane, the
//     partition. When the attempts are spent: dead-lettered.
//   - malformed or permanent: dead-lettered at once.
//   - in progress elsewhere, unknown commit, contention: tried again, no
//     attempt spent.
//   - an outage of the store or of a broker that different messages meet:
//     consumption pauses, and one delivery after the other probes until it is
//     back. No attempt is spent, nothing is dead-lettered.
//   - an outage that one message meets while others are served: a failure of
//     that message, with the reason ReasonOwnOutage.
//
// When ctx is done Run drains: it stops receiving, hands back what was not
// started, lets running handlers finish until the grace ends, cancels them,
// and settles what they did. It then closes src, which is Run's from the
// start. Run returns nil after a drain that ctx asked for, an error that
// matches ErrHandlerStuck if a handler did not return, what ended the source
// otherwise, or, before anything is received, what is wrong with o, or an error
// that matches ErrShortRetention: the source can deliver a message again after
// the handler has forgotten its key.
// All its goroutines have ended then, but for those of stuck handlers.
func Run(ctx context.Context, src brokers.Source, h Handler, o *RunOptions) error {
	r, err := newRunner(src, h, o)
	if err != nil {
		return err
	}
	ctx = r.observed(ctx)
	if d, ok := src.(brokers.Demander); ok {
		d.Demand(r.o.Concurrency)
	}
	if s, ok := src.(brokers.Sharer); ok {
		s.Share(r.o.MaxInFlight)
	}
	r.checkPools(ctx)
	detach, err := r.o.Control.attach(r)
	if err != nil {
		return errors.Join(err, src.Close())
	}
	defer detach()
	if err := r.proveRetention(ctx); err != nil {
		return errors.Join(err, src.Close())
	}
	stopDeferred := r.deferrer.start(ctx)
	received := r.receive(ctx)
	stopDeferred()
	stuck := r.drain()
	closed := src.Close()
	switch {
	case stuck != nil:
		return stuck
	case received != nil && ctx.Err() == nil:
		return fmt.Errorf("consumer: receive: %w", received)
	case closed != nil:
		return fmt.Errorf("consumer: close the source: %w", closed)
	}
	return nil
}

func newRunner(src brokers.Source, h Handler, o *RunOptions) (*runner, error) {
	switch {
	case src == nil:
		return nil, errors.New("consumer: Run: the source is nil")
	case h == nil:
		return nil, errors.New("consumer: Run: the handler is nil")
	case o == nil || o.DeadLetter == nil:
		return nil, errors.New("consumer: Run: RunOptions.DeadLetter is nil: say where messages go that cannot be handled, " +
			"with consumer.DeadLetterTo(publisher, topic), or lose them with consumer.Discard")
	}
	r := &runner{src: src, h: h, o: *o, past: newAttempts(), running: newRunning(), waits: newWaits(),
		lanes: make(map[string]*lane), stores: make(map[any]storeRef), draining: make(chan struct{})}
	r.defaults()
	r.home = brokerHome{r}
	for _, ref := range refsOf(h) {
		r.stores[ref.key] = ref
	}
	r.nacker, _ = src.(brokers.Nacker)
	r.ordered = isOrdered(h)
	r.gate = newGate(r.o.Backoff)
	r.workers = make(chan struct{}, r.o.Concurrency)
	r.inFlight = make(chan struct{}, r.o.MaxInFlight)
	r.suspects = make(chan struct{}, 1)
	return r, errors.Join(r.checkBatch(), r.checkOrder(), r.o.CrashLoop.check(), r.checkDefer())
}

func (r *runner) defaults() {
	if r.o.Concurrency <= 0 {
		r.o.Concurrency = 16
	}
	if r.o.MaxInFlight <= 0 {
		r.o.MaxInFlight = 4096
	}
	r.o.MaxInFlight = max(r.o.MaxInFlight, r.o.Concurrency)
	if r.o.MaxAttempts == 0 {
		r.o.MaxAttempts = 10
	}
	if r.o.HandlerTimeout == 0 {
		r.o.HandlerTimeout = time.Minute
	}
	if r.o.Grace <= 0 {
		r.o.Grace = 20 * time.Second
	}
	r.o.Backoff = r.o.Backoff.normal()
}

// runner is one Run.
type runner struct {
	src    brokers.Source
	nacker brokers.Nacker // nil where the broker cannot wait
	h      Handler
	o      RunOptions

	ordered   bool                  // the handler needs all of a lane in its order
	batch     groupHandler          // nil unless the run commits in groups
	short     atomic.Pointer[error] // a retention that is too short, and was accepted
	running   *running
	unsettled atomic.Int64 // deliveries that were received

	gate     *gate
	home     home // the broker
	past     *attempts
	waits    *waits
	stores   map[any]storeRef // behind the handler
	small    error            // a pool has fewer connections than there are workers
	deferrer *deferrer        // nil unless messages are deferred
	workers  chan struct{}    // a token for each handler that runs
	suspects chan struct{}    // a token for the suspect that runs, see CrashLoop
	inFlight chan struct{}    // a token for each delivery that is not settled
	draining chan struct{}    // closed when nothing is to be started any more

	base   context.Context         // of handlers: never ended by Run's ctx
	cancel context.CancelCauseFunc // ends base, when the grace is over

	wg    sync.WaitGroup // of lanes
	mu    sync.Mutex
	lanes map[string]*lane
	turn  int // of the lanes of what has no order; the receiver's alone
}

// observed makes the contexts: the caller's for receiving, and for handlers
// one that outlives it.
func (r *runner) observed(ctx context.Context) context.Context {
	if r.o.Observer != nil {
		ctx = withObserver(ctx, r.o.Observer)
	}
	r.base, r.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	return ctx
}

// receive hands deliveries to their lanes until ctx is done or the source
// cannot go on.
func (r *runner) receive(ctx context.Context) error {
	for {
		if !r.gate.waitRoom(ctx, r.room) || !r.o.Control.waitResumed(ctx) {
			return ctx.Err()
		}
		select {
		case r.inFlight <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		d, err := r.src.Receive(ctx)
		if err != nil {
			return err
		}
		observe(ctx, Event{Step: StepReceive, Position: d.Message.Position, Attempt: d.Attempt})
		if err := r.refuseUnordered(ctx, d); err != nil {
			return err
		}
		r.unsettled.Add(1)
		r.dispatch(d)
	}
}

// room reports whether another delivery may be received during an outage: enough
// of them that the probe goes round over different lanes and keys.
func (r *runner) room() bool { return int(r.unsettled.Load()) < 2*r.o.Concurrency }

// drain ends the run: see Run.
func (r *runner) drain() error {
	close(r.draining)
	defer r.cancel(errDraining)
	idle := make(chan struct{})
	go func() { r.wg.Wait(); close(idle) }()
	if closedWithin(idle, r.o.Grace) {
		return nil
	}
	r.cancel(errDraining)
	if closedWithin(idle, cancelGrace) {
		return nil
	}
	return fmt.Errorf("%w, %v after its context ended", ErrHandlerStuck, cancelGrace)
}

func closedWithin(c <-chan struct{}, d time.Duration) bool {
	return !wait(context.Background(), d, c)
}
