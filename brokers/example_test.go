package brokers_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/envelope"
)

// Results are positional, and say of each failure what to do about it.
func ExamplePublisher() {
	b := membroker.New()
	b.CreateTopic("orders", 1)
	results := b.Publisher().Publish(context.Background(), []*envelope.Message{
		{ID: "1", Source: "/shop", Type: "order.placed", Topic: "orders"},
		{ID: "2", Source: "/shop", Type: "order.placed", Topic: "nowhere"},
	})
	for _, err := range results {
		fmt.Println(err, errors.Is(err, brokers.ErrNoRoute))
	}
	// Output:
	// <nil> false
	// brokers: no such topic or stream: nowhere true
}

// Err is the first failure of a call.
func ExampleResults() {
	fmt.Println(brokers.Results{nil, nil}.Err())
	fmt.Println(brokers.Fill(2, brokers.ErrClosed).Err())
	// Output:
	// <nil>
	// brokers: closed
}

// A delivery is settled once: acknowledged, or returned and delivered again.
func ExampleSource() {
	ctx := context.Background()
	b := membroker.New()
	b.CreateTopic("orders", 1)
	_ = b.Publisher().Publish(ctx, []*envelope.Message{{ID: "1", Source: "/shop", Type: "order.placed", Topic: "orders"}})
	var src brokers.Source = b.Source("orders", "billing")
	defer func() { _ = src.Close() }()

	d, _ := src.Receive(ctx)
	fmt.Println(d.Message.Position, src.Return(ctx, d))
	d, _ = src.Receive(ctx)
	fmt.Println(d.Message.Position, src.Ack(ctx, d), src.Ack(ctx, d))
	// Output:
	// orders/0/0 <nil>
	// orders/0/0 <nil> brokers: the delivery is no longer ours
}
