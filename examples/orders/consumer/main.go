// Command consumer adds orders up by customer until SIGTERM. An order counts
// once, however often its event arrives.
//
//	DATABASE_URL=postgres://... KAFKA_BROKERS=127.0.0.1:9092 go run ./examples/orders/consumer
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5"

	"github.com/unecho/unecho/brokers/kafkabroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/examples/orders"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "consumer:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	addrs, err := orders.Env("KAFKA_BROKERS", "addresses of Kafka brokers, comma-separated")
	if err != nil {
		return err
	}
	pool, err := orders.Open(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	cfg := kafkabroker.Config{Brokers: strings.Split(addrs, ","), GroupID: "billing", Topics: []string{orders.Topic()},
		OnError: func(err error) { slog.Warn("kafka", "error", err) }}
	src, err := kafkabroker.NewSource(cfg)
	if err != nil {
		return err
	}
	dead, err := kafkabroker.NewPublisher(kafkabroker.PublisherConfig{Brokers: cfg.Brokers})
	if err != nil {
		return err
	}
	defer func() { _ = dead.Close() }()

	handler := consumer.Wrap("billing", pgdedupe.NewStore(pool, nil), bill, nil)
	return consumer.Run(ctx, src, handler, &consumer.RunOptions{
		DeadLetter: consumer.DeadLetterTo(dead, orders.Topic()+".dead"),
		Observer:   consumer.ObserverFunc(report),
	})
}

// bill is the handler: whatever it does with tx is committed together with
// the event's key.
func bill(ctx context.Context, tx pgx.Tx, m *envelope.Message) error {
	var o orders.Placed
	if err := json.Unmarshal(m.Body, &o); err != nil {
		return consumer.Permanent(err) // no retry can mend it
	}
	_, err := tx.Exec(ctx, `insert into balances (customer, cents) values ($1, $2)
		on conflict (customer) do update set cents = balances.cents + excluded.cents`, o.Customer, o.Cents)
	return err
}

// report logs what a person on call wants to know. An event's step holds no
// payload, identity or key.
func report(ctx context.Context, e consumer.Event) {
	switch e.Step {
	case consumer.StepPause, consumer.StepResume, consumer.StepDeadLetter, consumer.StepRetry:
		slog.WarnContext(ctx, string(e.Step), "position", e.Position, "class", e.Class, "attempt", e.Attempt, "error", e.Err)
	}
}
