package natsbroker

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

// PublisherConfig are the settings of [NewPublisher]. The zero value is the
// default.
type PublisherConfig struct {
	// Mode is how CloudEvents are written. Defaults to envelope.Binary.
	Mode envelope.Mode
	// Streams are the streams whose acknowledgement counts: any service that
	// listens to a subject can answer a publish. Defaults to any stream.
	Streams []string
	// Window is how many publishes of one call may be unanswered at a time.
	// Defaults to 512.
	Window int
	// Timeout bounds the wait for one acknowledgement, and for the look at what
	// the server calls a duplicate. Defaults to 5 s.
	Timeout time.Duration
}

// Publisher publishes to JetStream. It implements brokers.Publisher and
// brokers.Prober. Only one
// message of a topic and key is unanswered at a time. Besides publishing to the
// subjects it needs the permission to request $JS.API.STREAM.MSG.GET of their
// streams: without it a repeated publish stays unknown until the stream's
// duplicate window is over.
type Publisher struct {
	nc *nats.Conn
	js jetstream.JetStream
	c  PublisherConfig

	duplicates atomic.Int64

	mu       sync.Mutex
	closed   bool
	inFlight sync.WaitGroup
}

// NewPublisher returns a publisher on nc, which stays the caller's.
func NewPublisher(nc *nats.Conn, c PublisherConfig) (*Publisher, error) {
	if nc == nil {
		return nil, errors.New("natsbroker: NewPublisher: the connection is nil")
	}
	if c.Window <= 0 {
		c.Window = 512
	}
	if c.Timeout <= 0 {
		c.Timeout = 5 * time.Second
	}
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(math.MaxInt), jetstream.WithPublishAsyncTimeout(c.Timeout))
	if err != nil {
		return nil, fmt.Errorf("natsbroker: %w", err)
	}
	return &Publisher{nc: nc, js: js, c: c}, nil
}

// Duplicates returns how many publishes the server has recognised as repeated.
func (p *Publisher) Duplicates() int64 { return p.duplicates.Load() }

// Publish implements brokers.Publisher. It returns at once when ctx is done.
func (p *Publisher) Publish(ctx context.Context, msgs []*envelope.Message) brokers.Results {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return brokers.Fill(len(msgs), brokers.ErrClosed)
	}
	p.inFlight.Add(1)
	p.mu.Unlock()
	defer p.inFlight.Done()

	res := make(brokers.Results, len(msgs))
	for _, round := range rounds(msgs, p.c.Window) {
		p.publishRound(ctx, msgs, round, res)
	}
	return res
}

// Close implements brokers.Publisher. Calls of Publish that are under way send
// nothing more; it waits for the answers to what they have sent, which takes at
// most twice PublisherConfig.Timeout.
func (p *Publisher) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.inFlight.Wait()
	p.js.CleanupPublisher() // what the client has on the connection for us
	return nil
}

// Probe implements brokers.Prober: JetStream is asked about the account, which needs
// the permission to request $JS.API.INFO.
func (p *Publisher) Probe(ctx context.Context) error {
	if p.isClosed() {
		return fmt.Errorf("%w: %w", brokers.ErrUnavailable, brokers.ErrClosed)
	}
	if _, err := p.js.AccountInfo(ctx); err != nil {
		return fmt.Errorf("%w: %w", brokers.ErrUnavailable, err)
	}
	return nil
}

func (p *Publisher) isClosed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed
}

// slot is a message of a call and the one before it in its key, or -1.
type slot struct{ i, before int }

// rounds cuts a call into groups of at most window messages that may be
// unanswered together: no two of them have the same topic and key.
func rounds(msgs []*envelope.Message, window int) [][]slot {
	var out [][]slot
	next := make(map[string]int) // by key, the first round that may hold its next message
	last := make(map[string]int) // by key, its latest message
	first := 0                   // the first round that is not full
	for i, m := range msgs {
		key, s := m.Topic+"\x00"+string(m.Key), slot{i, -1}
		r := first
		if m.Key != nil {
			if b, ok := last[key]; ok {
				s.before = b
			}
			r = max(first, next[key])
		}
		for r < len(out) && len(out[r]) >= window {
			r++
		}
		if r == len(out) {
			out = append(out, nil)
		}
		out[r] = append(out[r], s)
		next[key], last[key] = r+1, i
		for first < len(out) && len(out[first]) >= window {
			first++
		}
	}
	return out
}

