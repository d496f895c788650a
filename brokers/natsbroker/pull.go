package natsbroker

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

// pull asks for as many messages as there are free places, until Close.
func (s *Source) pull() {
	status := s.nc.StatusChanged(nats.CONNECTED, nats.RECONNECTING, nats.CLOSED)
	defer s.nc.RemoveStatusListener(status)
	known, existed := false, false // the consumer: surely as we want it; ever seen
	for s.ctx.Err() == nil {
		for len(status) > 0 {
			<-status // of before
		}
		if !s.nc.IsConnected() && !s.nc.IsClosed() {
			s.await(status)
			continue
		}
		if s.stale.Swap(false) {
			known = false
		}
		if !known {
			if err := s.consumer(existed); err != nil {
				if s.hopeless(err) {
					return
				}
				s.c.OnError(err)
				s.pause(200 * time.Millisecond)
				continue
			}
			known, existed = true, true
		}
		free := s.free()
		if free == 0 {
			return
		}
		if err := s.request(free, status); err != nil {
			s.c.OnError(fmt.Errorf("natsbroker: pull: %w", err))
			s.pause(50 * time.Millisecond)
			known = false // it may be gone, which only asking for it tells
		}
	}
}

// await waits until the connection has changed.
func (s *Source) await(status <-chan nats.Status) {
	select {
	case <-status:
	case <-s.ctx.Done():
	}
}

// hopeless ends the source for errors that waiting does not mend.
func (s *Source) hopeless(err error) bool {
	var api *jetstream.APIError
	bad := errors.As(err, &api) && api.Code == 400
	for _, final := range []error{ErrDeleted, ErrForeign, errRefused, nats.ErrConnectionClosed, jetstream.ErrNotPullConsumer,
		jetstream.ErrInvalidConsumerName, jetstream.ErrInvalidStreamName} {
		bad = bad || errors.Is(err, final)
	}
	if bad {
		s.fail(err)
	}
	return bad
}

// free waits until there is a free place, and returns how many there are; 0
// after Close.
func (s *Source) free() int {
	for {
		s.mu.Lock()
		bound := s.bound
		if bound <= 0 {
			bound = defaultMaxInFlight
		}
		free, changed := bound-len(s.open), s.changed
		s.mu.Unlock()
		if s.ctx.Err() != nil {
			return 0
		}
		if free > 0 {
			return free
		}
		select {
		case <-changed:
		case <-s.ctx.Done():
			return 0
		}
	}
}

// request makes one pull request for n messages and takes in what it brings.
// It has an inbox of its own: what a request that was given up still brings
// does not count for the next one. The client's Fetch would do, but it throws
// away what it holds when it is cancelled, which then waits for AckWait, and
// takes an empty message with a header Status for one of the server's.
func (s *Source) request(n int, status <-chan nats.Status) error {
	r := &request{s: s, msgs: make(chan *nats.Msg, 2*n+16), left: n, since: time.Now()}
	inbox := s.nc.NewInbox()
	var err error
	if r.sub, err = s.nc.ChanSubscribe(inbox, r.msgs); err != nil {
		return err
	}
	body := fmt.Appendf(nil, `{"batch":%d,"expires":%d,"idle_heartbeat":%d}`, n, pullExpiry, pullHeartbeat)
	if err := s.nc.PublishRequest("$JS.API.CONSUMER.MSG.NEXT."+s.c.Stream+"."+s.c.Durable, inbox, body); err != nil {
		return errors.Join(err, r.sub.Unsubscribe())
	}
	return r.run(status)
}

// request is a pull request that the server has.
type request struct {
	s     *Source
	sub   *nats.Subscription
	msgs  chan *nats.Msg
	left  int       // messages that the server may still send
	since time.Time // nothing that is read from msgs was sent before
}

// run takes in what comes until the server is done with the request, or we are.
func (r *request) run(status <-chan nats.Status) error {
	silent := time.NewTimer(2 * pullHeartbeat)
	defer silent.Stop()
	for r.left > 0 {
		r.now()
		select {
		case m := <-r.msgs:
			silent.Reset(2 * pullHeartbeat)
			if over, err := r.take(m); over {
				return errors.Join(err, r.sub.Unsubscribe())
			}
		case <-r.s.ponged: // see now
		case <-silent.C:
			r.leave()
			return errors.New("no heartbeat of the server")
		case <-status: // the request went with the connection
			r.leave()
			return nil
		case <-r.s.ctx.Done():
			r.leave()
			return nil
		}
	}
	return r.sub.Unsubscribe()
}

// now moves since on. The server's clock for a message runs from when it sent
// it, which may be long before we look at it: the process or the network may
// have stood still. While nothing is held, whatever comes next was sent after
// the latest ping that the server has answered.
func (r *request) now() {
	if len(r.msgs) > 0 {
		return
	}
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	if r.s.pong.After(r.since) {
		r.since = r.s.pong
	}
}

// take takes in what the server sent: a message, which has a subject for the
// answer, or a word about the request, which has none.
func (r *request) take(m *nats.Msg) (over bool, err error) {
	if m.Reply != "" {
		r.left--
		r.s.add(m, r.since)
		return false, nil
	}
	switch code := m.Header.Get("Status"); code {
	case "100": // a heartbeat
		return false, nil
	case "404", "408": // nothing more came
		return true, nil
	default:
		return true, fmt.Errorf("the server ended the request: %s %s", code, m.Header.Get("Description"))
	}
}

// leave gives the request up, and takes in what had already been sent for it.
func (r *request) leave() {
	if r.s.nc.IsConnected() {
		_ = r.sub.Drain() // unlike Unsubscribe, which forgets what is on the way
		_ = r.s.nc.FlushTimeout(pullHeartbeat)
	} else {
		_ = r.sub.Unsubscribe()
	}
	for {
		select {
		case m := <-r.msgs:
			_, _ = r.take(m)
		default:
			return
		}
	}
}

// add takes in one message that was sent since.
func (s *Source) add(m *nats.Msg, since time.Time) {
	c := &claim{msg: m, beat: since, lost: make(chan struct{})}
	c.d = &brokers.Delivery{Message: fromWire(m.Subject, m.Data, m.Header), Lost: c.lost, Handle: c}
	if md, err := m.Metadata(); err == nil {
		c.d.Attempt = int(md.NumDelivered)
		c.d.Message.Position = fmt.Sprintf("%s/%d", md.Stream, md.Sequence.Stream)
		c.d.Message.Time = md.Timestamp
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open[c] = true // Close hands back what is here
	s.buffer = append(s.buffer, c)
	s.wake()
}

// fromWire is a message as it was on the wire. The client keeps headers in a
// map, so their order is lost but for that of equal names; they come sorted.
func fromWire(subject string, data []byte, h nats.Header) *envelope.Message {
	out := &envelope.Message{Topic: subject, Body: data}
	if out.Body == nil {
		out.Body = []byte{}
	}
	names := make([]string, 0, len(h))
	for name := range h {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		for _, v := range h[name] {
			out.Header.Add(name, []byte(v))
		}
	}
	return out
}

func (s *Source) pause(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-s.ctx.Done():
	}
}
