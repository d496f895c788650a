package consumer

import (
	"time"

	"github.com/unecho/unecho/brokers"
)

// lane is the queue of deliveries that are handled one after the other. Its
// length is bounded by MaxInFlight over all lanes, and by the source.
type lane struct {
	queue []*brokers.Delivery
	more  chan struct{} // has one when something was queued
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
	if l, ok := r.lanes[name]; ok {
		l.queue = append(l.queue, d)
		select {
		case l.more <- struct{}{}:
		default:
		}
		return
	}
	l := &lane{queue: []*brokers.Delivery{d}, more: make(chan struct{}, 1)}
	r.lanes[name] = l
	r.wg.Go(func() { r.work(name, l) })
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
		if r.batch != nil {
			r.fill(l)
		}
		ds := r.next(name, l)
		switch len(ds) {
		case 0:
			done = true
			return
		case 1:
			r.settle(ds[0])
		default:
			r.settleAll(ds)
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
func (r *runner) next(name string, l *lane) []*brokers.Delivery {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := min(len(l.queue), max(1, r.o.Batch.Max))
	if n == 0 {
		delete(r.lanes, name)
		return nil
	}
	n = oneClaim(l.queue[:n])
	ds := make([]*brokers.Delivery, n)
	copy(ds, l.queue)
	clear(l.queue[:n])
	l.queue = l.queue[n:]
	return ds
}

// oneClaim is how many of ds, from the beginning, are wanted back, or how many are
// not. A lane may hold what was lost in a rebalance, and behind it the same
// partition claimed anew: in one group the end of the first would end the others,
// too, and have them given back, while what is behind them in the lane is handled.
func oneClaim(ds []*brokers.Delivery) int {
	for i, d := range ds {
		if wantedBack(d) != wantedBack(ds[0]) {
			return i
		}
	}
	return len(ds)
}

func wantedBack(d *brokers.Delivery) bool { return closed(d.Stopping) || closed(d.Lost) }
