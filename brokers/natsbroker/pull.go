package natsbroker

import (
	"context"
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
	var cons jetstream.Consumer
	created := false
	for s.ctx.Err() == nil {
		if cons == nil {
			var err error
			if cons, err = s.consumer(created); err != nil {
				if s.hopeless(err) {
					return
				}
				s.c.OnError(err)
				s.pause(200 * time.Millisecond)
				continue
			}
			created = true
		}
		free := s.free()
		if free == 0 {
			return
		}
		if err := s.pullOnce(cons, free); err != nil {
			s.c.OnError(fmt.Errorf("natsbroker: pull: %w", err))
			s.pause(50 * time.Millisecond)
			cons = nil // it may be gone, which only asking for it tells
		}
	}
}

// consumer returns the consumer, and creates it if that is wanted.
func (s *Source) consumer(existed bool) (jetstream.Consumer, error) {
	ctx, cancel := context.WithTimeout(s.ctx, requestTimeout)
	defer cancel()
	have, err := s.js.Consumer(ctx, s.c.Stream, s.c.Durable)
	switch {
	case err == nil:
		i := have.CachedInfo()
		if len(i.Config.BackOff) > 0 {
			return nil, fmt.Errorf("natsbroker: consumer %s of stream %s has a BackOff, which overrides AckWait: %w", s.c.Durable, s.c.Stream, errRefused)
		}
		if i.Config.AckWait == s.c.AckWait && i.Config.MaxAckPending == s.c.MaxAckPending && slices.Equal(filters(i.Config), s.c.Subjects) {
			return have, nil
		}
	case errors.Is(err, jetstream.ErrConsumerNotFound) && existed && s.c.FailIfDeleted:
		return nil, fmt.Errorf("%w: %s of stream %s", ErrDeleted, s.c.Durable, s.c.Stream)
	case !errors.Is(err, jetstream.ErrConsumerNotFound):
		return nil, fmt.Errorf("natsbroker: consumer %s of stream %s: %w", s.c.Durable, s.c.Stream, err)
	}
	cons, err := s.js.CreateOrUpdateConsumer(ctx, s.c.Stream, jetstream.ConsumerConfig{
		Durable: s.c.Durable, AckPolicy: jetstream.AckExplicitPolicy, AckWait: s.c.AckWait, MaxDeliver: -1, MaxAckPending: s.c.MaxAckPending,
		DeliverPolicy: jetstream.DeliverAllPolicy, FilterSubjects: s.c.Subjects})
	if err != nil {
		return nil, fmt.Errorf("natsbroker: create consumer %s of stream %s: %w", s.c.Durable, s.c.Stream, err)
	}
	return cons, nil
}

// errRefused marks settings that waiting does not mend.
var errRefused = errors.New("refused")

func filters(c jetstream.ConsumerConfig) []string {
	if c.FilterSubject != "" {
		return []string{c.FilterSubject}
	}
	return c.FilterSubjects
}

// hopeless ends the source for errors that waiting does not mend.
func (s *Source) hopeless(err error) bool {
	var api *jetstream.APIError
	bad := errors.Is(err, ErrDeleted) || errors.Is(err, errRefused) || errors.Is(err, nats.ErrConnectionClosed) ||
		errors.As(err, &api) && api.Code == 400
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

// pullOnce makes one pull request and takes in what it brings.
func (s *Source) pullOnce(cons jetstream.Consumer, n int) error {
	ctx, cancel := context.WithTimeout(s.ctx, pullExpiry)
	defer cancel()
	batch, err := cons.Fetch(n, jetstream.FetchContext(ctx), jetstream.FetchHeartbeat(pullHeartbeat))
	if err != nil {
		return err
	}
	for m := range batch.Messages() {
		s.add(m)
	}
	err = batch.Error()
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrTimeout) {
		return nil // nothing more came
	}
	return err
}

// add takes in one message.
func (s *Source) add(m jetstream.Msg) {
	c := &claim{msg: m, beat: time.Now(), lost: make(chan struct{})}
	c.d = &brokers.Delivery{Message: fromWire(m.Subject(), m.Data(), m.Headers()), Lost: c.lost, Handle: c}
	if md, err := m.Metadata(); err == nil {
		c.d.Attempt = int(md.NumDelivered)
		c.d.Message.Position = fmt.Sprintf("%s/%d", md.Stream, md.Sequence.Stream)
		c.d.Message.Time = md.Timestamp
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		_ = m.NakWithDelay(minDelay) // else it comes back after AckWait
		return
	}
	s.open[c] = true
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

// heartbeats keeps the claims alive, and lets go of those for which that
// failed for too long.
func (s *Source) heartbeats() {
	tick := time.NewTicker(s.c.AckWait / 10)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			return
		}
		s.lose()
		s.beat()
	}
}

// lose drops the claims that the server may have given to somebody else:
// those that wait are never started.
func (s *Source) lose() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for c := range s.open {
		if s.expired(c, now) {
			delete(s.open, c)
			close(c.lost)
			s.wake()
		}
	}
	s.buffer = slices.DeleteFunc(s.buffer, func(c *claim) bool { return !s.open[c] })
}

// beat sends a heartbeat for every claim whose last one is a third of AckWait
// ago, and believes them when the server has answered a ping behind them. The
// time from which the server counts is that of sending, at the earliest.
func (s *Source) beat() {
	s.mu.Lock()
	var due []*claim
	for c := range s.open {
		if !s.mute && time.Since(c.beat) >= s.c.AckWait/3 {
			due = append(due, c)
		}
	}
	s.mu.Unlock()
	if len(due) == 0 || !s.nc.IsConnected() {
		return
	}
	sent := time.Now()
	for _, c := range due {
		if c.msg.InProgress() != nil {
			continue // settled meanwhile
		}
	}
	if s.nc.FlushTimeout(s.c.AckWait/10) != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range due {
		if s.open[c] {
			c.beat = sent
		}
	}
}
