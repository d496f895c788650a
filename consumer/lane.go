package consumer

import "github.com/unecho/unecho/brokers"

// lane is the queue of deliveries that are handled one after the other. Its
// length is bounded by MaxInFlight over all lanes, and by the source.
type lane struct {
	queue []*brokers.Delivery
}

// dispatch gives d to its lane, and starts the lane's goroutine if it has
// none. A delivery without a lane is a lane of its own.
func (r *runner) dispatch(d *brokers.Delivery) {
	if d.Lane == "" {
		r.wg.Go(func() { r.settle(d) })
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if l, ok := r.lanes[d.Lane]; ok {
		l.queue = append(l.queue, d)
		return
	}
	l := &lane{queue: []*brokers.Delivery{d}}
	r.lanes[d.Lane] = l
	r.wg.Go(func() { r.work(d.Lane, l) })
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
		d := r.next(name, l)
		if d == nil {
			done = true
			return
		}
		r.settle(d)
	}
}

// next takes the head of l, or takes l out and returns nil.
func (r *runner) next(name string, l *lane) *brokers.Delivery {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(l.queue) == 0 {
		delete(r.lanes, name)
		return nil
	}
	d := l.queue[0]
	l.queue[0] = nil
	l.queue = l.queue[1:]
	return d
}
