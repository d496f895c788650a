package pgdedupe_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/internal/testenv"
)

// The four ways to handle an event by one insert, by one worker, in one run: what
// counts is their ratio. `go test -run xxx -bench Event ./dedupe/pgdedupe`
func BenchmarkEvent(b *testing.B) {
	pool := testenv.Pool(b, 2)
	if err := pgdedupe.Migrate(b.Context(), pool, nil); err != nil {
		b.Fatal(err)
	}
	if _, err := pool.Exec(b.Context(), "create table effect (name text not null)"); err != nil {
		b.Fatal(err)
	}
	for name, f := range map[string]func(b *testing.B, pool *pgxpool.Pool){
		"plain transaction without a key": plainEvents,
		"one by one":                      singleEvents,
		"pipelined":                       pipelinedEvents,
		"groups of 100":                   groupedEvents,
	} {
		b.Run(name, func(b *testing.B) { f(b, pool) })
	}
}

const insertEffect = "insert into effect (name) values ($1)"

func plainEvents(b *testing.B, pool *pgxpool.Pool) {
	for b.Loop() {
		if err := pgx.BeginFunc(b.Context(), pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(b.Context(), insertEffect, "e")
			return err
		}); err != nil {
			b.Fatal(err)
		}
	}
}

// fresh makes claims that nobody has made.
func fresh(b *testing.B) func() dedupe.Claim {
	n, run := 0, testenv.Name("b")
	return func() dedupe.Claim {
		n++
		return claim(fmt.Sprint(run, n))
	}
}

func singleEvents(b *testing.B, pool *pgxpool.Pool) {
	store, next := pgdedupe.NewStore(pool, nil), fresh(b)
	for b.Loop() {
		if res, err := store.Once(b.Context(), next(), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			_, err := tx.Exec(ctx, insertEffect, "e")
			return nil, err
		}); err != nil || res.Outcome != dedupe.Processed {
			b.Fatal(res.Outcome, err)
		}
	}
}

func pipelinedEvents(b *testing.B, pool *pgxpool.Pool) {
	store, next := pgdedupe.NewPipelinedStore(pool, nil), fresh(b)
	for b.Loop() {
		if res, err := store.Once(b.Context(), next(), func(_ context.Context, batch *pgx.Batch) ([]byte, error) {
			batch.Queue(insertEffect, "e")
			return nil, nil
		}); err != nil || res.Outcome != dedupe.Processed {
			b.Fatal(res.Outcome, err)
		}
	}
}

// groupedEvents handles a hundred in a transaction, each by a statement of its
// own, and counts events.
func groupedEvents(b *testing.B, pool *pgxpool.Pool) {
	store, next := pgdedupe.NewStore(pool, nil).(dedupe.Batcher[pgx.Tx]), fresh(b)
	var claims []dedupe.Claim
	for b.Loop() {
		if claims = append(claims, next()); len(claims) < 100 {
			continue
		}
		if _, err := store.OnceEach(b.Context(), claims, func(ctx context.Context, tx pgx.Tx, fresh []int) ([][]byte, error) {
			for range fresh {
				if _, err := tx.Exec(ctx, insertEffect, "e"); err != nil {
					return nil, err
				}
			}
			return nil, nil
		}); err != nil {
			b.Fatal(err)
		}
		claims = claims[:0]
	}
}
