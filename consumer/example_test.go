package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// broker returns one with a topic that holds an event twice, and one that no
// retry can mend.
func broker(ctx context.Context) *membroker.Broker {
	b := membroker.New()
	b.CreateTopic("orders", 1)
	b.CreateTopic("orders.dead", 1)
	b.SetFaults(membroker.Faults{Twice: func(m *envelope.Message) bool { return m.ID == "1" }})
	for _, id := range []string{"1", "2"} {
		m := &envelope.Message{ID: id, Source: "/shop", Type: "order.placed", Topic: "orders", Key: []byte("c"), Body: []byte("order " + id)}
		if err := b.Publisher().Publish(ctx, []*envelope.Message{m}).Err(); err != nil {
			panic(err)
		}
	}
	return b
}

// A handler runs once for each event, although one of them is delivered twice.
func ExampleRun() {
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	b := broker(ctx)

	bill := func(_ context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
		fmt.Println("billed", string(m.Body))
		return nil
	}
	h := consumer.Wrap("billing", memdedupe.NewStore(nil), bill, nil)
	err := consumer.Run(ctx, b.Source("orders", "billing"), h, &consumer.RunOptions{
		DeadLetter: consumer.DeadLetterTo(b.Publisher(), "orders.dead"),
	})
	fmt.Println(err, b.Committed("orders", "billing"))
	// Output:
	// billed order 1
	// billed order 2
	// <nil> [3]
}

// What the topic of the dead letters refuses for good goes to the next place.
func ExampleFirstDeadLetter() {
	b := membroker.New()
	topic := consumer.DeadLetterTo(b.Publisher(), "orders.dead")
	narrow := func(ctx context.Context, f *consumer.Failure) error {
		if len(f.Message.Body) > 4 {
			return fmt.Errorf("dead letters: %w", brokers.ErrTooLarge)
		}
		return topic(ctx, f)
	}
	lot := &memoryLot{}
	dead := consumer.FirstDeadLetter(narrow, consumer.ParkIn(lot, "billing"))

	f := &consumer.Failure{Message: &envelope.Message{ID: "1", Source: "/shop", Body: []byte("a large order")}, Class: consumer.ClassFailed, Reason: "failed"}
	fmt.Println(dead(context.Background(), f), len(lot.records))
	// Output: <nil> 1
}

// The outage of one dependency holds the messages that need it, and no others.
func ExampleDependency() {
	billing := consumer.Dependency("billing-api")
	h := consumer.HandlerFunc(func(ctx context.Context, m *envelope.Message) error {
		if m.Type == "order.placed" {
			return billing.Unavailable(errors.New("connect: connection refused"))
		}
		return nil
	})
	err := h.Handle(context.Background(), &envelope.Message{Type: "order.placed"})
	fmt.Println(consumer.Classify(err), err)
	// Output: unavailable billing-api: connect: connection refused
}

// A program judges the errors of its handlers by itself, never those of the store.
func ExampleRunOptions_classify() {
	errNoSuchCustomer := errors.New("no such customer")
	o := &consumer.RunOptions{Classify: func(err error) consumer.Class {
		if errors.Is(err, errNoSuchCustomer) {
			return consumer.ClassPermanent // to the dead letters at once
		}
		return consumer.Classify(err)
	}}
	fmt.Println(o.Classify(fmt.Errorf("bill: %w", errNoSuchCustomer)))
	// Output: permanent
}

// Wrap is what makes a handler run once, with or without Run around it.
func ExampleWrap() {
	h := consumer.Wrap("billing", memdedupe.NewStore(nil), func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
		fmt.Println("billed", m.ID)
		return nil
	}, &consumer.Options{Extractor: envelope.FromHeader("order-id", "/shop")})

	m := &envelope.Message{Topic: "orders", Header: envelope.Header{{Name: "Order-Id", Value: []byte("42")}}}
	ctx := context.Background()
	fmt.Println(h.Handle(ctx, m), h.Handle(ctx, m))
	// Output:
	// billed 42
	// <nil> <nil>
}

