package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
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

// groupHandler is a handler that takes several messages in one transaction.
type groupHandler interface {
	// groups returns nil, or why it cannot.
	groups() error
	// handleGroup answers for each message as Handle does, or ErrNotRun. The
	// first answer is not ErrNotRun.
	handleGroup(ctx context.Context, ms []*member) []error
}

// groupsOf returns h as a handler of groups, or why it is none.
func groupsOf(h Handler) (groupHandler, error) {
	g, ok := h.(groupHandler)
	if !ok {
		return nil, errors.New("it takes a handler of Wrap or WrapBatch, or of Chain or Route over them")
	}
	return g, g.groups()
}

// member is a message of a group.
type member struct {
	raw *envelope.Message
	// ctx has the values for its handler, and ends it. It is not that of the
	// transaction.
	ctx context.Context //nolint:containedctx // each message has one
	// begun notes that its handler runs, until ended is called; nil notes
	// nothing.
	begun func() (ended func())
	// timeout bounds one run of its handler; not positive is no bound.
	timeout time.Duration
}

// within calls the handler of m in the context of a transaction, with the
// values, the end and the time-out of its own.
func (m *member) within(tx context.Context, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithCancelCause(valuesOf{tx, context.WithoutCancel(m.ctx)})
	defer cancel(nil)
	defer context.AfterFunc(m.ctx, func() { cancel(context.Cause(m.ctx)) })()
	if m.timeout > 0 {
		var end context.CancelFunc
		ctx, end = context.WithTimeout(ctx, m.timeout)
		defer end()
	}
	if m.begun != nil {
		defer m.begun()()
	}
	return f(ctx)
}

// valuesOf is a context with values of another one in front of its own.
type valuesOf struct {
	context.Context
	first context.Context //nolint:containedctx // for its values alone
}

func (v valuesOf) Value(key any) any {
	if found := v.first.Value(key); found != nil {
		return found
	}
	return v.Context.Value(key)
}

// memberError is the failure of one handler of a group.
type memberError struct {
	at  int // in the claims
	err error
}

func (e *memberError) Error() string { return e.err.Error() }
func (e *memberError) Unwrap() error { return e.err }

// item is a message of a group that names an event.
type item struct {
	*member
	claim dedupe.Claim
	m     *envelope.Message // decoded
	at    int               // in the group
	place place             // of a handler by positions
}

func claimsOf(items []item) []dedupe.Claim {
	claims := make([]dedupe.Claim, len(items))
	for i, it := range items {
		claims[i] = it.claim
	}
	return claims
}