// publishRound publishes the messages of one round and waits for all answers.
func (p *Publisher) publishRound(ctx context.Context, msgs []*envelope.Message, round []slot, res brokers.Results) {
	futures := make([]jetstream.PubAckFuture, len(round))
	for n, s := range round {
		if s.before >= 0 && res[s.before] != nil {
			res[s.i] = brokers.ErrBlocked
			continue
		}
		futures[n], res[s.i] = p.start(ctx, msgs[s.i])
	}
	var verifying sync.WaitGroup
	for n, s := range round {
		if futures[n] == nil {
			continue
		}
		ack, err := p.await(ctx, futures[n])
		if err == nil {
			err = p.believe(ack)
		}
		res[s.i] = err
		if err == nil && ack.Duplicate {
			p.duplicates.Add(1)
			verifying.Go(func() { res[s.i] = p.verify(ctx, msgs[s.i], ack) })
		}
	}
	verifying.Wait()
}

// start sends one message, unless it is certain that it cannot be.
func (p *Publisher) start(ctx context.Context, m *envelope.Message) (jetstream.PubAckFuture, error) {
	msg, err := p.encode(m)
	switch {
	case errors.Is(err, brokers.ErrRejected):
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("%w: %w", brokers.ErrRejected, err)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", brokers.ErrUnavailable, err)
	}
	if p.isClosed() {
		return nil, brokers.ErrClosed
	}
	if !p.nc.IsConnected() {
		// The client would keep it and send it after a reconnect, behind our
		// back: nothing is sent while the connection is known to be away.
		return nil, fmt.Errorf("%w: not connected", brokers.ErrUnavailable)
	}
	var opts []jetstream.PublishOpt
	if id := messageID(m); id != "" {
		opts = append(opts, jetstream.WithMsgID(id))
	}
	f, err := p.js.PublishMsgAsync(msg, opts...)
	if err != nil {
		return nil, classify(err, false)
	}
	return f, nil
}

// await waits for the answer to one message.
func (p *Publisher) await(ctx context.Context, f jetstream.PubAckFuture) (*jetstream.PubAck, error) {
	select {
	case ack := <-f.Ok():
		return ack, nil
	case err := <-f.Err():
		return nil, classify(err, true)
	case <-ctx.Done():
		return nil, fmt.Errorf("%w: %w", brokers.ErrUnknown, ctx.Err())
	}
}

// believe refuses an acknowledgement that no stream of ours has sent.
func (p *Publisher) believe(ack *jetstream.PubAck) error {
	if ack.Stream == "" || ack.Sequence == 0 {
		return fmt.Errorf("%w: the acknowledgement names no stream", brokers.ErrUnknown)
	}
	if len(p.c.Streams) > 0 && !slices.Contains(p.c.Streams, ack.Stream) {
		return fmt.Errorf("%w: stream %s has acknowledged it, which is none of PublisherConfig.Streams", brokers.ErrUnknown, ack.Stream)
	}
	return nil
}

// encode makes the client's message, and refuses what the server would.
func (p *Publisher) encode(m *envelope.Message) (*nats.Msg, error) {
	if err := checkSubject(m.Topic); err != nil {
		return nil, err
	}
	wire, err := envelope.NATS.Encode(m, p.c.Mode)
	if err != nil {
		return nil, err
	}
	msg := &nats.Msg{Subject: m.Topic, Data: wire.Body, Header: nats.Header{}}
	size := len(wire.Body) + 200 // our own headers and the preamble
	for _, f := range wire.Header {
		if reserved(f.Name) {
			continue
		}
		msg.Header[f.Name] = append(msg.Header[f.Name], string(f.Value))
		size += len(f.Name) + len(f.Value) + 4
	}
	if limit := p.nc.MaxPayload(); limit > 0 && int64(size) > limit {
		return nil, fmt.Errorf("%w: the message has about %d bytes, the server allows %d (max_payload)", brokers.ErrTooLarge, size, limit)
	}
	return msg, nil
}

