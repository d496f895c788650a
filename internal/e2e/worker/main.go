// Command worker is the consumer of the end-to-end tests: it is killed at
// random moments, so it holds nothing that a kill could not end.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/kafkabroker"
	"github.com/unecho/unecho/brokers/natsbroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/pgparking"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/envelope"
)

// name is the consumer's.
const name = "e2e"

// fatal is the order that ends the process whenever it is handled.
var fatal = os.Getenv("WORKER_FATAL")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	context.AfterFunc(ctx, func() {
		stop() // a second signal ends the process at once
		fmt.Println("worker drains")
	})
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("WORKER_DATABASE"))
	if err != nil {
		return err
	}
	defer pool.Close()
	src, done, err := source()
	if err != nil {
		return err
	}
	defer done()
	o := &consumer.RunOptions{DeadLetter: refuse, Concurrency: 8, Order: consumer.OrderByLane, Batch: consumer.Batch{Wait: 5 * time.Millisecond},
		Observer: consumer.ObserverFunc(report)}
	o.Batch.Max, _ = strconv.Atoi(os.Getenv("WORKER_BATCH")) // none is one by one
	switch os.Getenv("WORKER_ORDER") {
	case "key":
		o.Order = consumer.OrderByKey
	case "none":
		o.Order = consumer.Unordered
	}
	if fatal != "" {
		o.DeadLetter = consumer.ParkIn(pgparking.NewLot(pool, nil), name)
		o.CrashLoop = consumer.CrashLoop{Counter: pgparking.NewStartCounter(pool, nil), Consumer: name}
	}
	fmt.Println("worker runs")
	return consumer.Run(ctx, src, handler(pgdedupe.NewStore(pool, nil)), o)
}

// handler is that of events by their keys, unless positions are asked for, with
// keys or alone.
func handler(st dedupe.Store[pgx.Tx]) consumer.Handler {
	switch os.Getenv("WORKER_WATERMARK") {
	case "keys":
		return consumer.WrapWatermark(name, st, apply, &consumer.Options{Extractor: envelope.CloudEvents()})
	case "alone":
		return consumer.WrapWatermark(name, st, note, nil)
	}
	return consumer.Wrap(name, st, apply, nil)
}

// note is the effect of a record that names no event.
func note(ctx context.Context, tx pgx.Tx, m *envelope.Message) error {
	_, err := tx.Exec(ctx, "insert into records (position, body) values ($1, $2)", m.Position, string(m.Body))
	return err
}

// refuse lets nothing pass as a dead letter: there is none in this test.
func refuse(_ context.Context, f *consumer.Failure) error {
	fmt.Fprintln(os.Stderr, "worker: dead letter:", f.Reason, f.Err)
	return errors.New("there must be no dead letters")
}

func report(_ context.Context, e consumer.Event) {
	if e.Err != nil && e.Step != consumer.StepReturn {
		fmt.Fprintln(os.Stderr, "worker:", e.Step, e.Position, e.Class, e.Err)
	}
}

// order is the body of an event.
type order struct {
	ID       string `json:"id"`
	Customer int    `json:"customer"`
	Seq      int    `json:"seq"`
}

// apply is the effect: a row in a table without a unique constraint, which
// would hide a second one, and a running balance.
func apply(ctx context.Context, tx pgx.Tx, m *envelope.Message) error {
	var o order
	if err := json.Unmarshal(m.Body, &o); err != nil {
		return consumer.Permanent(err)
	}
	if _, err := tx.Exec(ctx, "insert into effects (order_id, customer, seq) values ($1, $2, $3)", o.ID, o.Customer, o.Seq); err != nil {
		return err
	}
	if err := die(ctx, tx, o.ID); err != nil {
		return err
	}
	if err := dawdle(ctx, tx, o.ID); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, "update customers set balance = balance + 1 where id = $1", o.Customer)
	return err
}

// die ends the process at the fatal order, if there is one. The others take
// longer, so that those at its side die with it.
func die(ctx context.Context, tx pgx.Tx, order string) error {
	switch fatal {
	case "":
		return nil
	case order:
		_, err := tx.Exec(ctx, "select pg_sleep(0.03)")
		if err == nil {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // nothing is done between the signal and the end
		}
		return err
	}
	_, err := tx.Exec(ctx, "select pg_sleep(0.05)")
	return err
}

// dawdle makes the handler take some time, and tells of each run.
func dawdle(ctx context.Context, tx pgx.Tx, order string) error {
	text := os.Getenv("WORKER_SLOW")
	if text == "" {
		return nil
	}
	slow, err := time.ParseDuration(text)
	if err != nil {
		return consumer.Unavailable(err)
	}
	fmt.Println("ran", order)
	if os.Getenv("WORKER_SLOW_STATEMENT") != "" {
		_, err = tx.Exec(ctx, "select pg_sleep($1)", slow.Seconds())
		return err
	}
	select {
	case <-time.After(slow):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func source() (brokers.Source, func(), error) {
	topic := os.Getenv("WORKER_TOPIC")
	if addrs := os.Getenv("WORKER_KAFKA"); addrs != "" {
		s, err := kafkabroker.NewSource(kafkabroker.Config{Brokers: strings.Split(addrs, ","), GroupID: topic, Topics: []string{topic},
			SessionTimeout: 6 * time.Second, HeartbeatInterval: 500 * time.Millisecond})
		return s, func() {}, err
	}
	nc, err := natsbroker.Connect(os.Getenv("WORKER_NATS"))
	if err != nil {
		return nil, nil, err
	}
	pending := 1 // which keeps the order
	if os.Getenv("WORKER_ORDER") == "none" {
		pending = 0
	}
	s, err := natsbroker.NewSource(nc, natsbroker.Config{Stream: topic, Durable: name, AckWait: 2 * time.Second, MaxAckPending: pending})
	return s, nc.Close, err
}
