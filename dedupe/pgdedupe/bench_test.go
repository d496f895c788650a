package pgdedupe_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/internal/testenv"
)

// The ways to handle an event by one insert, by one worker, in one run: what
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
		"by position":                     placedEvents(1),
		"by position, groups of 100":      placedEvents(100),
		"plain, groups of 100":            plainGroups,
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

// plainGroups is groupedEvents without a key.
func plainGroups(b *testing.B, pool *pgxpool.Pool) {
	n := 0
	for b.Loop() {
		if n++; n%100 > 0 {
			continue
		}
		if err := pgx.BeginFunc(b.Context(), pool, func(tx pgx.Tx) error {
			for range 100 {
				if _, err := tx.Exec(b.Context(), insertEffect, "e"); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			b.Fatal(err)
		}
	}
}

// placedEvents handles so many records in a transaction, each by a statement of
// its own, and counts records.
func placedEvents(group int) func(b *testing.B, pool *pgxpool.Pool) {
	return func(b *testing.B, pool *pgxpool.Pool) {
		store := pgdedupe.NewStore(pool, nil).(dedupe.Placer[pgx.Tx])
		p := dedupe.Partition{Consumer: testenv.Name("c"), Topic: "t"}
		var places []dedupe.Place
		offset := int64(0)
		for b.Loop() {
			places = append(places, dedupe.Place{Offset: offset, Time: time.UnixMilli(1_700_000_000_000 + offset), Fingerprint: [32]byte{1}})
			if offset++; len(places) < group {
				continue
			}
			if _, err := store.OnceAt(b.Context(), p, places, nil, func(ctx context.Context, tx pgx.Tx, fresh []int) ([][]byte, error) {
				for range fresh {
					if _, err := tx.Exec(ctx, insertEffect, "e"); err != nil {
						return nil, err
					}
				}
				return nil, nil
			}); err != nil {
				b.Fatal(err)
			}
			places = places[:0]
		}
	}
}
