package membroker_test

import (
	"context"
	"fmt"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/envelope"
)

// Faults happen on demand: here every message is stored twice, and the first
// acknowledgement gets lost.
func ExampleBroker_SetFaults() {
	ctx := context.Background()
	b := membroker.New()
	b.CreateTopic("orders", 1)
	dropped := false
	b.SetFaults(membroker.Faults{
		Twice:   func(*envelope.Message) bool { return true },
		DropAck: func(*brokers.Delivery) bool { first := !dropped; dropped = true; return first },
	})
	_ = b.Publisher().Publish(ctx, []*envelope.Message{{ID: "1", Source: "/s", Type: "t", Topic: "orders"}})

	src := b.Source("orders", "billing")
	for range 3 {
		d, _ := src.Receive(ctx)
		fmt.Println(d.Message.Position, src.Ack(ctx, d))
	}
	fmt.Println(b.Len("orders"), b.Committed("orders", "billing"))
	// Output:
	// orders/0/0 <nil>
	// orders/0/0 <nil>
	// orders/0/1 <nil>
	// 2 [2]
}

// A rebalance takes the deliveries in hand away.
func ExampleBroker_Rebalance() {
	ctx := context.Background()
	b := membroker.New()
	b.CreateTopic("orders", 1)
	_ = b.Publisher().Publish(ctx, []*envelope.Message{{ID: "1", Source: "/s", Type: "t", Topic: "orders"}})
	src := b.Source("orders", "billing")
	d, _ := src.Receive(ctx)
	b.Rebalance("orders", "billing")
	<-d.Lost
	fmt.Println(src.Ack(ctx, d))
	// Output: brokers: the delivery is no longer ours
}
