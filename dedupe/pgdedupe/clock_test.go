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
	"github.com/unecho/unecho/dedupe/storetest"
	"github.com/unecho/unecho/internal/planted"
	"github.com/unecho/unecho/internal/testenv"
)

// clocks fails the test when a statement takes a time of this process along.
type clocks struct{ t *testing.T }

func (c clocks) look(args []any) {
	for _, a := range args {
		switch v := a.(type) {
		case time.Time, *time.Time:
			c.t.Errorf("a statement takes the time %v of the process along", v)
		case int64:
			for _, unit := range []time.Duration{time.Second, time.Millisecond, time.Microsecond, time.Nanosecond} {
				if age := time.Since(time.Unix(0, 0).Add(time.Duration(v) * unit)); v > 1e9 && age > -24*time.Hour && age < 24*time.Hour {
					c.t.Errorf("a statement takes %d along, which is about now in units of %v", v, unit)
				}
			}
		}
	}
}

func (c clocks) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	c.look(data.Args)
	return ctx
}
func (clocks) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (c clocks) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		c.look(q.Arguments)
	}
	return ctx
}
func (clocks) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (clocks) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// B32: no time of the process reaches the database, so it decides nothing; and
// the time zone of a session changes nothing either.
func TestB32NoTimeOfTheProcess(t *testing.T) {
	for _, zone := range []string{"UTC", "Pacific/Kiritimati", "Etc/GMT+12"} {
		t.Run(zone, func(t *testing.T) {
			cfg, err := pgxpool.ParseConfig(testenv.SchemaURL(t))
			if err != nil {
				t.Fatal(err)
			}
			cfg.ConnConfig.Tracer = clocks{t}
			cfg.ConnConfig.RuntimeParams["timezone"] = zone
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			if err := pgdedupe.Migrate(t.Context(), pool, nil); err != nil {
				t.Fatal(err)
			}
			zones(t, pool)
		})
	}
}

// zones claims, lets expire and prunes, in transactions and under leases.
func zones(t *testing.T, pool *pgxpool.Pool) {
	ctx := t.Context()
	store, leases := pgdedupe.NewStore(pool, nil), pgdedupe.NewLeaseDriver(pool, nil)
	admin := pgdedupe.NewAdmin(pool, nil)
	c := claim("1")
	c.Retain = 10 * time.Hour
	for _, want := range []dedupe.Outcome{dedupe.Processed, dedupe.Duplicate} {
		if res, err := store.Once(ctx, c, exec()); err != nil || res.Outcome != want {
			t.Errorf("Once: %v, %v; want %v", res.Outcome, err, want)
		}
	}
	if n, err := pgdedupe.Prune(ctx, pool, nil, 0); n != 0 || err != nil {
		t.Errorf("%d keys were pruned ten hours early, %v", n, err)
	}
	if e, err := admin.Find(ctx, c.Key.Stored()); err != nil || e.ExpiresAt.Sub(e.DoneAt) != c.Retain || time.Since(e.DoneAt).Abs() > time.Minute {
		t.Errorf("the key is %+v, %v", e, err)
	}
	held := claim("2")
	held.Retain = 10 * time.Hour
	g, r, err := leases.Acquire(ctx, held, "a", 10*time.Hour)
	if err != nil || r != nil {
		t.Fatal(r, err)
	}
	if _, _, err := leases.Acquire(ctx, held, "b", time.Hour); err == nil {
		t.Error("a lease of ten hours has run out")
	}
	if err := leases.Complete(ctx, held, "a", g.Token, nil); err != nil {
		t.Error(err)
	}
	if n, err := pgdedupe.Prune(ctx, pool, nil, 0); n != 0 || err != nil {
		t.Errorf("%d leases were pruned ten hours early, %v", n, err)
	}
}

// skewed prunes by the clock of a process that is wrong.
type skewed struct {
	*harness
	by time.Duration
}

func (s skewed) Prune(tb testing.TB) int {
	tag, err := s.direct.Exec(tb.Context(), "delete from unecho_key where expires_at <= $1", time.Now().Add(s.by))
	if err != nil {
		tb.Fatal(err)
	}
	return int(tag.RowsAffected())
}

func TestPlantedPruneByProcessClock(t *testing.T) {
	for _, by := range []time.Duration{-100 * 24 * time.Hour, 100 * 24 * time.Hour} {
		var runs []func(testing.TB)
		for _, c := range storetest.Cases[pgx.Tx]() {
			if c.Name != "pruning spares what has not expired" && c.Name != "B46 expired and not pruned is a duplicate" {
				continue
			}
			runs = append(runs, func(tb testing.TB) {
				c.Run(tb, func(tb testing.TB, s storetest.Settings) storetest.Harness[pgx.Tx] {
					return skewed{open(pgdedupe.Options{}, pgx.QueryExecModeExec)(tb, s).(*harness), by}
				})
			})
		}
		if len(runs) != 2 {
			t.Fatalf("%d cases, want 2", len(runs))
		}
		planted.Caught(t, fmt.Sprintf("storetest/prune by a process clock that is off by %v", by), runs...)
	}
}
