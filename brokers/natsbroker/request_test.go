package natsbroker

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
)

// service answers requests until the test ends.
func service(t *testing.T, nc *nats.Conn, subject string, st dedupe.Store[*memdedupe.Tx], h func(m *envelope.Message) ([]byte, error)) {
	t.Helper()
	src, err := NewRequestSource(nc, RequestConfig{Subject: subject})
	if err != nil {
		t.Fatal(err)
	}
	handler := consumer.WrapReply("service", st, func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message) ([]byte, error) { return h(m) },
		func(ctx context.Context, m *envelope.Message, r dedupe.Result) error {
			return src.Reply(ctx, m, r.Reply)
		}, nil)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- consumer.Run(ctx, src, handler, &consumer.RunOptions{MaxAttempts: 1, DeadLetter: func(ctx context.Context, f *consumer.Failure) error {
			return src.Refuse(ctx, f.Message, 500, f.Reason)
		}})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
}

// ask sends an event as a request.
func ask(t *testing.T, nc *nats.Conn, subject, id, body string, wait time.Duration) (*nats.Msg, error) {
	t.Helper()
	wire, err := envelope.NATS.Encode(&envelope.Message{ID: id, Source: "/asker", Type: "question", Topic: subject, Body: []byte(body)}, envelope.Binary)
	if err != nil {
		t.Fatal(err)
	}
	m := &nats.Msg{Subject: subject, Data: wire.Body, Header: nats.Header{}}
	for _, f := range wire.Header {
		m.Header[f.Name] = append(m.Header[f.Name], string(f.Value))
	}
	m.Header[HeaderReplyTo] = []string{"somebody.else"}
	return nc.RequestMsg(m, wait)
}

// A question that is asked again has one effect, and the stored answer goes to
// the reply subject of the request that asks now.
func TestRepliesGoToTheNewRequest(t *testing.T) {
	nc, asker := (&fixture{url: testenv.NATS(t)}).connect(t), (&fixture{url: testenv.NATS(t)}).connect(t)
	subject := testenv.Name("q-")
	var runs atomic.Int64
	slow := make(chan struct{})
	st := memdedupe.NewStore(nil)
	answer := func(m *envelope.Message) ([]byte, error) {
		n := runs.Add(1)
		if m.ID == "slow" {
			<-slow
		}
		if m.ID == "broken" {
			return nil, errors.New("canary")
		}
		return fmt.Appendf(nil, "answer %d", n), nil
	}
	service(t, nc, subject, st, answer)
	service(t, asker, subject, st, answer) // two members of the queue group

	first, err := ask(t, asker, subject, "1", "x", 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		again, err := ask(t, asker, subject, "1", "x", 10*time.Second)
		if err != nil || string(again.Data) != string(first.Data) || again.Subject == first.Subject {
			t.Errorf("asked again: %q, %v; want %q on a subject of its own", again.Data, err, first.Data)
		}
	}
	if n := runs.Load(); n != 1 {
		t.Errorf("the handler ran %d times", n)
	}
	// Whoever asked has given up; who asks now gets the answer.
	if m, err := ask(t, asker, subject, "slow", "x", 50*time.Millisecond); !errors.Is(err, nats.ErrTimeout) {
		t.Fatalf("%v, %v; want a time-out", m, err)
	}
	close(slow)
	if m, err := ask(t, asker, subject, "slow", "x", 10*time.Second); err != nil || string(m.Data) != "answer 2" {
		t.Errorf("%v, %v; want the answer of the first run", m, err)
	}
	m, err := ask(t, asker, subject, "broken", "x", 10*time.Second)
	if err != nil || m.Header.Get("Nats-Service-Error") != "failed" || m.Header.Get("Nats-Service-Error-Code") != "500" {
		t.Errorf("of a handler that fails: %+v, %v", m, err)
	}
	if _, err := ask(t, asker, "nobody."+subject, "1", "x", time.Second); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("where nobody listens: %v", err)
	}
}

// Close drops what was not handed out, and what is handled can still be settled.
func TestRequestSourceCloses(t *testing.T) {
	nc := (&fixture{url: testenv.NATS(t)}).connect(t)
	subject := testenv.Name("q-")
	s, err := NewRequestSource(nc, RequestConfig{Subject: subject})
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.Publish(subject, []byte("x")); err != nil {
		t.Fatal(err)
	}
	d, err := s.Receive(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Error(err)
	}
	if _, err := s.Receive(t.Context()); err == nil {
		t.Error("Receive after Close is no error")
	}
	if err := errors.Join(s.Reply(t.Context(), d.Message, []byte("nobody wants it")), s.Ack(t.Context(), d)); err != nil {
		t.Error(err)
	}
	if err := s.Return(t.Context(), d); err == nil {
		t.Error("settled twice")
	}
	for _, c := range []RequestConfig{{}, {Subject: "a b"}} {
		if _, err := NewRequestSource(nc, c); err == nil {
			t.Errorf("%+v is no error", c)
		}
	}
}