// Middleware: the first one given is the outermost.
func ExampleChain() {
	named := func(name string) consumer.Middleware {
		return func(next consumer.Handler) consumer.Handler {
			return consumer.HandlerFunc(func(ctx context.Context, m *envelope.Message) error {
				fmt.Println(name, "before")
				err := next.Handle(ctx, m)
				fmt.Println(name, "after")
				return err
			})
		}
	}
	h := consumer.Chain(consumer.HandlerFunc(func(context.Context, *envelope.Message) error {
		fmt.Println("handler")
		return nil
	}), named("outer"), named("inner"))
	_ = h.Handle(context.Background(), &envelope.Message{})
	// Output:
	// outer before
	// inner before
	// handler
	// inner after
	// outer after
}

// A permanent error goes to the dead letters at once, with the original message.
func ExamplePermanent() {
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	b := broker(ctx)
	h := consumer.HandlerFunc(func(context.Context, *envelope.Message) error {
		return consumer.Permanent(errors.New("no such customer"))
	})
	_ = consumer.Run(ctx, b.Source("orders", "g"), h, &consumer.RunOptions{DeadLetter: func(_ context.Context, f *consumer.Failure) error {
		fmt.Println(f.Reason, f.Message.Position, f.Err)
		return nil
	}})
	// Output:
	// permanent orders/0/0 no such customer
	// permanent orders/0/1 no such customer
	// permanent orders/0/2 no such customer
}

// An observer sees every step of every delivery.
func ExampleObserver() {
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	b := broker(ctx)
	h := consumer.Wrap("billing", memdedupe.NewStore(nil), func(context.Context, *memdedupe.Tx, *envelope.Message) error { return nil }, nil)
	_ = consumer.Run(ctx, b.Source("orders", "g"), h, &consumer.RunOptions{DeadLetter: consumer.Discard,
		Observer: consumer.ObserverFunc(func(_ context.Context, e consumer.Event) {
			if e.Step == consumer.StepDecide {
				fmt.Println(e.Position, e.Outcome)
			}
		})})
	// Output:
	// orders/0/0 processed
	// orders/0/1 duplicate
	// orders/0/2 processed
}

// Classify tells an outage from a failure, however it was wrapped.
func ExampleClassify() {
	fmt.Println(consumer.Classify(errors.New("no such customer")))
	fmt.Println(consumer.Classify(fmt.Errorf("decode: %w", envelope.ErrMalformed)))
	fmt.Println(consumer.Classify(consumer.Unavailable(errors.New("503 from the payment provider"))))
	fmt.Println(consumer.IsPermanent(fmt.Errorf("decode: %w", consumer.Permanent(errors.New("x")))))
	// Output:
	// failed
	// malformed
	// unavailable
	// true
}

// A producer that encodes an event anew when it sends it again makes no
// conflict of it.
func ExampleJSONContent() {
	h := consumer.Wrap("billing", memdedupe.NewStore(nil), func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
		fmt.Println("billed", string(m.Body))
		return nil
	}, &consumer.Options{Extractor: envelope.FromHeader("order-id", "/shop"), Content: consumer.JSONContent})
	for _, body := range []string{`{"cents":1,"to":"a"}`, `{"to": "a", "cents": 1}`} {
		m := &envelope.Message{Topic: "orders", Body: []byte(body), Header: envelope.Header{{Name: "order-id", Value: []byte("42")}}}
		fmt.Println(h.Handle(context.Background(), m))
	}
	// Output:
	// billed {"cents":1,"to":"a"}
	// <nil>
	// <nil>
}

// A producer that stamps an event whenever it sends it makes no conflict of it.
func ExampleFieldsContent() {
	h := consumer.Wrap("billing", memdedupe.NewStore(nil), func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
		fmt.Println("billed", string(m.Body))
		return nil
	}, &consumer.Options{Extractor: envelope.FromHeader("order-id", "/shop"), Content: consumer.FieldsContent("/cents")})
	for _, body := range []string{`{"cents":1,"sent":"10:00"}`, `{"cents":1,"sent":"10:05"}`} {
		m := &envelope.Message{Topic: "orders", Body: []byte(body), Header: envelope.Header{{Name: "order-id", Value: []byte("42")}}}
		fmt.Println(h.Handle(context.Background(), m))
	}
	// Output:
	// billed {"cents":1,"sent":"10:00"}
	// <nil>
	// <nil>
}