// reserved reports whether a header would be an instruction to the server: a
// dead letter that is published again must not roll a stream up.
func reserved(name string) bool {
	return len(name) >= 5 && strings.EqualFold(name[:5], "nats-")
}

// checkSubject refuses what is no subject to publish to. The server takes a
// wildcard literally, and answers an empty token with silence.
func checkSubject(s string) error {
	if s == "" {
		return errors.New("the subject is empty")
	}
	if strings.HasPrefix(s, "$JS.") || strings.HasPrefix(s, "$SYS.") {
		return errors.New("the subject is one for orders to the server")
	}
	for token := range strings.SplitSeq(s, ".") {
		switch {
		case token == "":
			return errors.New("the subject has an empty token")
		case token == "*" || token == ">":
			return errors.New("the subject has a wildcard")
		case strings.ContainsAny(token, " \t\r\n"):
			return errors.New("the subject has white space")
		}
	}
	return nil
}

// messageID is the id by which the server recognises a repeated publish: a
// hash of the identity and the subject, because the server's window is for the
// stream and not for the subject, and because ids are not made for headers.
// Empty for a message without identity.
func messageID(m *envelope.Message) string {
	if m.ID == "" {
		return ""
	}
	h := sha256.New()
	for _, part := range [...]string{m.Source, m.ID, m.Topic} {
		var n [8]byte
		binary.BigEndian.PutUint64(n[:], uint64(len(part)))
		h.Write(n[:])
		h.Write([]byte(part))
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// messageExceedsMaximum is the server's error code for a message that is larger
// than its stream allows (max_msg_size).
const messageExceedsMaximum jetstream.ErrorCode = 10054

// classify says what an error of a publish means. sent tells whether the
// message has left, as far as we know.
func classify(err error, sent bool) error {
	var api *jetstream.APIError
	switch {
	case errors.Is(err, jetstream.ErrNoStreamResponse), errors.Is(err, nats.ErrNoResponders):
		return fmt.Errorf("%w: %w", brokers.ErrNoRoute, err)
	case errors.Is(err, nats.ErrMaxPayload), errors.As(err, &api) && api.ErrorCode == messageExceedsMaximum:
		return fmt.Errorf("%w: %w", brokers.ErrTooLarge, err)
	case errors.Is(err, nats.ErrBadSubject):
		return fmt.Errorf("%w: %w", brokers.ErrRejected, err)
	case errors.As(err, &api) && api.Code == 400:
		return fmt.Errorf("%w: %w", brokers.ErrRejected, err)
	case errors.As(err, &api):
		return fmt.Errorf("%w: %w", brokers.ErrUnavailable, err)
	case sent:
		return fmt.Errorf("%w: %w", brokers.ErrUnknown, err)
	}
	return fmt.Errorf("%w: %w", brokers.ErrUnavailable, err)
}

// Connect connects with the settings that a service wants: it keeps trying
// from the start, reconnects for ever, and keeps nothing to send it after a
// reconnect: by then it is too late for an acknowledgement, and a publish has
// been answered as unavailable. Options given are applied after those. The
// connection is the caller's to close.
func Connect(url string, opts ...nats.Option) (*nats.Conn, error) {
	safe := []nats.Option{nats.MaxReconnects(-1), nats.RetryOnFailedConnect(true), nats.ReconnectBufSize(-1), nats.ReconnectWait(200 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, 500*time.Millisecond), nats.Timeout(5 * time.Second), nats.Name("unecho")}
	nc, err := nats.Connect(url, append(safe, opts...)...)
	if err != nil {
		return nil, fmt.Errorf("natsbroker: connect: %w", err)
	}
	return nc, nil
}
