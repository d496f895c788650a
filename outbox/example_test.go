package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	_ "modernc.org/sqlite"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/sqloutbox"
)

// open returns a database with an outbox, and its end.
func open(ctx context.Context) (db *sql.DB, end func()) {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		panic(err)
	}
	db, err = sql.Open("sqlite", "file:"+filepath.Join(dir, "shop.db")+"?_pragma=journal_mode(wal)&_pragma=busy_timeout(5000)&_txlock=immediate")
	if err == nil {
		err = sqloutbox.Migrate(ctx, db)
	}
	if err != nil {
		panic(err)
	}
	return db, func() { _ = db.Close(); _ = os.RemoveAll(dir) }
}

// place is a business transaction that tells of what it does.
func place(ctx context.Context, db *sql.DB, w *outbox.Writer[*sql.Tx], order string) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // does nothing after the commit
	// Here the order itself is stored.
	err = w.Write(ctx, tx, &envelope.Message{Type: "order.placed", Topic: "orders", Key: []byte("customer-7"), Body: []byte(order)})
	if err != nil {
		return err
	}
	if order == "bad" {
		return errors.New("out of stock") // and nobody is told of the order
	}
	return tx.Commit()
}

// An event is written in the transaction of the change that it tells of, and
// published if that was committed.
func Example() {
	ctx := context.Background()
	db, end := open(ctx)
	defer end()
	broker := membroker.New()
	broker.CreateTopic("orders", 1)

	w := sqloutbox.NewWriter(&outbox.WriterOptions{Source: "/shop"})
	for _, order := range []string{"good", "bad"} {
		fmt.Println(order, place(ctx, db, w, order))
	}
	relay := outbox.NewRelay(sqloutbox.NewStore(db), broker.Publisher(), nil)
	n, err := relay.Step(ctx)
	fmt.Println(n, err, broker.Len("orders"))
	// Output:
	// good <nil>
	// bad out of stock
	// 1 <nil> 1
}

// A message that no broker could take is refused before it is written.
func ExampleWriter_Write() {
	ctx := context.Background()
	db, end := open(ctx)
	defer end()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		panic(err)
	}
	defer func() { _ = tx.Rollback() }()
	w := sqloutbox.NewWriter(&outbox.WriterOptions{Source: "/shop"})
	err = w.Write(ctx, tx, &envelope.Message{Type: "order.placed", Topic: "new orders"})
	fmt.Println(errors.Is(err, outbox.ErrInvalidMessage))

	m := &envelope.Message{Type: "order.placed", Topic: "orders"}
	err = w.Write(ctx, tx, m)
	fmt.Println(err, m.Source, len(m.ID)) // what was missing is filled in
	// Output:
	// true
	// <nil> /shop 36
}

// A relay beside the writers in one process is woken by them, and need not
// look for new rows often.
func ExampleRelay_Run() {
	ctx, stop := context.WithCancel(context.Background())
	db, end := open(ctx)
	defer end()
	broker := membroker.New()
	broker.CreateTopic("orders", 1)
	settled := make(chan int)
	relay := outbox.NewRelay(sqloutbox.NewStore(db), broker.Publisher(), &outbox.RelayOptions{
		Observer: outbox.ObserverFunc(func(_ context.Context, e outbox.Event) {
			if e.Step == outbox.StepSettle {
				settled <- len(e.Settled)
			}
		}),
	})
	done := make(chan error)
	go func() { done <- relay.Run(ctx) }()

	w := sqloutbox.NewWriter(&outbox.WriterOptions{Source: "/shop"})
	if err := place(ctx, db, w, "good"); err != nil {
		fmt.Println(err)
	}
	relay.Wake() // after the commit
	fmt.Println("settled", <-settled)
	stop() // on SIGTERM; Run finishes the batch in hand
	fmt.Println(<-done)
	// Output:
	// settled 1
	// <nil>
}

// What the broker will never take is parked, and waits for somebody to look.
func ExampleParker() {
	ctx := context.Background()
	db, end := open(ctx)
	defer end()
	broker := membroker.New()
	broker.CreateTopic("orders", 1)
	broker.SetFaults(membroker.Faults{Publish: func(*envelope.Message) error { return brokers.ErrRejected }})
	w := sqloutbox.NewWriter(&outbox.WriterOptions{Source: "/shop"})
	if err := place(ctx, db, w, "good"); err != nil {
		fmt.Println(err)
	}
	store := sqloutbox.NewStore(db)
	relay := outbox.NewRelay(store, broker.Publisher(), nil)
	if _, err := relay.Step(ctx); err != nil {
		fmt.Println(err)
	}
	var p outbox.Parker = store
	rows, err := p.Parked(ctx, 0, 100)
	for _, row := range rows {
		fmt.Println(row.Topic, row.Type, row.Reason)
	}
	broker.SetFaults(membroker.Faults{}) // it was a mistake in the broker's configuration
	requeued, err2 := p.Requeue(ctx, rows[0].ID)
	n, err3 := relay.Step(ctx)
	fmt.Println(requeued, n, errors.Join(err, err2, err3))
	// Output:
	// orders order.placed brokers: the message was rejected
	// true 1 <nil>
}

// One step is one batch, with no waiting. An outage spends nobody's attempts
// and leaves the rows where they are.
func ExampleRelay_Step() {
	ctx := context.Background()
	db, end := open(ctx)
	defer end()
	broker := membroker.New()
	broker.CreateTopic("orders", 1)
	relay := outbox.NewRelay(sqloutbox.NewStore(db), broker.Publisher(), nil)
	if err := place(ctx, db, sqloutbox.NewWriter(&outbox.WriterOptions{Source: "/shop"}), "good"); err != nil {
		fmt.Println(err)
	}
	broker.SetFaults(membroker.Faults{Publish: func(*envelope.Message) error { return brokers.ErrUnavailable }})
	_, err := relay.Step(ctx)
	fmt.Println(errors.Is(err, brokers.ErrUnavailable), broker.Len("orders"))

	broker.SetFaults(membroker.Faults{})
	n, err := relay.Step(ctx)
	fmt.Println(n, err, broker.Len("orders"))
	// Output:
	// true 0
	// 1 <nil> 1
}
