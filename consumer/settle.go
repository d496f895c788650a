package consumer

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

// settleTimeout bounds one Ack, Nack or Return.
const settleTimeout = 10 * time.Second

// settle brings d to its end: one of ack, nack, return, or nothing when the
// claim on it is lost.
func (r *runner) settle(d *brokers.Delivery) { r.finish(r.begin(d), (*job).run) }

// finish works on j and ends it.
func (r *runner) finish(j *job, work func(j *job)) {
	defer j.end()
	settled := false
	defer func() {
		if !settled { // the handler ended its goroutine
			j.giveBack()
		}
	}()
	work(j)
	settled = true
}

// begin makes the job of a delivery of the broker.
func (r *runner) begin(d *brokers.Delivery) *job {
	return r.newJob(d, r.home, r.past.get(d.Message.Position), func() {
		r.unsettled.Add(-1)
		<-r.inFlight
		r.gate.settled()
	})
}

// newJob makes a job. end is called when it has ended.
func (r *runner) newJob(d *brokers.Delivery, h home, past history, end func()) *job {
	j := &job{runner: r, d: d, home: h, failures: past.failures, mind: past.mind, doomed: past.doomed, trail: &trail{}}
	if j.mind == nil {
		j.mind = &mind{}
	}
	ctx, cancel := context.WithCancelCause(context.WithValue(r.base, trailKey{}, j.trail))
	j.ctx = ctx
	stop := make(chan struct{})
	if d.Lost != nil {
		go func() {
			select {
			case <-d.Lost:
				cancel(brokers.ErrLost)
			case <-stop:
			}
		}()
	}
	j.end = sync.OnceFunc(func() {
		close(stop)
		cancel(nil)
		r.gate.forget(j.mind)
		r.waits.end(j)
		end()
	})
	return j
}

// settleAll is settle for deliveries of one lane that share a transaction. The
// group's context ends when that of any of them does: what is committed for one
// is committed for all.
func (r *runner) settleAll(l *lane, qs []queued) {
	ctx, cancel := context.WithCancelCause(r.base)
	defer cancel(nil)
	g := &groupRun{runner: r, lane: l}
	for _, q := range qs {
		g.watch(r.begin(q.d), cancel)
	}
	defer g.end()
	g.settle(ctx)
	g.settled = true
}

// job is the work on one delivery.
type job struct {
	*runner
	ctx      context.Context // of the handler: ends with the grace or the claim
	d        *brokers.Delivery
	home     home    // where it is settled
	mind     *mind   // what the gate knows of it
	trail    *trail  // of the try that runs, or the last one
	failures int     // of the handler on this message
	delays   int     // tries that were nobody's failure, in a row
	tries    int     // of this delivery
	dead     bool    // the dead letters have it
	doomed   *ruling // it is for the dead letters
	last     ruling  // on the last try that is to be followed by another one
	outage   testimony
	end      func() // may be called twice
}

// testimony is what the gate has made of a try that has met an outage.
type testimony struct {
	charged bool
	after   time.Duration
}

// home is where a message is settled: the broker, or the place of what was
// deferred.
type home interface {
	ack(ctx context.Context, j *job) error
	giveBack(ctx context.Context, j *job) error
	// waits reports whether it can keep j's message until it is to be tried again.
	waits(j *job, class Class) bool
	// nack hands the message back, to be tried again not before after.
	nack(ctx context.Context, j *job, after time.Duration) error
}

// brokerHome settles with the broker.
type brokerHome struct{ r *runner }

func (h brokerHome) ack(ctx context.Context, j *job) error {
	h.r.past.forget(j.d.Message.Position)
	return h.r.src.Ack(ctx, j.d)
}

func (h brokerHome) giveBack(ctx context.Context, j *job) error {
	h.remember(j)
	return h.r.src.Return(ctx, j.d)
}

// waits: the broker can where nothing behind the message has to wait with it. An
// unknown commit is always tried here, since whoever asks next is told, and it is
// soon.
func (h brokerHome) waits(j *job, class Class) bool {
	return h.r.nacker != nil && j.d.Lane == "" && class != ClassUnknown
}

