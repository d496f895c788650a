package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

// Batch makes a run commit in groups: the zero value does not.
type Batch struct {
	// Max is how many deliveries of one lane share a transaction at most: their
	// keys are claimed together, the handlers run one after the other in the
	// order of the lane, and one commit makes all of it durable, before any is
	// acknowledged. 0 and 1 are one by one; 100 is a good beginning.
	//
	// When a handler of a group fails, the group is rolled back, and what was
	// before the one that failed is committed without it: a handler may
	// therefore run more than once for a delivery, and none of the runs but
	// the last one leaves anything. What fails without telling whose fault it
	// is, such as a constraint that is checked at the commit, is isolated by
	// halves, in at most ⌈log₂ n⌉ + 1 more transactions.
	Max int
	// Wait is how long a group waits to be filled. Defaults to not at all:
	// under load a group is what came while the last one was committed.
	Wait time.Duration
}

// errNotRun is what a delivery of a group is answered that comes behind one that
// failed: nothing has happened to it yet.
var errNotRun = errors.New("consumer: not run yet")

// batchHandler is a handler that takes several messages in one transaction.
type batchHandler interface {
	// batches reports whether its store can.
	batches() bool
	// handleBatch answers for each message as Handle does, or errNotRun.
	handleBatch(ctx context.Context, raws []*envelope.Message) []error
}

// memberError is the failure of one handler of a group.
type memberError struct {
	at  int // in the claims
	err error
}

func (e *memberError) Error() string { return e.err.Error() }
func (e *memberError) Unwrap() error { return e.err }

// eachOf erases the type parameter from a store that is a Batcher.
func eachOf[S any](name string, b dedupe.Batcher[S], h func(ctx context.Context, scope S, m *envelope.Message) ([]byte, error)) func(context.Context, []dedupe.Claim, []*envelope.Message) ([]dedupe.Answer, error) {
	return func(ctx context.Context, claims []dedupe.Claim, ms []*envelope.Message) ([]dedupe.Answer, error) {
		return b.OnceEach(ctx, claims, func(ctx context.Context, scope S, fresh []int) ([][]byte, error) {
			replies := make([][]byte, len(fresh))
			for n, i := range fresh {
				observe(ctx, Event{Step: StepHandle, Consumer: name, Position: ms[i].Position})
				reply, err := h(withKey(ctx, claims[i].Key), scope, ms[i])
				if err != nil {
					return nil, &memberError{i, err}
				}
				replies[n] = reply
			}
			return replies, nil
		})
	}
}

// WrapBatch is [Wrap] for handlers that take several events at once, such as by one
// statement for all of them: h gets the events of a group that are new, in the
// order of their lane and each once, and works in their common transaction. Run
// it with RunOptions.Batch; alone, h gets one event at a time. It panics as Wrap
// does, and if st is no dedupe.Batcher.
//
// When h fails, nobody knows whose fault it is: the group is divided until the
// culprit is alone (see [Batch]), and what came before it is committed.
func WrapBatch[S any](name string, st dedupe.Store[S], h func(ctx context.Context, scope S, ms []*envelope.Message) error, o *Options) Handler {
	b, ok := st.(dedupe.Batcher[S])
	switch {
	case h == nil:
		panic("consumer: WrapBatch: the handler is nil")
	case st != nil && !ok:
		panic("consumer: WrapBatch: the store is no dedupe.Batcher: it cannot claim several keys in one transaction")
	}
	w := WrapReply(name, st, func(ctx context.Context, scope S, m *envelope.Message) ([]byte, error) {
		return nil, h(ctx, scope, []*envelope.Message{m})
	}, nil, o).(*wrapped)
	w.each = func(ctx context.Context, claims []dedupe.Claim, ms []*envelope.Message) ([]dedupe.Answer, error) {
		return b.OnceEach(ctx, claims, func(ctx context.Context, scope S, fresh []int) ([][]byte, error) {
			some := make([]*envelope.Message, len(fresh))
			for n, i := range fresh {
				some[n] = ms[i]
				observe(ctx, Event{Step: StepHandle, Consumer: name, Position: ms[i].Position})
			}
			return nil, h(ctx, scope, some)
		})
	}
	return w
}

// batches implements batchHandler.
func (w *wrapped) batches() bool { return w.each != nil }

// handleBatch implements batchHandler.
func (w *wrapped) handleBatch(ctx context.Context, raws []*envelope.Message) []error {
	g := &group{w: w, errs: make([]error, len(raws))}
	for i, raw := range raws {
		claim, m, err := w.identify(raw)
		if err != nil {
			observe(ctx, Event{Step: StepIdentify, Consumer: w.name, Position: raw.Position, Err: err})
			g.errs[i] = err
			continue
		}
		observe(ctx, Event{Step: StepIdentify, Consumer: w.name, Position: raw.Position, KeyHash: claim.Key.String()})
		g.errs[i] = errNotRun
		g.claims, g.ms, g.at = append(g.claims, claim), append(g.ms, m), append(g.at, i)
	}
	if len(g.claims) > 0 {
		g.isolate(ctx)
	}
	return g.errs
}

// group is the messages of a batch that name an event.
type group struct {
	w      *wrapped
	claims []dedupe.Claim
	ms     []*envelope.Message
	at     []int   // where each stands in errs
	errs   []error // of the batch
}