// A handler that takes the body decoded. One that is no order goes to the dead
// letters at once.
func ExampleTyped() {
	type order struct{ Cents int }
	h := consumer.Wrap("billing", memdedupe.NewStore(nil), consumer.Typed(nil, func(_ context.Context, _ *memdedupe.Tx, _ *envelope.Message, o order) error {
		fmt.Println("billed", o.Cents)
		return nil
	}), &consumer.Options{Extractor: envelope.FromHeader("order-id", "/shop")})
	for i, body := range []string{`{"cents":100}`, `{"cents":"a lot"}`} {
		m := &envelope.Message{Topic: "orders", Body: []byte(body), Header: envelope.Header{{Name: "order-id", Value: fmt.Append(nil, i)}}}
		fmt.Println(consumer.Classify(h.Handle(context.Background(), m)) == consumer.ClassMalformed)
	}
	// Output:
	// billed 100
	// false
	// true
}

// Each type of event has its handler. What nobody handles leaves no key.
func ExampleRoute() {
	say := func(what string) consumer.Handler {
		return consumer.Wrap("orders", memdedupe.NewStore(nil), func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
			fmt.Println(what, m.ID)
			return nil
		}, nil)
	}
	h := consumer.Route(map[string]consumer.Handler{"order.placed": say("placed"), "order.paid": say("paid")},
		&consumer.RouteOptions{Ignore: []string{"order.viewed"}})
	for i, typ := range []string{"order.placed", "order.paid", "order.viewed", "order.lost"} {
		m, err := envelope.Kafka.Encode(&envelope.Message{ID: fmt.Sprint(i), Source: "/shop", Type: typ, Topic: "orders"}, envelope.Binary)
		if err != nil {
			panic(err)
		}
		if err := h.Handle(context.Background(), m); err != nil {
			fmt.Println(err)
		}
	}
	// Output:
	// placed 0
	// paid 1
	// consumer: nobody handles this type of event: "order.lost"
}

// Whoever asks twice gets the answer twice, and the work is done once.
func ExampleWrapReply() {
	h := consumer.WrapReply("quotes", memdedupe.NewStore(nil), func(context.Context, *memdedupe.Tx, *envelope.Message) ([]byte, error) {
		fmt.Println("calculating")
		return []byte("100 euros"), nil
	}, func(_ context.Context, _ *envelope.Message, r dedupe.Result) error {
		fmt.Println("reply:", string(r.Reply), r.Outcome)
		return nil
	}, &consumer.Options{Extractor: envelope.FromHeader("request-id", "/shop")})
	for range 2 {
		m := &envelope.Message{Topic: "quotes", Header: envelope.Header{{Name: "request-id", Value: []byte("42")}}}
		if err := h.Handle(context.Background(), m); err != nil {
			fmt.Println(err)
		}
	}
	// Output:
	// calculating
	// reply: 100 euros processed
	// reply: 100 euros duplicate
}