func (h brokerHome) nack(ctx context.Context, j *job, after time.Duration) error {
	h.remember(j)
	return h.r.nacker.Nack(ctx, j.d, after)
}

// remember keeps what is known for the next delivery, which may come to us.
func (h brokerHome) remember(j *job) {
	if j.d.Message.Position == "" || j.failures == 0 && j.doomed == nil && !h.r.gate.knows(j.mind) {
		return
	}
	h.r.past.set(j.d.Message.Position, history{failures: j.failures, mind: j.mind, doomed: j.doomed})
}

// run tries until the delivery is settled.
func (j *job) run() {
	if j.doomed != nil {
		j.bury(j.doomed.class, j.doomed.reason, j.doomed.err)
		return
	}
	if joined, ok := j.joins(); joined || !ok {
		return
	}
	for {
		ran, err := j.try()
		if !ran {
			j.giveBack()
			return
		}
		if j.answer(err) {
			return
		}
	}
}

// conclude goes on with a delivery of which a try has ended with err.
func (j *job) conclude(err error) {
	if !j.answer(err) {
		j.run()
	}
}

// answer settles the delivery by what a try has ended with, and reports false if
// it is to be tried again here.
func (j *job) answer(err error) (settled bool) {
	if cutShort(j.ctx, err) {
		j.giveBack()
		return true
	}
	return j.judge(err)
}

// try runs the handler once, when it is its turn. It reports false if the
// handler is not to be started: the run drains, or the source wants d back.
func (j *job) try() (ran bool, err error) {
	v, ok := j.gate.enter(j.ctx, j.mind, j.draining, j.d.Stopping)
	if !ok {
		return false, nil
	}
	defer j.gate.leave(v)
	if !j.take(j.workers) {
		return false, nil
	}
	defer func() { <-j.workers }()
	j.trail.reset()
	if ran, err = j.counted(j.handle); !ran {
		return false, nil
	}
	j.tries++
	j.report(v, err)
	return true, err
}

// take waits for a token, such as that of a free worker. When it and a reason to
// stop come together, the reason wins. The claim is looked at itself, since the
// context hears of its end from another goroutine, later:
//
//	a rebalance takes the claims on A and B, in one lane; A's handler is cut off
//	B is next, and its context is not done yet: B would be handled
//	A comes again, behind B's effect
func (j *job) take(tokens chan struct{}) bool {
	select {
	case tokens <- struct{}{}:
	case <-j.draining:
		return false
	case <-j.d.Stopping:
		return false
	case <-j.ctx.Done():
		return false
	}
	if closed(j.draining) || closed(j.d.Stopping) || closed(j.d.Lost) || j.ctx.Err() != nil {
		<-tokens
		return false
	}
	return true
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// handle calls the handler under its time-out and makes an error of a panic.
func (j *job) handle() error {
	ctx := j.ctx
	if j.o.HandlerTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, j.o.HandlerTimeout)
		defer cancel()
	}
	j.running.begin(j)
	defer j.running.end(j)
	run := guarded
	if j.ordered {
		run = sheltered
	}
	return run(func() error { return j.h.Handle(ctx, j.d.Message) })
}

// report tells the gate what a try has met.
func (j *job) report(v visit, err error) {
	j.outage = testimony{}
	if cutShort(j.ctx, err) {
		return
	}
	if j.o.classify(err) != ClassUnavailable {
		j.vouch(v, err)
		return
	}
	s := j.subjectOf(err)
	charged, shut, after := j.gate.bad(v, s, err)
	j.outage = testimony{charged && mayCharge(err), after}
	if charged && !j.outage.charged {
		j.outage.after = j.o.Backoff.after(j.delays + 1)
	}
	j.told(false, shut, err)
	if !isStores(err) {
		j.vouch(v, err) // for the store
		return
	}
	if probe := j.probe(err); probe != nil && !charged {
		ctx, cancel := context.WithTimeout(j.ctx, settleTimeout)
		defer cancel()
		opened, shut := j.gate.ask(ctx, s, probe)
		j.told(opened, shut, err)
	}
}

