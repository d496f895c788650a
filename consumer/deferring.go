package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/unecho/unecho/brokers"
)

// deferLease is for how long a message that was taken from the place is ours
// without a sign of life.
const deferLease = 15 * time.Second

// ReasonDeferredTooLong is the reason of a dead letter that was deferred for
// longer than its handler keeps keys.
const ReasonDeferredTooLong = "deferred_too_long"

// errDeferredTooLong: see Defer.
var errDeferredTooLong = errors.New("consumer: the message was deferred for longer than the handler keeps its keys, so nobody can tell whether it was done: find out, and redrive or discard it")

// DeferredHealth is what waits in the place of [Defer].
type DeferredHealth struct {
	// Count is how many messages of the consumer there are.
	Count int
	// Oldest is the oldest of them, without its payload; nil if there is none.
	Oldest *Deferred
	// Err is why the place could not be asked last; nil if it could.
	Err error
}

// checkDefer returns what is wrong with a run that is to defer messages.
func (r *runner) checkDefer() error {
	o := &r.o.Defer
	if o.Place == nil {
		return nil
	}
	switch {
	case o.Consumer == "":
		return errors.New("consumer: Run: Defer.Consumer is empty: name the consumer whose messages are deferred")
	case r.ordered:
		return errors.New("consumer: Run: Defer has a Place, but a handler of WrapWatermark needs all of a partition in its order: its position would pass what was deferred")
	case r.o.Order == OrderByLane && r.nacker == nil:
		return errors.New("consumer: Run: Defer has a Place, but RunOptions.Order keeps the order of a whole lane, in which all wait for one that fails; set OrderByKey or Unordered")
	}
	if o.After <= 0 {
		o.After = 3
	}
	if o.Workers <= 0 {
		o.Workers = max(1, r.o.Concurrency/4)
	}
	if o.Poll <= 0 {
		o.Poll = 500 * time.Millisecond
	}
	r.deferrer = &deferrer{r: r, o: *o, lanes: make(map[string]*heldLane), slots: make(chan struct{}, o.Workers)}
	return nil
}

// deferrer puts messages into the place and takes them from there. A nil one does
// neither.
//
// The order of a key holds because only the owner of a lane puts its messages, one
// after the other, and asks before it handles the first one of a claim which
// queues there are:
//
//	A owns the lane, defers m5 of a key and acknowledges it
//	the lane goes to B, which reads the queues: m5's is there
//	B gets m6 of the key: it joins behind m5, or is handled if m5 is gone by then
//
// A may be slow and defer m5 when B has read the queues already. Then A's
// acknowledgement is refused, so B gets m5 itself, before m6; A's copy is a
// duplicate that its key recognises.
type deferrer struct {
	r     *runner
	o     Defer
	slots chan struct{} // a token for each message from the place that is in hand

	mu    sync.Mutex
	lanes map[string]*heldLane
	state DeferredHealth
	asked time.Time // when state was read
}

// heldLane are the queues of a lane that have something, as far as one claim on the
// lane knows: there are no others, and some may be empty by now.
type heldLane struct {
	claim <-chan struct{} // Delivery.Lost, which is another one after a rebalance

	mu     sync.Mutex
	queues map[QueueID]bool // nil: not read yet
}

func (d *deferrer) lane(of *brokers.Delivery) *heldLane {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.lanes[of.Lane]
	if l == nil || l.claim != of.Lost {
		l = &heldLane{claim: of.Lost}
		d.lanes[of.Lane] = l
	}
	return l
}

// holds reports whether there may be something in a queue, and reads the queues
// first if that was not done.
func (d *deferrer) holds(ctx context.Context, of *brokers.Delivery) (bool, error) {
	l := d.lane(of)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.queues == nil {
		ids, err := d.o.Place.Queues(ctx, d.o.Consumer, of.Lane)
		if err != nil {
			return false, fmt.Errorf("consumer: ask for what is deferred: %w", err)
		}
		l.queues = make(map[QueueID]bool, len(ids))
		for _, id := range ids {
			l.queues[id] = true
		}
	}
	return l.queues[QueueOf(of.Message.Key)], nil
}

func (d *deferrer) note(of *brokers.Delivery, held bool) {
	l := d.lane(of)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.queues == nil: // whoever needs them reads them
	case held:
		l.queues[QueueOf(of.Message.Key)] = true
	default:
		delete(l.queues, QueueOf(of.Message.Key))
	}
}

