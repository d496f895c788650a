package natsbroker_test

import (
	"context"
	"errors"
	"log/slog"

	"github.com/unecho/unecho/brokers/natsbroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// A durable consumer of a stream, with dead letters on a subject of another one.
func ExampleNewSource() {
	nc, err := natsbroker.Connect("nats://127.0.0.1:4222")
	if err != nil {
		return
	}
	defer nc.Close()
	src, err := natsbroker.NewSource(nc, natsbroker.Config{Stream: "ORDERS", Durable: "billing",
		OnError: func(err error) { slog.Warn("nats", "error", err) }})
	if err != nil {
		return
	}
	pub, err := natsbroker.NewPublisher(nc, natsbroker.PublisherConfig{})
	if err != nil {
		return
	}
	handler := consumer.HandlerFunc(func(context.Context, *envelope.Message) error { return nil })
	_ = consumer.Run(context.Background(), src, handler, &consumer.RunOptions{DeadLetter: consumer.DeadLetterTo(pub, "dead.orders")})
}

// The answers are positional: what is not nil was not acknowledged.
func ExampleNewPublisher() {
	nc, err := natsbroker.Connect("nats://127.0.0.1:4222")
	if err != nil {
		return
	}
	defer nc.Close()
	pub, err := natsbroker.NewPublisher(nc, natsbroker.PublisherConfig{})
	if err != nil {
		return
	}
	event := &envelope.Message{ID: envelope.NewID(), Source: "/shop", Type: "order.placed", Topic: "orders.placed", Key: []byte("customer-1")}
	for _, err := range pub.Publish(context.Background(), []*envelope.Message{event}) {
		if err != nil {
			slog.Error("publish", "error", err)
		}
	}
}

// Connect has the settings of a service: it never gives up.
func ExampleConnect() {
	nc, err := natsbroker.Connect("nats://127.0.0.1:4222")
	if err != nil {
		return
	}
	defer nc.Close()
}

// A question that is asked again gets the answer of the first time, on the reply
// subject of the one that asks now.
func ExampleNewRequestSource() {
	nc, err := natsbroker.Connect("nats://127.0.0.1:4222")
	if err != nil {
		return
	}
	defer nc.Close()
	src, err := natsbroker.NewRequestSource(nc, natsbroker.RequestConfig{Subject: "quotes.get"})
	if err != nil {
		return
	}
	handler := consumer.WrapReply("quotes", memdedupe.NewStore(nil),
		func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message) ([]byte, error) {
			return []byte("42"), nil
		},
		func(ctx context.Context, m *envelope.Message, r dedupe.Result) error {
			return src.Reply(ctx, m, r.Reply)
		}, nil)
	_ = consumer.Run(context.Background(), src, handler, &consumer.RunOptions{MaxAttempts: 1,
		DeadLetter: func(ctx context.Context, f *consumer.Failure) error { return src.Refuse(ctx, f.Message, 500, f.Reason) }})
}

// What a service asks before it publishes: that every subject has a stream, and
// that the server keeps what it acknowledges.
func ExampleCheckSubjects() {
	nc, err := natsbroker.Connect("nats://127.0.0.1:4222")
	if err != nil {
		return
	}
	defer nc.Close()
	ctx := context.Background()
	err = errors.Join(natsbroker.CheckSubjects(ctx, nc, "orders.placed", "orders.paid"), natsbroker.CheckSync(ctx, "http://127.0.0.1:8222"))
	if errors.Is(err, natsbroker.ErrLazySync) {
		slog.Warn("keep sent rows of the outbox", "error", err)
	}
}