// probe returns how to ask the store itself that has said err; nil if that is not
// possible, or would tell nothing.
func (j *job) probe(err error) func(ctx context.Context) error {
	if !stated(err, dedupe.ErrUnavailable) {
		return nil
	}
	return j.stores[j.trail.store()].probe
}

// vouch tells the gate who has served a try that was no outage of theirs.
func (j *job) vouch(v visit, err error) {
	served := func(key any) {
		if s := j.gate.find(key); s != nil {
			j.told(j.gate.served(v, s), false, nil)
		}
	}
	key, answered := j.trail.store(), err == nil || errors.As(err, new(*handlerError))
	for _, said := range [...]error{dedupe.ErrInProgress, dedupe.ErrContention, dedupe.ErrRateLimited, dedupe.ErrParked} {
		answered = answered || stated(err, said)
	}
	if key != nil && answered && !isStores(err) || key == nil && err == nil {
		served(key)
	}
	if err != nil || !j.trail.handled() {
		return
	}
	served(markedKey{})
	served(brokerKey{})
	for _, s := range j.gate.met(j.mind) {
		j.told(j.gate.served(v, s), false, nil)
	}
}

// told lets the observer know.
func (j *job) told(opened, shut bool, err error) {
	switch {
	case opened:
		observe(j.ctx, Event{Step: StepResume})
	case shut:
		observe(j.ctx, Event{Step: StepPause, Class: ClassUnavailable, Err: err, Wait: j.gate.backoff.Min})
	}
}

// judge settles d by the handler's answer, and reports false if it is to be
// tried again here.
func (j *job) judge(err error) (settled bool) {
	class := j.o.classify(err)
	why := reason(class, err)
	if class == ClassUnavailable && j.outage.charged {
		class, why = ClassFailed, ReasonOwnOutage
	}
	switch class {
	case ClassNone:
		j.ack()
		return true
	case ClassPermanent:
		if !errors.Is(err, ErrUnroutedType) { // which no handler has seen
			j.failures++
		}
		return j.bury(class, why, err)
	case ClassMalformed, ClassUncertain, ClassCrashLoop:
		return j.bury(class, why, err)
	case ClassFailed:
		j.failures++
		if j.o.MaxAttempts > 0 && j.failures >= j.o.MaxAttempts {
			return j.bury(class, why, err)
		}
		return j.again(class, err, j.o.Backoff.after(j.failures))
	case ClassUnavailable:
		return j.hold(err)
	}
	j.delays++
	return j.again(class, err, untilFree(err, j.o.Backoff.after(j.delays)))
}

// hold has a message wait that has met an outage nobody is charged for: here, for
// it is known to be short, or at the gate.
func (j *job) hold(err error) (settled bool) {
	j.delays++
	if j.outage.after <= 0 {
		j.waits.begin(j, false, ClassUnavailable, err)
		return false
	}
	observe(j.ctx, Event{Step: StepRetry, Position: j.d.Message.Position, Class: ClassUnavailable, Err: err, Attempt: j.failures, Wait: j.outage.after})
	return j.waitHere(ClassUnavailable, err, j.outage.after)
}

// untilFree shortens a wait for a key that another one holds under a lease, so
// that it ends with the lease. It is not made longer: the other one may be done
// any moment.
func untilFree(err error, after time.Duration) time.Duration {
	var held *dedupe.HeldError
	if errors.As(err, &held) {
		return min(after, held.Left+dedupe.LeastLifetime)
	}
	return after
}

// again has d tried again after a while: by its home where that can wait,
// otherwise here until it is deferred, if that was asked for.
func (j *job) again(class Class, err error, after time.Duration) (settled bool) {
	observe(j.ctx, Event{Step: StepRetry, Position: j.d.Message.Position, Class: class, Err: err, Attempt: j.failures, Wait: after})
	j.last = ruling{class: class, err: err}
	if j.home.waits(j, class) {
		j.nack(after, class, err)
		return true
	}
	if j.deferred(class, err, after) {
		return true
	}
	return j.waitHere(class, err, after)
}

