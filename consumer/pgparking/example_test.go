package pgparking_test

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/pgparking"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/envelope"
)

func bill(ctx context.Context, tx pgx.Tx, m *envelope.Message) error {
	_, err := tx.Exec(ctx, "insert into invoices (order_id) values ($1)", string(m.Body))
	return err
}

// What cannot be handled is kept in the database of the consumer.
func ExampleNewLot() {
	run := func(ctx context.Context, pool *pgxpool.Pool, src brokers.Source) error {
		if err := pgparking.Migrate(ctx, pool, nil); err != nil {
			return err
		}
		h := consumer.Wrap("billing", pgdedupe.NewStore(pool, nil), bill, nil)
		return consumer.Run(ctx, src, h, &consumer.RunOptions{DeadLetter: consumer.ParkIn(pgparking.NewLot(pool, nil), "billing")})
	}
	_ = run
}

// When the handler is mended, all that waits for it is run once more.
func ExampleLot_List() {
	redriveAll := func(ctx context.Context, pool *pgxpool.Pool) error {
		lot := pgparking.NewLot(pool, nil)
		h := consumer.Wrap("billing", pgdedupe.NewStore(pool, nil), bill, nil)
		filter := consumer.ParkedFilter{Consumer: "billing"}
		for {
			page, err := lot.List(ctx, filter)
			if err != nil {
				return err
			}
			for _, p := range page.Records {
				answers, err := consumer.Redrive(ctx, lot, h, nil, p.ID)
				if err != nil {
					return err
				}
				fmt.Println(answers[0].ID, answers[0].Outcome, answers[0].Err)
			}
			if filter.After = page.Next; page.Next == "" {
				return nil
			}
		}
	}
	_ = redriveAll
}

// A message that ends the process whenever it is handled, such as by running
// out of memory, is parked after three starts.
func ExampleNewStartCounter() {
	run := func(ctx context.Context, pool *pgxpool.Pool, src brokers.Source, h consumer.Handler) error {
		return consumer.Run(ctx, src, h, &consumer.RunOptions{
			DeadLetter: consumer.ParkIn(pgparking.NewLot(pool, nil), "billing"),
			CrashLoop:  consumer.CrashLoop{Counter: pgparking.NewStartCounter(pool, nil), Consumer: "billing", Max: 3},
		})
	}
	_ = run
}

// Decisions that were made long ago are deleted, by every replica.
func ExamplePrune() {
	prune := func(ctx context.Context, pool *pgxpool.Pool) error {
		return dedupe.RunPruner(ctx, func(ctx context.Context, limit int) (int, error) {
			return pgparking.Prune(ctx, pool, nil, limit)
		}, nil)
	}
	_ = prune
}