// A Control pauses a run, and answers the probes of whoever watches over it.
func ExampleControl() {
	control := &consumer.Control{}
	control.Pause()
	fmt.Println(control.Health().Ready())
	http.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) {
		if err := control.Health().Live(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	// then: consumer.Run(ctx, src, h, &consumer.RunOptions{Control: control, DeadLetter: …})
	// Output: consumer: not started
}

// Up to a hundred deliveries of one partition share a transaction; the handler
// is the same.
func ExampleBatch() {
	run := func(ctx context.Context, src brokers.Source, h consumer.Handler) error {
		return consumer.Run(ctx, src, h, &consumer.RunOptions{
			Batch:      consumer.Batch{Max: 100, Wait: 5 * time.Millisecond},
			DeadLetter: consumer.Discard,
		})
	}
	_ = run
}

// A handler that takes all events of a group at once.
func ExampleWrapBatch() {
	h := consumer.WrapBatch("billing", memdedupe.NewStore(nil), func(_ context.Context, _ *memdedupe.Tx, ms []*envelope.Message) error {
		for _, m := range ms { // such as one insert of many rows
			fmt.Println("billed", m.ID)
		}
		return nil
	}, &consumer.Options{Extractor: envelope.FromHeader("order-id", "/shop")})
	m := &envelope.Message{Topic: "orders", Header: envelope.Header{{Name: "order-id", Value: []byte("42")}}}
	for range 2 {
		fmt.Println(h.Handle(context.Background(), m))
	}
	// Output:
	// billed 42
	// <nil>
	// <nil>
}

// An event that a handler writes has the same id at every run, and says what
// caused it.
func ExampleCaused() {
	h := consumer.Wrap("billing", memdedupe.NewStore(nil), func(ctx context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
		out, err := consumer.Caused(ctx, m, &envelope.Message{Source: "/billing", Type: "invoice.made", Topic: "invoices"}, 0)
		if err != nil {
			return err
		}
		fmt.Println(out.ID, out.Extensions["causationid"]) // then: outbox.Writer.Write(ctx, tx, out)
		return nil
	}, &consumer.Options{Extractor: envelope.FromHeader("order-id", "/shop")})
	m := &envelope.Message{Topic: "orders", Header: envelope.Header{{Name: "order-id", Value: []byte("42")}}}
	fmt.Println(h.Handle(context.Background(), m))
	// Output:
	// 7753a063-2b7b-880a-80f1-4f3073125c63 42
	// <nil>
}

// What a handler asks of another system, beside its own transaction, has a key
// that is the same at every run.
func ExampleDerive() {
	h := consumer.Wrap("billing", memdedupe.NewStore(nil), func(ctx context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
		key, err := consumer.Derive(ctx, m, "charge", 0)
		if err != nil {
			return err
		}
		fmt.Println("Idempotency-Key:", key)
		return errors.New("the provider did not answer")
	}, nil)
	for range 2 {
		m, _ := envelope.Kafka.Encode(&envelope.Message{ID: "7", Source: "/shop", Type: "order.placed", Topic: "orders"}, envelope.Binary)
		fmt.Println(h.Handle(context.Background(), m))
	}
	// Output:
	// Idempotency-Key: 2f73b6eb-383f-844f-9ba7-04b9fd74c688
	// the provider did not answer
	// Idempotency-Key: 2f73b6eb-383f-844f-9ba7-04b9fd74c688
	// the provider did not answer
}

// One row for each partition stands for the keys of all its records. The record
// that comes again is below it.
func ExampleWrapWatermark() {
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	b := membroker.New()
	b.CreateTopic("readings", 1)
	again := true
	b.SetFaults(membroker.Faults{DropAck: func(*brokers.Delivery) bool { defer func() { again = false }(); return again }})
	for _, body := range []string{"17 degrees", "19 degrees"} {
		if err := b.Publisher().Publish(ctx, []*envelope.Message{{ID: body, Source: "/probe", Type: "reading", Topic: "readings", Body: []byte(body)}}).Err(); err != nil {
			panic(err)
		}
	}
	store := memdedupe.NewStore(nil)
	h := consumer.WrapWatermark("chart", store, func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
		fmt.Println(m.Position, string(m.Body))
		return nil
	}, nil)
	err := consumer.Run(ctx, b.Source("readings", "chart"), h, &consumer.RunOptions{DeadLetter: consumer.Discard})
	fmt.Println(err, b.Committed("readings", "chart"))
	// Output:
	// readings/0/0 17 degrees
	// readings/0/1 19 degrees
	// <nil> [2]
}

// A group of records has one effect and one row to move.
func ExampleWrapWatermarkBatch() {
	h := consumer.WrapWatermarkBatch("chart", memdedupe.NewStore(nil), func(_ context.Context, _ *memdedupe.Tx, ms []*envelope.Message) error {
		for _, m := range ms {
			fmt.Println(string(m.Body))
		}
		return nil
	}, nil)
	m := &envelope.Message{Position: "readings/0/7", Body: []byte("17 degrees")}
	for range 2 {
		if err := h.Handle(context.Background(), m); err != nil {
			panic(err)
		}
	}
	// Output: 17 degrees
}
