package consumer

import (
	"time"

	"github.com/unecho/unecho/brokers"
)

// lane is the queue of deliveries that are handled one after the other. Its
// length is bounded by MaxInFlight over all lanes, and by the source.
type lane struct {
	queue []queued
	more  chan struct{} // has one when something was queued
	apart bool          // of one key, beside a lane of groups: no groups are made
}

// queued is a delivery, or a job that has begun and goes on here.
type queued struct {
	d    *brokers.Delivery
	j    *job
	work func(j *job)
}

// dispatch gives d to its lane, and starts the lane's goroutine if it has
// none.
func (r *runner) dispatch(d *brokers.Delivery) {
	name := r.laneOf(d)
	if name == "" {
		r.wg.Go(func() { r.settle(d) })
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.batch != nil {
		if key := r.keyLane(d); key != "" && r.lanes[key] != nil { // it waits for one that waits aside
			name = key
		}
	}
	r.queue(name, queued{d: d}, false)
}

// queue adds to a lane. r.mu is held.
func (r *runner) queue(name string, q queued, apart bool) {
	if l, ok := r.lanes[name]; ok {
		l.queue = append(l.queue, q)
		select {
		case l.more <- struct{}{}:
		default:
		}
		return
	}
	l := &lane{queue: []queued{q}, more: make(chan struct{}, 1), apart: apart}
	r.lanes[name] = l
	r.wg.Go(func() { r.work(name, l) })
}

// aside has j, of the lane l of groups, go on beside it, with what comes behind it
// and has its key. What is in l already moves there in the same step, or one of
// them could be handled before j.
func (r *runner) aside(l *lane, j *job, work func(j *job)) {
	name := r.keyLane(j.d)
	if name == "" {
		r.wg.Go(func() { r.finish(j, work) })
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queue(name, queued{d: j.d, j: j, work: work}, true)
	rest := l.queue[:0:0]
	for _, q := range l.queue {
		if r.keyLane(q.d) == name {
			r.queue(name, q, true)
		} else {
			rest = append(rest, q)
		}
	}
	l.queue = rest
}

// isAside reports whether something of d's key waits aside.
func (r *runner) isAside(d *brokers.Delivery) bool {
	name := r.keyLane(d)
	if name == "" {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lanes[name] != nil
}

// work settles the deliveries of l in order, and ends when there are none: the
// next delivery starts it anew. Taking the last one and ending are one step
// under the lock, or a delivery could be queued in between and stay there.
// A handler that ends its goroutine does not end the lane: another one goes on.
func (r *runner) work(name string, l *lane) {
	done := false
	defer func() {
		if !done {
			r.wg.Go(func() { r.work(name, l) })
		}
	}()
	for {
		if r.batch != nil && !l.apart {
			r.fill(l)
		}
		qs := r.next(name, l)
		switch {
		case len(qs) == 0:
			done = true
			return
		case qs[0].j != nil:
			r.finish(qs[0].j, qs[0].work)
		case r.batch == nil || l.apart:
			r.settle(qs[0].d)
		default:
			r.settleAll(l, qs)
		}
	}
}

// fill waits until a group is full, as long as that may take.
func (r *runner) fill(l *lane) {
	if r.o.Batch.Wait <= 0 {
		return
	}
	t := time.NewTimer(r.o.Batch.Wait)
	defer t.Stop()
	for {
		r.mu.Lock()
		n := len(l.queue)
		r.mu.Unlock()
		if n == 0 || n >= r.o.Batch.Max { // with none the lane ends, and the next delivery begins the wait
			return
		}
		select {
		case <-l.more:
		case <-t.C:
			return
		case <-r.draining:
			return
		}
	}
}

// next takes the head of l, or as much of it as makes a group, or takes l out
// and returns none.
func (r *runner) next(name string, l *lane) []queued {
	r.mu.Lock()
	defer r.mu.Unlock()
	most := max(1, r.o.Batch.Max)
	if l.apart {
		most = 1
	}
	n := min(len(l.queue), most)
	if n == 0 {
		delete(r.lanes, name)
		return nil
	}
	n = oneClaim(l.queue[:n])
	qs := make([]queued, n)
	copy(qs, l.queue)
	clear(l.queue[:n])
	l.queue = l.queue[n:]
	return qs
}

// oneClaim is how many of qs, from the beginning, are wanted back, or how many are
// not. A lane may hold what was lost in a rebalance, and behind it the same
// partition claimed anew: in one group the end of the first would end the others,
// too, and have them given back, while what is behind them in the lane is handled.
func oneClaim(qs []queued) int {
	for i, q := range qs {
		if wantedBack(q.d) != wantedBack(qs[0].d) {
			return i
		}
	}
	return len(qs)
}

func wantedBack(d *brokers.Delivery) bool { return closed(d.Stopping) || closed(d.Lost) }
