package sqloutbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"

	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/sqloutbox"
)

func open(dir string) *sql.DB {
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "shop.db")+"?_pragma=journal_mode(wal)&_pragma=busy_timeout(5000)&_txlock=immediate")
	if err != nil {
		log.Fatal(err)
	}
	if err := sqloutbox.Migrate(context.Background(), db); err != nil {
		log.Fatal(err)
	}
	return db
}

func write(db *sql.DB, w *outbox.Writer[*sql.Tx], msgs ...*envelope.Message) {
	tx, err := db.Begin()
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	// ... the business change in tx ...
	if err := errors.Join(w.Write(context.Background(), tx, msgs...), tx.Commit()); err != nil {
		log.Fatal(err)
	}
}

func ExampleNewWriter() {
	dir, err := os.MkdirTemp("", "sqloutbox-example-")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db := open(dir)
	defer func() { _ = db.Close() }()

	w := sqloutbox.NewWriter(&outbox.WriterOptions{Source: "/shop"})
	write(db, w, &envelope.Message{Type: "order.placed", Topic: "orders", Key: []byte("customer-7")})

	broker := membroker.New()
	broker.CreateTopic("orders", 1)
	fmt.Println(outbox.NewRelay(sqloutbox.NewStore(db), broker.Publisher(), nil).Step(context.Background()))
	// Output: 1 <nil>
}

// What operators do with rows that the broker rejected.
func ExampleStore_Parked() {
	dir, err := os.MkdirTemp("", "sqloutbox-example-")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db := open(dir)
	defer func() { _ = db.Close() }()
	ctx, broker := context.Background(), membroker.New()
	broker.CreateTopic("orders", 1)
	store := sqloutbox.NewStore(db)
	relay := outbox.NewRelay(store, broker.Publisher(), nil)

	broker.SetFaults(membroker.Faults{Publish: func(*envelope.Message) error { return brokers.ErrRejected }})
	write(db, sqloutbox.NewWriter(nil), &envelope.Message{ID: "1", Source: "/shop", Type: "order.placed", Topic: "orders"})
	if _, err := relay.Step(ctx); err != nil {
		log.Fatal(err)
	}
	rows, err := store.Parked(ctx, 0, 10)
	if err != nil {
		log.Fatal(err)
	}
	for _, r := range rows {
		fmt.Println(r.ID, r.Topic, r.Type, r.Attempts, r.Reason)
	}

	broker.SetFaults(membroker.Faults{}) // somebody has raised the limit
	fmt.Println(store.Requeue(ctx, rows[0].ID))
	fmt.Println(relay.Step(ctx))
	// Output:
	// 1 orders order.placed 1 brokers: the message was rejected
	// true <nil>
	// 1 <nil>
}

// Business transactions in PostgreSQL by database/sql; the tables and the
// relay are those of package pgoutbox.
func ExampleNewPostgresWriter() {
	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	w := sqloutbox.NewPostgresWriter("", &outbox.WriterOptions{Source: "/shop"})
	write(db, w, &envelope.Message{Type: "order.placed", Topic: "orders", Key: []byte("customer-7")})
}
