package pgdedupe_test

import (
	"context"
	"log/slog"

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