// mayHold reports whether j may have to join what is deferred. It asks nobody.
func (d *deferrer) mayHold(j *job) bool {
	if d == nil || j.keyLane(j.d) == "" || closed(j.d.Lost) {
		return false
	}
	l := d.lane(j.d)
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.queues == nil || l.queues[QueueOf(j.d.Message.Key)]
}

// joins puts j behind what is deferred of its key, if there is anything. joined
// means that j is settled; !ok that it was given back.
func (j *job) joins() (joined, ok bool) {
	d := j.deferrer
	if d == nil || j.home != home(brokerHome{j.runner}) || j.keyLane(j.d) == "" {
		return false, true
	}
	for n := 1; ; n++ {
		if closed(j.d.Lost) || closed(j.d.Stopping) || closed(j.draining) {
			j.giveBack()
			return false, false
		}
		joined, err := j.join()
		if err == nil {
			return joined, true
		}
		observe(j.ctx, Event{Step: StepJoin, Position: j.d.Message.Position, Class: j.o.classify(err), Err: err})
		if j.waitHere(ClassUnavailable, err, j.gate.backoff.after(n)) {
			return false, false
		}
	}
}

// join is one try of joins. An answer that was lost is asked for again: what is
// there already is not put there twice.
func (j *job) join() (joined bool, err error) {
	ctx, cancel := context.WithTimeout(j.ctx, settleTimeout)
	defer cancel()
	held, err := j.deferrer.holds(ctx, j.d)
	if err != nil || !held {
		return false, err
	}
	if joined, err = j.deferrer.o.Place.Put(ctx, j.asDeferred(), 0, true); err != nil {
		return false, fmt.Errorf("consumer: put a message behind what is deferred of its key: %w", err)
	}
	if !joined {
		j.deferrer.note(j.d, false)
		return false, nil
	}
	observe(j.ctx, Event{Step: StepJoin, Position: j.d.Message.Position})
	j.ack()
	return true, nil
}

func (j *job) asDeferred() *Deferred {
	return &Deferred{ID: parkedID(j.o.Defer.Consumer, j.d.Message), Consumer: j.o.Defer.Consumer, Lane: j.d.Lane,
		Key: j.queueKey(), Message: j.d.Message, Attempts: j.failures}
}

// queueKey is the key of the queue of j; nil if it has no order.
func (j *job) queueKey() []byte {
	if j.keyLane(j.d) == "" {
		return nil
	}
	return j.d.Message.Key
}

// deferred puts j into the place, if it has been tried often enough. False leaves
// it here, also if the place does not take it, or its answer was lost: then j goes
// on to be tried, and a copy in the place is recognised.
func (j *job) deferred(class Class, why error, after time.Duration) bool {
	if j.deferrer == nil || class == ClassUnknown || j.tries < j.o.Defer.After || closed(j.d.Lost) {
		return false
	}
	d := j.asDeferred()
	d.Class, d.Error = class, parkedError(why)
	ctx, cancel := context.WithTimeout(j.ctx, settleTimeout)
	defer cancel()
	_, err := j.o.Defer.Place.Put(ctx, d, after, false)
	observe(j.ctx, Event{Step: StepDefer, Position: j.d.Message.Position, Class: class, Attempt: j.failures, Err: err, Wait: after})
	if err != nil {
		return false
	}
	if d.Key != nil { // before the next one of the key
		j.deferrer.note(j.d, true)
	}
	j.ack()
	return true
}