// eachOf erases the type parameter from a store that is a Batcher.
func eachOf[S any](name string, b dedupe.Batcher[S], h func(ctx context.Context, scope S, m *envelope.Message) ([]byte, error)) func(context.Context, []item) ([]dedupe.Answer, error) {
	return func(ctx context.Context, items []item) ([]dedupe.Answer, error) {
		return b.OnceEach(ctx, claimsOf(items), func(ctx context.Context, scope S, fresh []int) ([][]byte, error) {
			replies := make([][]byte, len(fresh))
			for n, i := range fresh {
				it := items[i]
				err := it.within(ctx, func(ctx context.Context) (err error) {
					observe(ctx, Event{Step: StepHandle, Consumer: name, Position: it.m.Position})
					trailOf(ctx).runs()
					replies[n], err = h(withKey(ctx, it.claim.Key), scope, it.m)
					return ofHandler(err)
				})
				if err != nil {
					return nil, &memberError{i, err}
				}
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
	w.each = func(ctx context.Context, items []item) ([]dedupe.Answer, error) {
		return b.OnceEach(ctx, claimsOf(items), func(ctx context.Context, scope S, fresh []int) ([][]byte, error) {
			return nil, together(ctx, ctx, name, items, fresh, func(ctx context.Context, ms []*envelope.Message) error { return h(ctx, scope, ms) })
		})
	}
	return w
}

// together calls a set-based handler once for all fresh items, in the context of
// a transaction and with the values and the end of of.
func together(ctx, of context.Context, name string, items []item, fresh []int, h func(ctx context.Context, ms []*envelope.Message) error) error {
	some := make([]*envelope.Message, len(fresh))
	for n, i := range fresh {
		some[n] = items[i].m
		observe(ctx, Event{Step: StepHandle, Consumer: name, Position: items[i].raw.Position})
		trailOf(items[i].ctx).runs()
	}
	all := *items[fresh[0]].member
	all.ctx = of
	return all.within(ctx, func(ctx context.Context) error { return ofHandler(h(withKeysOf(ctx, items, fresh), some)) })
}

// groups implements groupHandler.
func (w *wrapped) groups() error {
	switch {
	case w.Shadow:
		return errors.New("in shadow mode (Options.Shadow) deliveries are handled one by one")
	case w.each == nil:
		return errors.New("its store is no dedupe.Batcher, such as that of pgdedupe.NewStore")
	}
	return nil
}

// handleGroup implements groupHandler.
func (w *wrapped) handleGroup(ctx context.Context, ms []*member) []error {
	g := &group{w: w, errs: make([]error, len(ms))}
	for i, member := range ms {
		claim, m, err := w.identify(member.raw)
		if err != nil {
			observe(ctx, Event{Step: StepIdentify, Consumer: w.name, Position: member.raw.Position, Err: err})
			g.errs[i] = err
			continue
		}
		observe(ctx, Event{Step: StepIdentify, Consumer: w.name, Position: member.raw.Position, KeyHash: claim.Key.String()})
		g.errs[i] = ErrNotRun
		g.items = append(g.items, item{member: member, claim: claim, m: m, at: i})
	}
	if len(g.items) > 0 {
		g.isolate(ctx)
	}
	return g.errs
}

// group is what is handled together.
type group struct {
	w     *wrapped
	items []item
	errs  []error // of all messages, also of those that name no event
}

// isolate commits as much from the beginning as can be committed, and finds the
// first message that cannot. What is behind that one is not run, so that order
// is kept.
//
// lo is up to where all is committed, and the culprit is before hi: if a group
// fails and its first half does not, the culprit is in the second half, which
// need not be tried as a whole again.
func (g *group) isolate(ctx context.Context) {
	lo, hi := 0, len(g.items)
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
	for _, it := range g.items[from:to] {
		g.errs[it.at] = err
	}
}

// run is one transaction.
func (g *group) run(ctx context.Context, from, to int) error {
	start := time.Now()
	items := g.items[from:to]
	for _, it := range items {
		trailOf(it.ctx).asks(g.w.ref.key)
	}
	answers, err := g.w.each(ctx, items)
	if err != nil {
		observe(ctx, Event{Step: StepDecide, Consumer: g.w.name, Position: items[0].m.Position, Err: err, Took: time.Since(start)})
		return err
	}
	for n, a := range answers {
		it := items[n]
		observe(ctx, Event{Step: StepDecide, Consumer: g.w.name, Position: it.m.Position, KeyHash: it.claim.Key.String(),
			Outcome: a.Outcome, Err: a.Err, Took: time.Since(start)})
		g.errs[it.at] = a.Err
		if a.Err == nil && g.w.reply != nil && a.Outcome != dedupe.Conflict {
			g.errs[it.at] = it.within(ctx, func(ctx context.Context) error { return g.w.reply(ctx, it.m, a.Result) })
		}
	}
	return nil
}

// checkBatch returns what is wrong with a run that is to commit in groups.
func (r *runner) checkBatch() error {
	if r.o.Batch.Max <= 1 {
		return nil
	}
	var err error
	if r.batch, err = groupsOf(r.h); err != nil {
		return fmt.Errorf("consumer: Run: Batch.Max is %d, but the handler cannot be run in groups: %w", r.o.Batch.Max, err)
	}
	return nil
}

// groupRun is a group on its way to the end of its deliveries.
type groupRun struct {
	*runner
	lane    *lane
	jobs    []*job // what is not elsewhere
	unwatch map[*job]func() bool
	settled bool
}

// watch ends the group's context with that of j.
func (g *groupRun) watch(j *job, cancel context.CancelCauseFunc) {
	g.jobs = append(g.jobs, j)
	if g.unwatch == nil {
		g.unwatch = make(map[*job]func() bool)
	}
	g.unwatch[j] = context.AfterFunc(j.ctx, func() { cancel(context.Cause(j.ctx)) })
}

// end ends what the group still has.
func (g *groupRun) end() {
	for _, j := range g.jobs {
		g.unwatch[j]()
		if !g.settled { // a handler ended its goroutine
			j.giveBack()
		}
		j.end()
	}
}

// settle brings the deliveries of a group to their end, in order. Where only the
// order of keys counts, or none, what has to wait does so aside, with those of its
// key, and the others go on.
func (g *groupRun) settle(ctx context.Context) {
	left := slices.Clone(g.jobs)
	for {
		left = g.sift(left)
		if len(left) == 0 {
			return
		}
		errs := g.try(ctx, left)
		if errs == nil { // draining, or the source wants them back
			for _, j := range left {
				j.giveBack()
			}
			return
		}
		n := 0
		for n < len(left) && !errors.Is(errs[n], ErrNotRun) {
			g.conclude(left[n], errs[n])
			n++
		}
		left = left[n:]
	}
}

// try is one try of all; nil if it is not to begin.
func (g *groupRun) try(ctx context.Context, jobs []*job) []error {
	if len(jobs) > 1 {
		return g.tryGroup(ctx, jobs)
	}
	ran, err := jobs[0].try()
	if !ran {
		return nil
	}
	return []error{err}
}

// conclude settles one, or has it go on elsewhere.
func (g *groupRun) conclude(j *job, err error) {
	if err == nil || !g.mayPass(j) {
		j.conclude(err)
		return
	}
	g.aside(j, func(j *job) { j.conclude(err) })
}

// mayPass reports whether those behind j need not wait for it.
func (g *groupRun) mayPass(j *job) bool { return g.o.Order != OrderByLane || j.d.Lane == "" }

// sift takes out of a group what waits for others of its key, or is for the dead
// letters already, and returns the rest.
func (g *groupRun) sift(jobs []*job) []*job {
	return slices.DeleteFunc(jobs, func(j *job) bool {
		if !g.mayPass(j) {
			return false
		}
		if j.doomed == nil && !g.isAside(j.d) && !g.deferrer.mayHold(j) {
			return false
		}
		g.aside(j, (*job).run)
		return true
	})
}

// aside gives j away.
func (g *groupRun) aside(j *job, work func(j *job)) {
	g.unwatch[j]()
	g.jobs = slices.DeleteFunc(g.jobs, func(o *job) bool { return o == j })
	g.runner.aside(g.lane, j, work)
}

// tryGroup runs the handlers of a group once; nil if they are not to be started.
// Its first answer is never ErrNotRun.
func (r *runner) tryGroup(ctx context.Context, jobs []*job) []error {
	first := jobs[0]
	v, ok := r.gate.enter(first.ctx, first.mind, r.draining, first.d.Stopping)
	if !ok {
		return nil
	}
	defer r.gate.leave(v)
	if !first.take(r.workers) {
		return nil
	}
	defer func() { <-r.workers }()
	for _, j := range jobs {
		j.trail.reset()
		j.outage = testimony{}
	}
	errs := r.countedGroup(ctx, jobs, func(jobs []*job) []error { return r.handleGroup(ctx, jobs) })
	r.reportGroup(v, jobs, errs)
	return errs
}

// reportGroup tells the gate what a group has met. Its transaction is one, so what
// all of it has met is the word of one.
func (r *runner) reportGroup(v visit, jobs []*job, errs []error) {
	good, bad := false, false
	for i, err := range errs {
		j := jobs[i]
		switch {
		case errors.Is(err, ErrNotRun):
			continue
		case err == nil && !good:
			good = true
		case err != nil && !bad:
			bad = true
		default:
			j.tries++
			continue
		}
		j.tries++
		j.report(visit{j.mind, v.began, v.probes}, err)
	}
}

// handleGroup calls the handler. Each run of it has its time-out; what is around
// them, the claims and the commit, is bounded by the store. A panic is everybody's
// until each is tried alone.
func (r *runner) handleGroup(ctx context.Context, jobs []*job) (errs []error) {
	ms := make([]*member, len(jobs))
	for i, j := range jobs {
		ms[i] = &member{raw: j.d.Message, ctx: j.ctx, timeout: r.o.HandlerTimeout, begun: func() func() {
			r.running.begin(j)
			return func() { r.running.end(j) }
		}}
	}
	defer func() {
		if v := recover(); v != nil {
			errs = alone(jobs)
		}
	}()
	return r.batch.handleGroup(ctx, ms)
}

// alone tries the first of a group by itself: what panicked in a group is found
// out one by one, under the care that a single handler gets.
func alone(jobs []*job) []error {
	errs := notRun(len(jobs))
	errs[0] = jobs[0].handle()
	return errs
}

// notRun are n answers that nothing has happened yet.
func notRun(n int) []error { return slices.Repeat([]error{ErrNotRun}, n) }
