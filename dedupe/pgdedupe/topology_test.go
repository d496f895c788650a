package pgdedupe_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/dedupe/storetest"
	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

// TestConformancePgBouncer: in transaction mode the statements of two
// transactions, and what goes on between them, may each meet another connection.
func TestConformancePgBouncer(t *testing.T) {
	bouncer := proc.StartPgBouncer(t, testenv.Postgres(t))
	through := func(tb testing.TB) (pooled, direct string) {
		direct = testenv.Database(tb)
		u, err := url.Parse(direct)
		if err != nil {
			tb.Fatal(err)
		}
		u.Host = bouncer.Addr
		return u.String(), direct
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec} {
		t.Run(mode.String(), func(t *testing.T) {
			storetest.Run(t, func(tb testing.TB, s storetest.Settings) storetest.Harness[pgx.Tx] {
				var o pgdedupe.Options
				pooled, direct := through(tb)
				h := &harness{base: openBaseAt(tb, pooled, direct, &o, mode, s)}
				h.store = pgdedupe.NewStore(h.pool, &o)
				return h
			})
		})
	}
	t.Run("pipelined", func(t *testing.T) {
		storetest.Run(t, func(tb testing.TB, s storetest.Settings) storetest.Harness[*pgx.Batch] {
			var o pgdedupe.Options
			pooled, direct := through(tb)
			h := &pipelined{base: openBaseAt(tb, pooled, direct, &o, pgx.QueryExecModeExec, s)}
			h.Implicit()
			h.store = pgdedupe.NewPipelinedStore(h.pool, &o)
			return h
		})
	})
	t.Run("leases", func(t *testing.T) {
		storetest.RunLease(t, func(tb testing.TB) storetest.LeaseHarness {
			var o pgdedupe.Options
			pooled, direct := through(tb)
			b := openBaseAt(tb, pooled, direct, &o, pgx.QueryExecModeExec, storetest.Settings{})
			return pooledLeases{&b}
		})
	})
}

// pooledLeases implements storetest.LeaseHarness.
type pooledLeases struct{ *base }

func (l pooledLeases) Driver() dedupe.LeaseDriver { return pgdedupe.NewLeaseDriver(l.pool, nil) }

// outEverywhere claims by every kind of store, and demands that none runs its handler.
func outEverywhere(t *testing.T, pool *pgxpool.Pool, id string) {
	t.Helper()
	ctx, c := t.Context(), claim(id)
	for kind, once := range map[string]func() (dedupe.Result, error){
		"transaction": func() (dedupe.Result, error) {
			return pgdedupe.NewStore(pool, nil).Once(ctx, c, func(context.Context, pgx.Tx) ([]byte, error) {
				t.Error("the handler ran on a standby")
				return nil, nil
			})
		},
		"pipeline": func() (dedupe.Result, error) {
			return pgdedupe.NewPipelinedStore(pool, nil).Once(ctx, c, func(context.Context, *pgx.Batch) ([]byte, error) { return nil, nil })
		},
		"lease": func() (dedupe.Result, error) {
			return pgdedupe.NewLeaseStore(pool, nil).Once(ctx, c, func(context.Context, *dedupe.Lease) ([]byte, error) {
				t.Error("the handler ran on a standby")
				return nil, nil
			})
		},
	} {
		if res, err := once(); !errors.Is(err, dedupe.ErrUnavailable) {
			t.Errorf("%s: %v, %v; want ErrUnavailable", kind, res.Outcome, err)
		}
	}
}

// A standby is refused, by name at the start and as an outage afterwards; when it
// is promoted, the keys that it has followed are there.
func TestStandbyIsRefusedUntilItIsPromoted(t *testing.T) {
	primary := proc.StartPostgres(t)
	ctx := t.Context()
	first := testenv.PoolOf(t, primary.URL, 2)
	if err := pgdedupe.Migrate(ctx, first, nil); err != nil {
		t.Fatal(err)
	}
	standby := proc.StartStandby(t, primary)
	if _, err := first.Exec(ctx, "alter system set synchronous_standby_names = '*'"); err != nil {
		t.Fatal(err)
	}
	if _, err := first.Exec(ctx, "select pg_reload_conf()"); err != nil {
		t.Fatal(err)
	}
	second := testenv.PoolOf(t, standby.URL, 2)
	if err := pgdedupe.Validate(ctx, second, nil); err == nil || !strings.Contains(err.Error(), "standby") || !strings.Contains(err.Error(), "target_session_attrs=read-write") {
		t.Errorf("Validate of a standby: %v; want an error that names it and says what to do", err)
	}
	outEverywhere(t, second, "on the standby")

	// One pool for both servers, as a program has that survives a failover.
	both := fmt.Sprintf("postgres://unecho@%s,%s/postgres?sslmode=disable&target_session_attrs=read-write&connect_timeout=2", primary.Addr, standby.Addr)
	pool := testenv.PoolOf(t, both, 2)
	store := pgdedupe.NewStore(pool, nil)
	testenv.Within(t, 30*time.Second, "commits wait for the standby", func() bool {
		var state string
		err := first.QueryRow(ctx, "select sync_state from pg_stat_replication").Scan(&state)
		return err == nil && state == "sync"
	})
	if res, err := store.Once(ctx, claim("before"), exec()); err != nil || res.Outcome != dedupe.Processed {
		t.Fatalf("Once: %v, %v", res.Outcome, err)
	}
	primary.Kill()
	var promoted bool
	if err := second.QueryRow(ctx, "select pg_promote(true, 60)").Scan(&promoted); err != nil || !promoted {
		t.Fatalf("promote: %v, %v", promoted, err)
	}
	if _, err := second.Exec(ctx, "alter system reset synchronous_standby_names"); err != nil {
		t.Fatal(err)
	}
	if _, err := second.Exec(ctx, "select pg_reload_conf()"); err != nil {
		t.Fatal(err)
	}
	var res dedupe.Result
	testenv.Within(t, 60*time.Second, "the store is back after the failover", func() bool {
		var err error
		res, err = store.Once(ctx, claim("before"), exec("select 1/0"))
		return err == nil
	})
	if res.Outcome != dedupe.Duplicate {
		t.Errorf("after the failover: %v, want a duplicate", res.Outcome)
	}
	if res, err := store.Once(ctx, claim("after"), exec()); err != nil || res.Outcome != dedupe.Processed {
		t.Errorf("after the failover: %v, %v", res.Outcome, err)
	}
	if err := pgdedupe.Validate(ctx, second, nil); err != nil {
		t.Errorf("Validate after the promotion: %v", err)
	}
}
