package natsbroker_test

import (
	"context"
	"log/slog"

	"github.com/unecho/unecho/brokers/natsbroker"
	"github.com/unecho/unecho/consumer"
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
