package pgdedupe_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/internal/testenv"
)

// Partitions, and consumers of one, do not wait for each other.
func TestPartitionsDoNotWaitForEachOther(t *testing.T) {
	pool := testenv.Pool(t, 4)
	if err := pgdedupe.Migrate(t.Context(), pool, nil); err != nil {
		t.Fatal(err)
	}
	store := pgdedupe.NewStore(pool, &pgdedupe.Options{LockWait: 100 * time.Millisecond}).(dedupe.Placer[pgx.Tx])
	all := []dedupe.Partition{{Consumer: "a", Topic: "t"}, {Consumer: "a", Topic: "t", Number: 1}, {Consumer: "b", Topic: "t"}, {Consumer: "a", Topic: "u"}}
	for offset := range int64(2) { // with and without a row
		nested(t, store, all, offset)
	}
}

// nested handles a record of the first partition, and in the middle of it one of
// each of the others.
func nested(t *testing.T, store dedupe.Placer[pgx.Tx], all []dedupe.Partition, offset int64) {
	t.Helper()
	if len(all) == 0 {
		return
	}
	answers, err := store.OnceAt(t.Context(), all[0], []dedupe.Place{{Offset: offset}}, nil, func(context.Context, pgx.Tx, []int) ([][]byte, error) {
		nested(t, store, all[1:], offset)
		return nil, nil
	})
	if err != nil || answers[0].Outcome != dedupe.Processed {
		t.Errorf("%+v: %v, %v", all[0], answers, err)
	}
}

// The lock_timeout of the connection is the handler's again when it runs.
func TestPositionLeavesTheLockTimeout(t *testing.T) {
	pool := testenv.Pool(t, 1)
	if err := pgdedupe.Migrate(t.Context(), pool, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), "set lock_timeout = '4321ms'"); err != nil {
		t.Fatal(err)
	}
	store := pgdedupe.NewStore(pool, nil).(dedupe.Placer[pgx.Tx])
	for offset := range int64(2) {
		claims := []dedupe.Claim{claim(testenv.Name("k"))}
		if _, err := store.OnceAt(t.Context(), dedupe.Partition{Consumer: "c", Topic: "t"}, []dedupe.Place{{Offset: offset}}, claims,
			func(ctx context.Context, tx pgx.Tx, _ []int) ([][]byte, error) {
				var got string
				err := tx.QueryRow(ctx, "show lock_timeout").Scan(&got)
				if got != "4321ms" {
					t.Errorf("the handler's lock_timeout is %s, want 4321ms", got)
				}
				return nil, err
			}); err != nil {
			t.Fatal(err)
		}
	}
}
