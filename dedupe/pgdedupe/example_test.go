package pgdedupe_test

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/envelope"
)

// The handler's transaction also holds the event's key.
func ExampleNewStore() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/shop")
	if err != nil {
		slog.Error("configuration", "error", err)
		return
	}
	defer pool.Close()
	if err := pgdedupe.Migrate(ctx, pool, nil); err != nil {
		slog.Error("migrate", "error", err)
		return
	}
	bill := func(ctx context.Context, tx pgx.Tx, m *envelope.Message) error {
		_, err := tx.Exec(ctx, "insert into invoices (order_id) values ($1)", string(m.Body))
		return err
	}
	_ = consumer.Wrap("billing", pgdedupe.NewStore(pool, nil), bill, nil)
}

// Old keys are deleted in small transactions, by the database's clock.
func ExamplePrune() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/shop")
	if err != nil {
		return
	}
	defer pool.Close()
	for {
		n, err := pgdedupe.Prune(ctx, pool, nil, 1000)
		if err != nil || n < 1000 {
			return
		}
	}
}

// The effect is a call to another service, so there is no transaction to share.
func ExampleNewLeaseStore() {
	pool, err := pgxpool.New(context.Background(), "postgres://localhost/shop")
	if err != nil {
		return
	}
	defer pool.Close()
	charge := func(ctx context.Context, l *dedupe.Lease, m *envelope.Message) error {
		return callPaymentProvider(ctx, l.Derive("charge", 0), m.Body)
	}
	_ = consumer.Wrap("payments", pgdedupe.NewLeaseStore(pool, nil), charge, nil)
}

func callPaymentProvider(context.Context, string, []byte) error { return nil }

// A handler that only contributes statements shares one round trip with the
// claim. What must hold is written in SQL: here, that the account can pay.
func ExampleNewPipelinedStore() {
	pool, err := pgxpool.New(context.Background(), "postgres://localhost/shop")
	if err != nil {
		return
	}
	defer pool.Close()
	bill := func(_ context.Context, b *pgx.Batch, m *envelope.Message) error {
		b.Queue("update accounts set balance = balance - 100 where id = $1", string(m.Body)) // check (balance >= 0)
		b.Queue("insert into invoices (order_id) values ($1)", m.ID)
		return nil
	}
	_ = consumer.Wrap("billing", pgdedupe.NewPipelinedStore(pool, nil), bill, nil)
}

// The transaction is made elsewhere, so the claim goes into it.
func ExampleClaimer() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/shop")
	if err != nil {
		return
	}
	defer pool.Close()
	claimer := pgdedupe.NewClaimer(nil)
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		done, err := claimer.Claim(ctx, tx, dedupe.Claim{Key: dedupe.Key{Consumer: "billing", Source: "/shop", ID: "42"}})
		if err != nil || done != nil {
			return err // a duplicate is no error: there is nothing to do
		}
		_, err = tx.Exec(ctx, "insert into invoices (order_id) values ('42')")
		return err
	})
	if err != nil {
		slog.Error("not acknowledged", "error", err)
	}
}

// What people ask a store.
func ExampleNewAdmin() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/shop")
	if err != nil {
		return
	}
	defer pool.Close()
	admin := pgdedupe.NewAdmin(pool, nil)
	page, err := admin.List(ctx, dedupe.Filter{State: dedupe.StateParked})
	if err != nil {
		return
	}
	for _, e := range page.Entries {
		fmt.Print(e.Explain())
	}
}

// A pruner beside the consumer, with the default delay.
func ExamplePrune_runPruner() {
	pool, err := pgxpool.New(context.Background(), "postgres://localhost/shop")
	if err != nil {
		return
	}
	defer pool.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	_ = dedupe.RunPruner(ctx, func(ctx context.Context, limit int) (int, error) {
		return pgdedupe.Prune(ctx, pool, nil, limit)
	}, nil)
}
