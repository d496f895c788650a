package natsbroker

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/nats-io/nats.go"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

// RequestConfig are the settings of [NewRequestSource]. Subject is mandatory, the
// zero value of everything else is the default.
type RequestConfig struct {
	// Subject is what requests are sent to. It may have wildcards.
	Subject string
	// Queue is the queue group: each request goes to one of its members.
	// Defaults to "unecho".
	Queue string
	// Pending bounds the requests that were received and are not being handled.
	// What comes when it is full is dropped, as core NATS does: whoever asked
	// asks again. Defaults to 512.
	Pending int
}

// HeaderReplyTo is a header that a [RequestSource] sets on what it receives: the
// subject to which the answer goes.
const HeaderReplyTo = "unecho-reply-to"

// Headers of an answer that tells of an error, as NATS services have them.
const (
	headerServiceError = "Nats-Service-Error"
	headerServiceCode  = "Nats-Service-Error-Code"
)

// RequestSource receives requests of core NATS. It implements brokers.Source.
//
// Core NATS delivers at most once: there is nothing to acknowledge, and nothing
// comes again by itself. Whoever asks and hears nothing asks again, with the same
// event, on a new reply subject. With consumer.WrapReply and Reply the handler
// runs once, and its stored reply goes to whichever request came last.
//
// Deliveries have no lane, Nack and redelivery do not exist, and a request that was
// handed back with Return is gone.
type RequestSource struct {
	nc      *nats.Conn
	sub     *nats.Subscription
	msgs    chan *nats.Msg
	closing chan struct{}

	mu   sync.Mutex
	open map[*brokers.Delivery]bool
	once sync.Once
}

// NewRequestSource subscribes, on nc, which stays the caller's.
func NewRequestSource(nc *nats.Conn, c RequestConfig) (*RequestSource, error) {
	switch {
	case nc == nil:
		return nil, errors.New("natsbroker: NewRequestSource: the connection is nil")
	case c.Subject == "":
		return nil, errors.New("natsbroker: RequestConfig.Subject is empty")
	}
	if c.Queue == "" {
		c.Queue = "unecho"
	}
	if c.Pending <= 0 {
		c.Pending = 512
	}
	s := &RequestSource{nc: nc, msgs: make(chan *nats.Msg, c.Pending), closing: make(chan struct{}), open: make(map[*brokers.Delivery]bool)}
	var err error
	if s.sub, err = nc.ChanQueueSubscribe(c.Subject, c.Queue, s.msgs); err != nil {
		return nil, fmt.Errorf("natsbroker: subscribe to %s: %w", c.Subject, err)
	}
	return s, nil
}

// Receive implements brokers.Source.
func (s *RequestSource) Receive(ctx context.Context) (*brokers.Delivery, error) {
	select {
	case <-s.closing:
		return nil, brokers.ErrClosed
	default:
	}
	select {
	case m := <-s.msgs:
		return s.deliver(m), nil
	case <-s.closing:
		return nil, brokers.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *RequestSource) deliver(m *nats.Msg) *brokers.Delivery {
	d := &brokers.Delivery{Message: fromWire(m.Subject, m.Data, m.Header), Attempt: 1}
	// Whatever the other side wrote there: the answer goes to who has asked.
	d.Message.Header.Set(HeaderReplyTo, []byte(m.Reply))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open[d] = true
	return d
}

// Ack implements brokers.Source. There is nobody to tell.
func (s *RequestSource) Ack(_ context.Context, d *brokers.Delivery) error { return s.settle(d) }

// Return implements brokers.Source. The request is dropped: whoever has sent it
// asks again.
func (s *RequestSource) Return(_ context.Context, d *brokers.Delivery) error { return s.settle(d) }

func (s *RequestSource) settle(d *brokers.Delivery) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.open[d] {
		return brokers.ErrLost
	}
	delete(s.open, d)
	return nil
}

// Close implements brokers.Source. Requests that were received and not handed out
// are dropped.
func (s *RequestSource) Close() error {
	var err error
	s.once.Do(func() {
		close(s.closing)
		if err = s.sub.Unsubscribe(); errors.Is(err, nats.ErrConnectionClosed) {
			err = nil
		}
	})
	if err != nil {
		return fmt.Errorf("natsbroker: unsubscribe: %w", err)
	}
	return nil
}

// Reply sends an answer to the request m, which a RequestSource has received: give
// the Reply of a dedupe.Result, in the function for consumer.WrapReply. A message
// that wants no answer gets none. Nil means that the server has it; the error matches
// brokers.ErrUnavailable otherwise, and the answer may or may not have been sent.
func (s *RequestSource) Reply(ctx context.Context, m *envelope.Message, reply []byte) error {
	return s.answer(ctx, m, &nats.Msg{Data: reply})
}

// Refuse sends an answer that tells of an error, in the headers that NATS services
// have. It is for consumer.RunOptions.DeadLetter: code 400 for what cannot be
// read, 500 for what failed. The reason goes out, the text of an error does not.
func (s *RequestSource) Refuse(ctx context.Context, m *envelope.Message, code int, reason string) error {
	return s.answer(ctx, m, &nats.Msg{Header: nats.Header{headerServiceError: {reason}, headerServiceCode: {fmt.Sprint(code)}}})
}

func (s *RequestSource) answer(ctx context.Context, m *envelope.Message, answer *nats.Msg) error {
	to, _ := m.Header.Get(HeaderReplyTo)
	if len(to) == 0 {
		return nil
	}
	answer.Subject = string(to)
	err := s.nc.PublishMsg(answer)
	switch {
	case errors.Is(err, nats.ErrMaxPayload):
		return fmt.Errorf("natsbroker: reply: %w: %w", brokers.ErrRejected, err)
	case err == nil:
		err = s.nc.FlushWithContext(ctx)
	}
	if err != nil {
		return fmt.Errorf("natsbroker: reply: %w: %w", brokers.ErrUnavailable, err)
	}
	return nil
}
