package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"

	_ "modernc.org/sqlite"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/sqloutbox"
)

// open returns a database with an outbox, and a function that removes it.
func open() (*sql.DB, func()) {
	dir, err := os.MkdirTemp("", "outbox-example-")
	if err != nil {
		log.Fatal(err)
	}
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "shop.db")+"?_pragma=journal_mode(wal)&_pragma=busy_timeout(5000)&_txlock=immediate")
	if err != nil {
		log.Fatal(err)
	}
	if err := sqloutbox.Migrate(context.Background(), db); err != nil {
		log.Fatal(err)
	}
	return db, func() { _ = db.Close(); _ = os.RemoveAll(dir) }
}

// write adds messages in a transaction of their own.
func write(db *sql.DB, msgs ...*envelope.Message) {
	w := sqloutbox.NewWriter(&outbox.WriterOptions{Source: "/shop"})
	tx, err := db.Begin()
	if err != nil {
		log.Fatal(err)
	}
	if err := errors.Join(w.Write(context.Background(), tx, msgs...), tx.Commit()); err != nil {
		log.Fatal(err)
	}
}

func order(id string) *envelope.Message {
	return &envelope.Message{ID: id, Type: "order.placed", Topic: "orders", Key: []byte("customer-7"), Body: []byte("{}")}
}

// The event is written in the transaction of the business change: both are
// there, or neither.
func ExampleNewWriter() {
	db, done := open()
	defer done()
	if _, err := db.Exec("create table orders (id text primary key)"); err != nil {
		log.Fatal(err)
	}
	w := sqloutbox.NewWriter(&outbox.WriterOptions{Source: "/shop"}) // outbox.NewWriter with an appender for *sql.Tx

	place := func(id string, commit bool) error {
		tx, err := db.Begin()
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		if _, err := tx.Exec("insert into orders values (?)", id); err != nil {
			return err
		}
		if err := w.Write(context.Background(), tx, order(id)); err != nil || !commit {
			return err
		}
		return tx.Commit()
	}
	fmt.Println(place("kept", true), place("rolled back", false))
	err := w.Write(context.Background(), nil, &envelope.Message{Type: "order.placed"})
	fmt.Println(errors.Is(err, outbox.ErrInvalidMessage), err)

	broker := membroker.New()
	broker.CreateTopic("orders", 1)
	n, err := outbox.NewRelay(sqloutbox.NewStore(db), broker.Publisher(), nil).Step(context.Background())
	fmt.Println(n, err)
	// Output:
	// <nil> <nil>
	// true outbox: invalid message: message 0: the topic is empty
	// 1 <nil>
}

// A relay on the outbox of a SQLite database, which publishes to a broker in
// memory. With PostgreSQL it is pgoutbox.NewStore, with Kafka or NATS
// kafkabroker.NewPublisher or natsbroker.NewPublisher.
func ExampleNewRelay() {
	db, done := open()
	defer done()
	broker := membroker.New()
	broker.CreateTopic("orders", 1)
	relay := outbox.NewRelay(sqloutbox.NewStore(db), broker.Publisher(), &outbox.RelayOptions{
		Observer: outbox.ObserverFunc(func(_ context.Context, e outbox.Event) {
			fmt.Println(e.Step, len(e.Rows)+len(e.Settled))
		}),
	})
	write(db, order("1"), order("2"))
	n, err := relay.Step(context.Background())
	fmt.Println(n, err, broker.Len("orders"))
	// Output:
	// lease 0
	// read 2
	// publish 2
	// settle 2
	// 2 <nil> 2
}

// One step is one batch, with no waiting. An outage spends nobody's attempts
// and leaves the rows where they are.
func ExampleRelay_Step() {
	db, done := open()
	defer done()
	broker := membroker.New()
	broker.CreateTopic("orders", 1)
	relay := outbox.NewRelay(sqloutbox.NewStore(db), broker.Publisher(), nil)
	write(db, order("1"))

	broker.SetFaults(membroker.Faults{Publish: func(*envelope.Message) error { return brokers.ErrUnavailable }})
	_, err := relay.Step(context.Background())
	fmt.Println(errors.Is(err, brokers.ErrUnavailable), broker.Len("orders"))

	broker.SetFaults(membroker.Faults{})
	n, err := relay.Step(context.Background())
	fmt.Println(n, err, broker.Len("orders"))
	n, err = relay.Step(context.Background())
	fmt.Println(n, err)
	// Output:
	// true 0
	// 1 <nil> 1
	// 0 <nil>
}

// Run until the context is done, as a service does; Wake spares the relay in
// the same process the wait for its next look.
func ExampleRelay_Run() {
	db, done := open()
	defer done()
	broker := membroker.New()
	broker.CreateTopic("orders", 1)
	ctx, stop := context.WithCancel(context.Background())
	relay := outbox.NewRelay(sqloutbox.NewStore(db), broker.Publisher(), &outbox.RelayOptions{
		Observer: outbox.ObserverFunc(func(_ context.Context, e outbox.Event) {
			if e.Step == outbox.StepSettle {
				stop() // in a service: SIGTERM, see signal.NotifyContext
			}
		}),
	})
	ended := make(chan error)
	go func() { ended <- relay.Run(ctx) }()

	write(db, order("1"))
	relay.Wake()
	fmt.Println(<-ended, broker.Len("orders"))
	// Output: <nil> 1
}