// isolate commits as much from the beginning as can be committed, and finds the
// first message that cannot. What is behind that one is not run, so that order
// is kept.
//
// lo is up to where all is committed, and the culprit is before hi: if a group
// fails and its first half does not, the culprit is in the second half, which
// need not be tried as a whole again.
func (g *group) isolate(ctx context.Context) {
	lo, hi := 0, len(g.claims)
	err := g.run(ctx, lo, hi)
	for err != nil {
		var member *memberError
		switch {
		case g.isEverybodys(err):
			g.set(lo, hi, err)
			return
		case errors.As(err, &member):
			culprit := lo + member.at
			g.set(culprit, culprit+1, member.err)
			if hi = culprit; hi == lo {
				return
			}
			err = g.run(ctx, lo, hi)
			continue
		case hi-lo == 1:
			g.set(lo, hi, err)
			return
		}
		mid := lo + (hi-lo)/2
		if half := g.run(ctx, lo, mid); half != nil {
			hi, err = mid, half
			continue
		}
		if lo = mid; hi-lo == 1 {
			err = g.run(ctx, lo, hi)
		}
	}
}

// isEverybodys reports an error that says nothing about a single message, and
// that trying fewer would not mend.
func (g *group) isEverybodys(err error) bool {
	switch Classify(err) {
	case ClassUnavailable, ClassUnknown, ClassContention:
		return true
	}
	return false
}

func (g *group) set(from, to int, err error) {
	for _, i := range g.at[from:to] {
		g.errs[i] = err
	}
}

// run is one transaction.
func (g *group) run(ctx context.Context, from, to int) error {
	start := time.Now()
	answers, err := g.w.each(ctx, g.claims[from:to], g.ms[from:to])
	if err != nil {
		observe(ctx, Event{Step: StepDecide, Consumer: g.w.name, Position: g.ms[from].Position, Err: err, Took: time.Since(start)})
		return err
	}
	for n, a := range answers {
		i := from + n
		observe(ctx, Event{Step: StepDecide, Consumer: g.w.name, Position: g.ms[i].Position, KeyHash: g.claims[i].Key.String(),
			Outcome: a.Outcome, Err: a.Err, Took: time.Since(start)})
		err := a.Err
		if err == nil && g.w.reply != nil && a.Outcome != dedupe.Conflict {
			err = g.w.reply(ctx, g.ms[i], a.Result)
		}
		g.errs[g.at[i]] = err
	}
	return nil
}

// checkBatch returns what is wrong with a run that is to commit in groups.
func (r *runner) checkBatch() error {
	if r.o.Batch.Max <= 1 {
		return nil
	}
	h, ok := r.h.(batchHandler)
	if !ok || !h.batches() {
		return fmt.Errorf("consumer: Run: Batch.Max is %d, which takes a handler of Wrap on a store that is a dedupe.Batcher, "+
			"such as that of pgdedupe.NewStore, and no middleware around it: it would see one message at a time", r.o.Batch.Max)
	}
	r.batch = h
	return nil
}

// settleGroup brings deliveries of one lane to their end, in order.
func (r *runner) settleGroup(ctx context.Context, jobs []*job) {
	for len(jobs) > 0 {
		if len(jobs) == 1 {
			jobs[0].run()
			return
		}
		errs := r.tryGroup(ctx, jobs)
		if errs == nil { // draining, or the source wants them back
			for _, j := range jobs {
				j.giveBack()
			}
			return
		}
		n := 0
		for n < len(jobs) && !errors.Is(errs[n], errNotRun) {
			jobs[n].conclude(errs[n])
			n++
		}
		jobs = jobs[n:]
	}
}

// conclude settles a delivery by what its group has found, and alone if it is to
// be tried again.
func (j *job) conclude(err error) {
	if cutShort(j.ctx, err) {
		j.giveBack()
		return
	}
	if !j.judge(err) {
		j.run()
	}
}

// tryGroup runs the handlers of a group once; nil if they are not to be started.
// Its first answer is never errNotRun.
func (r *runner) tryGroup(ctx context.Context, jobs []*job) []error {
	first := jobs[0]
	if !r.gate.enter(first.ctx, r.draining, first.d.Stopping) {
		return nil
	}
	if !first.takeWorker() {
		r.gate.leave()
		return nil
	}
	defer func() { <-r.workers }()
	errs := r.handleGroup(ctx, jobs)
	for _, err := range errs {
		if err != nil && !errors.Is(err, errNotRun) {
			first.report(err)
			return errs
		}
	}
	first.report(nil)
	return errs
}

// handleGroup calls the handler under its time-out. A panic is everybody's until
// each is tried alone.
func (r *runner) handleGroup(ctx context.Context, jobs []*job) (errs []error) {
	if r.o.HandlerTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, r.o.HandlerTimeout)
		defer cancel()
	}
	raws := make([]*envelope.Message, len(jobs))
	for i, j := range jobs {
		raws[i] = j.d.Message
	}
	r.running.begin(jobs[0])
	defer r.running.end(jobs[0])
	defer func() {
		if v := recover(); v != nil {
			errs = alone(jobs)
		}
	}()
	return r.batch.handleBatch(ctx, raws)
}

// alone tries the first of a group by itself: what panicked in a group is found
// out one by one, under the care that a single handler gets.
func alone(jobs []*job) []error {
	errs := make([]error, len(jobs))
	for i := range errs {
		errs[i] = errNotRun
	}
	errs[0] = jobs[0].handle()
	return errs
}
