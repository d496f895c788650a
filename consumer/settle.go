package consumer

import (
	"context"
	"errors"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

// settleTimeout bounds one Ack, Nack or Return.
const settleTimeout = 10 * time.Second

// settle brings d to its end: one of ack, nack, return, or nothing when the
// claim on it is lost.
func (r *runner) settle(d *brokers.Delivery) {
	j, end := r.begin(d)
	defer end()
	settled := false
	defer func() {
		if !settled { // the handler ended its goroutine
			j.giveBack()
		}
	}()
	j.run()
	settled = true
}

// begin makes the job of a delivery. end is called when d is settled.
func (r *runner) begin(d *brokers.Delivery) (j *job, end func()) {
	j = &job{runner: r, d: d, failures: r.failures.get(d.Message.Position)}
	ctx, cancel := context.WithCancelCause(r.base)
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
	return j, func() {
		close(stop)
		cancel(nil)
		r.unsettled.Add(-1)
		<-r.inFlight
	}
}

// settleAll is settle for deliveries of one lane that share a transaction. The
// group's context ends when that of any of them does: what is committed for one
// is committed for all.
func (r *runner) settleAll(ds []*brokers.Delivery) {
	ctx, cancel := context.WithCancelCause(r.base)
	defer cancel(nil)
	jobs := make([]*job, len(ds))
	for i, d := range ds {
		j, end := r.begin(d)
		defer end()
		defer context.AfterFunc(j.ctx, func() { cancel(context.Cause(j.ctx)) })()
		jobs[i] = j
	}
	settled := false
	defer func() {
		if !settled { // a handler ended its goroutine
			for _, j := range jobs {
				j.giveBack()
			}
		}
	}()
	r.settleGroup(ctx, jobs)
	settled = true
}

// job is the work on one delivery.
type job struct {
	*runner
	ctx      context.Context // of the handler: ends with the grace or the claim
	d        *brokers.Delivery
	failures int  // of the handler on this message
	delays   int  // tries that were nobody's failure, in a row
	dead     bool // the dead letters have it
}

// run tries until the delivery is settled.
func (j *job) run() {
	for {
		ran, err := j.try()
		if !ran || cutShort(j.ctx, err) {
			j.giveBack()
			return
		}
		if j.judge(err) {
			return
		}
	}
}

// try runs the handler once, when it is its turn. It reports false if the
// handler is not to be started: the run drains, or the source wants d back.
func (j *job) try() (ran bool, err error) {
	if !j.gate.enter(j.ctx, j.draining, j.d.Stopping) {
		return false, nil
	}
	if !j.take(j.workers) {
		j.gate.leave()
		return false, nil
	}
	defer func() { <-j.workers }()
	if ran, err = j.counted(j.handle); !ran {
		j.gate.leave()
		return false, nil
	}
	j.report(err)
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

// report tells the gate what the handler met.
func (j *job) report(err error) {
	if Classify(err) != ClassUnavailable {
		if j.gate.pass() {
			observe(j.ctx, Event{Step: StepResume})
		}
		return
	}
	if after, first := j.gate.trip(err); first {
		observe(j.ctx, Event{Step: StepPause, Class: ClassUnavailable, Err: err, Wait: after})
	}
}

// judge settles d by the handler's answer, and reports false if it is to be
// tried again here.
func (j *job) judge(err error) (settled bool) {
	class := Classify(err)
	switch class {
	case ClassNone:
		j.ack()
		return true
	case ClassPermanent:
		if !errors.Is(err, ErrUnroutedType) { // which no handler has seen
			j.failures++
		}
		return j.bury(class, err)
	case ClassMalformed, ClassUncertain, ClassCrashLoop:
		return j.bury(class, err)
	case ClassFailed:
		j.failures++
		if j.o.MaxAttempts > 0 && j.failures >= j.o.MaxAttempts {
			return j.bury(class, err)
		}
		return j.again(class, err, j.o.Backoff.after(j.failures))
	case ClassUnavailable:
		return false // the gate makes it wait
	}
	j.delays++
	return j.again(class, err, untilFree(err, j.o.Backoff.after(j.delays)))
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

// again has d tried again after a while: by the broker where it can wait and
// nothing behind d has to wait with it, otherwise here. An unknown commit is
// always tried here, since whoever asks next is told, and it is soon.
func (j *job) again(class Class, err error, after time.Duration) (settled bool) {
	observe(j.ctx, Event{Step: StepRetry, Position: j.d.Message.Position, Class: class, Err: err, Attempt: j.failures, Wait: after})
	if j.nacker != nil && j.d.Lane == "" && class != ClassUnknown {
		j.remember()
		j.nack(after)
		return true
	}
	if !wait(j.ctx, after, j.draining, j.d.Stopping) {
		j.giveBack()
		return true
	}
	return false
}

// remember keeps the count for the next delivery, which may come to us.
func (j *job) remember() {
	if j.failures > 0 && j.d.Message.Position != "" {
		j.runner.failures.set(j.d.Message.Position, j.failures)
	}
}

// bury hands the message to the dead letters, again and again until they have
// it, and acknowledges it then. The handler does not run again meanwhile.
func (j *job) bury(class Class, err error) (settled bool) {
	f := &Failure{Message: j.d.Message, Class: class, Reason: reason(class, err), Attempts: j.failures, Err: err}
	for n := 1; ; n++ {
		dead := j.deadLetter(f)
		observe(j.ctx, Event{Step: StepDeadLetter, Position: j.d.Message.Position, Class: class, Attempt: j.failures, Err: dead})
		if dead == nil {
			j.ack()
			if class == ClassCrashLoop { // whoever mends the handler may rewind
				j.countEnd(j.ctx, j.place())
			}
			return true
		}
		if !wait(j.ctx, j.o.Backoff.after(n), j.draining, j.d.Stopping) {
			j.giveBack()
			return true
		}
	}
}

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
	j.runner.failures.forget(j.d.Message.Position)
	ctx, cancel := j.detached()
	defer cancel()
	start := time.Now()
	err := j.src.Ack(ctx, j.d)
	observe(j.ctx, Event{Step: StepAck, Position: j.d.Message.Position, Err: err, Took: time.Since(start)})
}

func (j *job) nack(after time.Duration) {
	ctx, cancel := j.detached()
	defer cancel()
	if err := j.nacker.Nack(ctx, j.d, after); err != nil && !errors.Is(err, brokers.ErrLost) {
		observe(j.ctx, Event{Step: StepReturn, Position: j.d.Message.Position, Err: err})
	}
}

// giveBack hands d back as not done.
func (j *job) giveBack() {
	j.remember()
	ctx, cancel := j.detached()
	defer cancel()
	err := j.src.Return(ctx, j.d)
	observe(j.ctx, Event{Step: StepReturn, Position: j.d.Message.Position, Err: err})
}

// detached is the context of settling, which goes on when the handler's ends.
func (j *job) detached() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(j.ctx), settleTimeout)
}