// waitHere keeps d, and what has to wait behind it, for a while. It reports true if
// d was given back instead.
func (j *job) waitHere(class Class, err error, after time.Duration) (settled bool) {
	j.waits.begin(j, false, class, err)
	if !wait(j.ctx, after, j.draining, j.d.Stopping) {
		j.giveBack()
		return true
	}
	return false
}

// bury hands the message to the dead letters, again and again until they have
// it, and acknowledges it then. The handler does not run again meanwhile.
func (j *job) bury(class Class, why string, err error) (settled bool) {
	j.doomed = &ruling{class, why, err}
	f := &Failure{Message: j.d.Message, Class: class, Reason: why, Attempts: j.failures, Err: err}
	for n := 1; ; n++ {
		dead := j.deadLetter(f)
		observe(j.ctx, Event{Step: StepDeadLetter, Position: j.d.Message.Position, Class: class, Attempt: j.failures, Err: dead})
		if dead == nil {
			j.waits.taken(j.d.Message.Position)
			j.ack()
			if class == ClassCrashLoop { // whoever mends the handler may rewind
				j.countEnd(j.ctx, j.place())
			}
			return true
		}
		j.waits.begin(j, true, class, dead)
		after := j.o.Backoff.after(n)
		if j.home.waits(j, class) && n >= maxPlacing {
			j.waits.keep(j, after)
			j.nack(after, class, dead)
			return true
		}
		if !wait(j.ctx, after, j.draining, j.d.Stopping) {
			j.giveBack()
			return true
		}
	}
}

// maxPlacing is how often a message is offered to the dead letters before the
// broker gets it back, where it can keep it: it must not hold a place among those
// in hand for ever. The handler does not run again when it comes.
const maxPlacing = 3

// ReasonOwnOutage is the reason of a dead letter that has met an outage again and
// again while others that need the same were served.
const ReasonOwnOutage = "unavailable_for_it_alone"

// reason is machine-readable: what is wrong with a malformed message, otherwise
// the class.
func reason(class Class, err error) string {
	var payload *PayloadError
	switch why := envelope.Reason(err); {
	case errors.As(err, &payload):
		return ReasonBadPayload
	case errors.Is(err, ErrUnroutedType):
		return ReasonUnrouted
	case class == ClassCrashLoop:
		return ReasonCrashLoop
	case why != "" && class == ClassMalformed:
		return why
	}
	return string(class)
}

// deadLetter calls the hook until it has succeeded once, bounded and guarded as a
// handler is, and then tells the handler.
func (j *job) deadLetter(f *Failure) error {
	ctx, cancel := context.WithTimeout(j.ctx, settleTimeout)
	defer cancel()
	if !j.dead {
		if err := guarded(func() error { return j.o.DeadLetter(ctx, f) }); err != nil {
			return err
		}
		j.dead = true
	}
	return pass(ctx, j.h, f.Message)
}

// ack settles d as done. When that fails nothing is lost: d comes back, is
// recognised, and is acknowledged then.
func (j *job) ack() {
	ctx, cancel := j.detached()
	defer cancel()
	start := time.Now()
	err := j.home.ack(ctx, j)
	observe(j.ctx, Event{Step: StepAck, Position: j.d.Message.Position, Err: err, Took: time.Since(start)})
}

func (j *job) nack(after time.Duration, class Class, why error) {
	ctx, cancel := j.detached()
	defer cancel()
	if err := j.home.nack(ctx, j, after); err != nil && !errors.Is(err, brokers.ErrLost) {
		observe(j.ctx, Event{Step: StepReturn, Position: j.d.Message.Position, Class: class, Err: errors.Join(err, why)})
	}
}

// giveBack hands d back as not done.
func (j *job) giveBack() {
	ctx, cancel := j.detached()
	defer cancel()
	err := j.home.giveBack(ctx, j)
	observe(j.ctx, Event{Step: StepReturn, Position: j.d.Message.Position, Err: err})
}

// detached is the context of settling, which goes on when the handler's ends.
func (j *job) detached() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(j.ctx), settleTimeout)
}
