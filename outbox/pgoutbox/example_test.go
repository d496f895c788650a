package pgoutbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/pgoutbox"
)

// An event is written in the transaction of the change that it tells of.
func ExampleNewWriter() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/shop")
	if err != nil {
		slog.Error("configuration", "error", err)
		return
	}
	defer pool.Close()
	w := pgoutbox.NewWriter(nil, &outbox.WriterOptions{Source: "/shop"})
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "insert into orders (customer) values (7)"); err != nil {
			return err
		}
		return w.Write(ctx, tx, &envelope.Message{Type: "order.placed", Topic: "orders", Key: []byte("customer-7"), Body: []byte("{}")})
	})
	if err != nil {
		slog.Error("place an order", "error", err)
	}
}

// A relay in a program of one's own; the relay command does the same.
func ExampleNewStore() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/shop")
	if err != nil {
		slog.Error("configuration", "error", err)
		return
	}
	defer pool.Close()
	if err := pgoutbox.Migrate(ctx, pool, nil); err != nil {
		slog.Error("migrate", "error", err)
		return
	}
	broker := membroker.New() // or a publisher of kafkabroker or natsbroker
	if err := outbox.NewRelay(pgoutbox.NewStore(pool, nil), broker.Publisher(), nil).Run(ctx); err != nil {
		slog.Error("relay", "error", err)
	}
}

// After a dump was restored into another cluster the relay says so, and does
// nothing. With all writers and relays stopped, the position is carried over.
func ExampleStore_Rebase() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	pool, err := pgxpool.New(ctx, "postgres://localhost/restored")
	if err != nil {
		slog.Error("configuration", "error", err)
		return
	}
	defer pool.Close()
	store := pgoutbox.NewStore(pool, nil)
	relay := outbox.NewRelay(store, membroker.New().Publisher(), nil)
	if _, err := relay.Step(ctx); errors.Is(err, pgoutbox.ErrRestored) {
		if err := store.Rebase(ctx); err != nil {
			slog.Error("rebase", "error", err)
		}
	}
}

// The schema as text, for those who keep all migrations in one place.
func ExampleSQL() {
	text, err := pgoutbox.SQL(&pgoutbox.Options{Schema: "messaging"})
	fmt.Println(strings.Contains(text, `create table "messaging"."unecho_outbox" (`), err)
	// Output:
	// true <nil>
}

// The tables in a schema of their own.
func ExampleMigrate() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	pool, err := pgxpool.New(ctx, "postgres://localhost/shop")
	if err != nil {
		slog.Error("configuration", "error", err)
		return
	}
	defer pool.Close()
	if err := pgoutbox.Migrate(ctx, pool, &pgoutbox.Options{Schema: "messaging"}); err != nil {
		slog.Error("migrate", "error", err)
	}
}
