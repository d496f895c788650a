package sqloutbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/sqloutbox"
)

// An outbox in SQLite, with its relay in the same process.
func ExampleNewStore() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "app.db")+"?_pragma=journal_mode(wal)&_pragma=busy_timeout(5000)&_txlock=immediate")
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	ctx := context.Background()
	if err := sqloutbox.Migrate(ctx, db); err != nil {
		panic(err)
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		panic(err)
	}
	w := sqloutbox.NewWriter(nil)
	err = w.Write(ctx, tx, &envelope.Message{Source: "/shop", Type: "order.placed", Topic: "orders", Body: []byte("{}")})
	fmt.Println(err, tx.Commit())

	broker := membroker.New()
	broker.CreateTopic("orders", 1)
	fmt.Println(outbox.NewRelay(sqloutbox.NewStore(db), broker.Publisher(), nil).Step(ctx))
	// Output:
	// <nil> <nil>
	// 1 <nil>
}

// Validate says at the start of a program that the tables are not there.
func ExampleValidate() {
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	fmt.Println(sqloutbox.Validate(context.Background(), db) != nil)
	// Output:
	// true
}

// Business transactions in PostgreSQL by database/sql write to the outbox of
// package pgoutbox, which its relay reads.
func ExampleNewPostgresWriter() {
	ctx := context.Background()
	db, err := sql.Open("pgx", "postgres://localhost/shop")
	if err != nil {
		slog.Error("configuration", "error", err)
		return
	}
	defer func() { _ = db.Close() }()
	w := sqloutbox.NewPostgresWriter("", &outbox.WriterOptions{Source: "/shop"})
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		slog.Error("begin", "error", err)
		return
	}
	defer func() { _ = tx.Rollback() }() // does nothing after the commit
	if err := w.Write(ctx, tx, &envelope.Message{Type: "order.placed", Topic: "orders", Key: []byte("customer-7")}); err != nil {
		slog.Error("write", "error", err)
		return
	}
	if err := tx.Commit(); err != nil {
		slog.Error("commit", "error", err)
	}
}