// start takes what is due, until the function that it returns is called, which
// waits for the end of that. What was taken is settled like any delivery.
func (d *deferrer) start(ctx context.Context) (stop func()) {
	if d == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		d.takeAll(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

func (d *deferrer) takeAll(ctx context.Context) {
	for n := 0; ; {
		if !d.r.gate.waitRoom(ctx, func() bool { return false }) || !d.r.o.Control.waitResumed(ctx) {
			return
		}
		free := d.free(ctx)
		if free == 0 {
			return
		}
		took, err := d.take(ctx, free)
		for range free - took {
			<-d.slots
		}
		after := d.o.Poll
		switch {
		case err != nil:
			n++
			after = d.r.gate.backoff.after(n)
			observe(ctx, Event{Step: StepDefer, Class: Classify(err), Err: err, Wait: after})
		case took > 0:
			n = 0
			continue
		}
		d.look(ctx)
		if !wait(ctx, after) {
			return
		}
	}
}

// free waits for a slot, takes as many as there are, and returns how many; 0 if ctx
// is done.
func (d *deferrer) free(ctx context.Context) int {
	select {
	case d.slots <- struct{}{}:
	case <-ctx.Done():
		return 0
	}
	n := 1
	for n < cap(d.slots) {
		select {
		case d.slots <- struct{}{}:
			n++
			continue
		default:
		}
		break
	}
	return n
}

// take takes up to n messages that are due and starts on them.
func (d *deferrer) take(ctx context.Context, n int) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	began := time.Now()
	taken, err := d.o.Place.Take(ctx, d.o.Consumer, n, deferLease)
	if err != nil {
		return 0, fmt.Errorf("consumer: take what is deferred: %w", err)
	}
	for _, m := range taken {
		d.r.wg.Go(func() {
			defer func() { <-d.slots }()
			d.settle(m, began)
		})
	}
	return len(taken), nil
}

// look reads what there is, for Health.
func (d *deferrer) look(ctx context.Context) {
	d.mu.Lock()
	due := time.Since(d.asked) > 5*d.o.Poll
	if due {
		d.asked = time.Now()
	}
	d.mu.Unlock()
	if !due {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	some, n, err := d.o.Place.List(ctx, d.o.Consumer, 1)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state.Err = err; err != nil {
		return
	}
	d.state.Count, d.state.Oldest = n, nil
	if len(some) > 0 {
		d.state.Oldest = some[0]
	}
}

func (d *deferrer) health() DeferredHealth {
	if d == nil {
		return DeferredHealth{}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.state
}

// settle brings one message that was taken to its end.
func (d *deferrer) settle(m *Deferred, taken time.Time) {
	lost := make(chan struct{})
	h := &deferHome{r: d.r, m: m}
	past := d.r.past.get(m.Message.Position)
	past.failures = max(past.failures, m.Attempts)
	if keeps := d.r.keeps(); m.Age > keeps && past.doomed == nil {
		past.doomed = &ruling{ClassPermanent, ReasonDeferredTooLong, fmt.Errorf("%w: for %v, and keys are kept for %v", errDeferredTooLong, m.Age.Round(time.Second), keeps)}
	}
	done := make(chan struct{})
	var keeper sync.WaitGroup
	keeper.Go(func() { h.keep(taken, done, lost) })
	defer keeper.Wait()
	defer close(done)
	j := d.r.newJob(&brokers.Delivery{Message: m.Message, Lost: lost, Handle: m}, h, past, func() {})
	d.r.finish(j, (*job).run)
}

// keeps is how long the handler keeps keys.
func (r *runner) keeps() time.Duration {
	w := windowOf(r.h)
	if w == nil {
		return brokers.Forever
	}
	_, keeps := w.window()
	return keeps
}

// deferHome settles with the place.
type deferHome struct {
	r *runner
	m *Deferred

	mu sync.Mutex // of the lease: nothing extends it behind its end
}

// keep extends the lease until done is closed, and closes lost when another member
// may have the message.
func (h *deferHome) keep(since time.Time, done <-chan struct{}, lost chan<- struct{}) {
	for {
		t := time.NewTimer(deferLease / 3)
		select {
		case <-done:
			t.Stop()
			return
		case <-t.C:
		}
		before := time.Now()
		err := h.extend()
		switch {
		case err == nil:
			since = before
		case errors.Is(err, ErrDeferLost), time.Since(since) > deferLease-deferLease/5:
			close(lost)
			<-done
			return
		}
	}
}

func (h *deferHome) extend() error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(h.r.base), deferLease/5)
	defer cancel()
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.r.o.Defer.Place.Extend(ctx, h.m, deferLease)
}

func (h *deferHome) ack(ctx context.Context, j *job) error {
	h.r.past.forget(h.m.Message.Position)
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.r.o.Defer.Place.Remove(ctx, h.m)
}

func (h *deferHome) giveBack(ctx context.Context, j *job) error { return h.nack(ctx, j, 0) }

func (h *deferHome) waits(_ *job, class Class) bool { return class != ClassUnknown }

func (h *deferHome) nack(ctx context.Context, j *job, after time.Duration) error {
	brokerHome{h.r}.remember(j)
	h.mu.Lock()
	defer h.mu.Unlock()
	next := *h.m
	next.Attempts = j.failures
	if j.last.err != nil {
		next.Class, next.Error = j.last.class, parkedError(j.last.err)
	}
	return h.r.o.Defer.Place.Return(ctx, &next, after)
}
