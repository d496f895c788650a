package pgdedupe_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/internal/testenv"
)

// fixture is a migrated schema and a pool in it.
type fixture struct {
	t    *testing.T
	pool *pgxpool.Pool
}

func newFixture(t *testing.T, conns int32, setup ...string) fixture {
	t.Helper()
	f := fixture{t, testenv.Pool(t, conns)}
	if err := pgdedupe.Migrate(t.Context(), f.pool, nil); err != nil {
		t.Fatal(err)
	}
	for _, sql := range setup {
		f.exec(sql)
	}
	return f
}

func (f fixture) exec(sql string, args ...any) {
	f.t.Helper()
	if _, err := f.pool.Exec(f.t.Context(), sql, args...); err != nil {
		f.t.Fatal(err)
	}
}

func (f fixture) wantInt(want int, sql string, args ...any) {
	f.t.Helper()
	var n int
	if err := f.pool.QueryRow(f.t.Context(), sql, args...).Scan(&n); err != nil || n != want {
		f.t.Errorf("%s: %d, %v; want %d", sql, n, err, want)
	}
}

// wantIdle: every connection is back, and works.
func (f fixture) wantIdle() {
	f.t.Helper()
	testenv.Within(f.t, 10*time.Second, "all connections are back", func() bool { return f.pool.Stat().AcquiredConns() == 0 })
	for range f.pool.Config().MaxConns {
		conn, err := f.pool.Acquire(f.t.Context())
		if err != nil {
			f.t.Fatal(err)
		}
		defer conn.Release()
		if s := conn.Conn().PgConn().TxStatus(); s != 'I' {
			f.t.Errorf("a connection came back in the state %c", s)
		}
	}
}

func claim(id string) dedupe.Claim {
	k := dedupe.Key{Consumer: "billing", Source: "/orders", ID: id}
	return dedupe.Claim{Key: k, Fingerprint: dedupe.Fingerprint(k)}
}

type handler = func(ctx context.Context, tx pgx.Tx) ([]byte, error)

func exec(sqls ...string) handler {
	return func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
		for _, sql := range sqls {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return nil, err
			}
		}
		return nil, nil
	}
}

func TestLockTimeoutIsTheClaimsAlone(t *testing.T) {
	url := testenv.SchemaURL(t)
	for name, set := range map[string]string{"0": "", "7s": "set lock_timeout = '7s'"} {
		cfg, err := pgxpool.ParseConfig(url)
		if err != nil {
			t.Fatal(err)
		}
		cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, set)
			return err
		}
		pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		if err := pgdedupe.Migrate(t.Context(), pool, nil); err != nil {
			t.Fatal(err)
		}
		_, err = pgdedupe.NewStore(pool, nil).Once(t.Context(), claim(name), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			var got string
			err := tx.QueryRow(ctx, "show lock_timeout").Scan(&got)
			if got != name {
				t.Errorf("lock_timeout is %q in the handler, want %q, as before the claim", got, name)
			}
			return nil, err
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// TestB35Deadlock: two handlers that update two rows in opposite order.
func TestB35Deadlock(t *testing.T) {
	for name, wrap := range map[string]func(error) error{
		"wrapped":   func(err error) error { return fmt.Errorf("handler: %w", err) },
		"formatted": func(err error) error { return fmt.Errorf("handler: %v", err) }, //nolint:errorlint // what handlers do
		"swallowed": func(error) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 4, "create table account (id int primary key, n int not null)", "insert into account values (1, 0), (2, 0)")
			store := pgdedupe.NewStore(f.pool, nil)
			var locked, wg sync.WaitGroup
			locked.Add(2)
			for i, order := range [][]int{{1, 2}, {2, 1}} {
				var first sync.Once
				wg.Go(func() {
					_, err := store.Once(t.Context(), claim(fmt.Sprint(i)), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
						for _, id := range order {
							if _, err := tx.Exec(ctx, "update account set n = n + 1 where id = $1", id); err != nil {
								return nil, wrap(err)
							}
							first.Do(func() { locked.Done(); locked.Wait() })
						}
						return nil, nil
					})
					if err != nil {
						t.Errorf("handler %d: %v", i, err)
					}
				})
			}
			wg.Wait()
			f.wantInt(4, "select sum(n) from account")
			f.wantInt(2, "select count(*) from unecho_key")
			f.wantIdle()
		})
	}
}

// TestB35Serializable: a read and a write that depends on it, many at once. The
// failure may come with any statement or with the commit.
func TestB35Serializable(t *testing.T) {
	f := newFixture(t, 8, "create table account (id int primary key, n int not null)", "insert into account values (1, 0)")
	store := pgdedupe.NewStore(f.pool, &pgdedupe.Options{Isolation: pgx.Serializable, Tx: dedupe.TxOptions{Retries: 100}})
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			_, err := store.Once(t.Context(), claim(fmt.Sprint(i)), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
				var n int
				if err := tx.QueryRow(ctx, "select n from account where id = 1").Scan(&n); err != nil {
					return nil, err
				}
				_, err := tx.Exec(ctx, "update account set n = $1 where id = 1", n+1)
				return nil, err
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	f.wantInt(24, "select n from account")
	f.wantIdle()
}

func TestDeferredConstraintIsTheHandlers(t *testing.T) {
	f := newFixture(t, 2, "create table e (n int unique deferrable initially deferred)", "insert into e values (1)")
	store := pgdedupe.NewStore(f.pool, nil)
	_, err := store.Once(t.Context(), claim("1"), exec("insert into e values (1)"))
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != "23505" || errors.Is(err, dedupe.ErrUnknownOutcome) || errors.Is(err, dedupe.ErrUnavailable) {
		t.Fatalf("Once: %v, want the server's 23505, as a definite failure", err)
	}
	f.wantInt(0, "select count(*) from unecho_key")
	if _, err := store.Once(t.Context(), claim("1"), exec("insert into e values (2)")); err != nil {
		t.Error(err)
	}
	f.wantIdle()
}

// TestHandlerTimeoutIsNoOutage: pgx closes the connection when a context ends
// in the middle of a statement, which looks like a lost one.
func TestHandlerTimeoutIsNoOutage(t *testing.T) {
	f := newFixture(t, 2)
	store := pgdedupe.NewStore(f.pool, nil)
	slow := func(ctx context.Context, tx pgx.Tx) error {
		ctx, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
		defer cancel()
		_, err := tx.Exec(ctx, "select pg_sleep(60)")
		return err
	}
	for name, tc := range map[string]struct {
		wrap func(error) error
		want error
	}{
		"wrapped":   {func(err error) error { return fmt.Errorf("handler: %w", err) }, context.DeadlineExceeded},
		"formatted": {func(err error) error { return fmt.Errorf("handler: %v", err) }, nil}, //nolint:errorlint // what handlers do
		"swallowed": {func(error) error { return nil }, dedupe.ErrScope},
	} {
		_, err := store.Once(t.Context(), claim("1"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			return nil, tc.wrap(slow(ctx, tx))
		})
		if err == nil || errors.Is(err, dedupe.ErrUnavailable) || errors.Is(err, dedupe.ErrUnknownOutcome) || tc.want != nil && !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want a failure of the handler, %v", name, err, tc.want)
		}
	}
	f.wantInt(0, "select count(*) from unecho_key")
	f.wantIdle()
}

// TestBackendTerminated: an administrator, or a fail-over, ends the session.
func TestBackendTerminated(t *testing.T) {
	f := newFixture(t, 4, "create table e (n int)")
	store := pgdedupe.NewStore(f.pool, nil)
	terminate := func(ctx context.Context, tx pgx.Tx) {
		f.exec("select pg_terminate_backend($1)", tx.Conn().PgConn().PID())
	}
	for name, after := range map[string]handler{
		"and a statement fails": exec("insert into e values (1)"),
		"and it is ignored": func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			_, _ = exec("insert into e values (1)")(ctx, tx)
			return nil, nil
		},
		"and nothing is sent": func(context.Context, pgx.Tx) ([]byte, error) { return nil, nil },
	} {
		_, err := store.Once(t.Context(), claim(name), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			terminate(ctx, tx)
			return after(ctx, tx)
		})
		if !errors.Is(err, dedupe.ErrUnavailable) && !errors.Is(err, dedupe.ErrUnknownOutcome) {
			t.Errorf("%s: %v, want an outage or an unknown outcome", name, err)
		}
		f.wantInt(0, "select count(*) from unecho_key")
	}
	f.wantIdle()
}

// TestB33CommitDeadline: a deadline in the middle of a commit. Some of these
// commits are applied although their answer is an error.
func TestB33CommitDeadline(t *testing.T) {
	f := newFixture(t, 4, "create table e (id text)")
	unknown, applied := 0, 0
	for i := range 200 {
		id := fmt.Sprint(i)
		store := pgdedupe.NewStore(f.pool, &pgdedupe.Options{Tx: dedupe.TxOptions{CommitTimeout: time.Duration(20+3*i) * time.Microsecond}})
		fn := func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			_, err := tx.Exec(ctx, "insert into e values ($1)", id)
			return nil, err
		}
		_, err := store.Once(t.Context(), claim(id), fn)
		if err != nil {
			if !errors.Is(err, dedupe.ErrUnknownOutcome) {
				t.Fatalf("Once: %v, want an unknown outcome", err)
			}
			unknown++
			res, err := pgdedupe.NewStore(f.pool, nil).Once(t.Context(), claim(id), fn)
			if err != nil {
				t.Fatal(err)
			}
			if res.Outcome == dedupe.Duplicate {
				applied++
			}
		}
	}
	t.Logf("of 200 commits %d were unknown, of which %d had been applied", unknown, applied)
	if unknown == 0 {
		t.Error("no commit met its deadline: the test shows nothing")
	}
	f.wantInt(200, "select count(*) from e")
	f.wantInt(200, "select count(distinct id) from e")
	f.wantIdle()
}

func TestPoolExhausted(t *testing.T) {
	f := newFixture(t, 1)
	store := pgdedupe.NewStore(f.pool, &pgdedupe.Options{Timeout: 50 * time.Millisecond})
	_, err := store.Once(t.Context(), claim("outer"), func(ctx context.Context, _ pgx.Tx) ([]byte, error) {
		_, err := store.Once(ctx, claim("inner"), exec("select 1"))
		if !errors.Is(err, dedupe.ErrBusy) || errors.Is(err, dedupe.ErrUnavailable) || !strings.Contains(err.Error(), "1 of 1 are in use") {
			t.Errorf("Once: %v, want ErrBusy that names the pool, and no outage", err)
		}
		return nil, nil
	})
	if err != nil {
		t.Error(err)
	}
	f.wantIdle()
}

// TestNotMigrated: a missing table is nobody's message's fault.
func TestNotMigrated(t *testing.T) {
	pool := testenv.Pool(t, 2)
	if err := pgdedupe.Validate(t.Context(), pool, nil); err == nil || !strings.Contains(err.Error(), "migrate it first") {
		t.Errorf("Validate: %v, want what to do", err)
	}
	_, err := pgdedupe.NewStore(pool, nil).Once(t.Context(), claim("1"), exec("select 1"))
	if !errors.Is(err, dedupe.ErrUnavailable) {
		t.Errorf("Once: %v, want ErrUnavailable", err)
	}
	fixture{t, pool}.wantIdle()
}

func TestSchemas(t *testing.T) {
	f := newFixture(t, 2)
	schema := testenv.Name("Odd ü; drop--")
	o := &pgdedupe.Options{Schema: schema, Anonymous: true}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, _ = f.pool.Exec(ctx, "drop schema "+pgx.Identifier{schema}.Sanitize()+" cascade")
	})
	if err := pgdedupe.Migrate(t.Context(), f.pool, o); err != nil {
		t.Fatal(err)
	}
	if err := pgdedupe.Validate(t.Context(), f.pool, o); err != nil {
		t.Error(err)
	}
	for _, st := range []dedupe.Store[pgx.Tx]{pgdedupe.NewStore(f.pool, nil), pgdedupe.NewStore(f.pool, o)} {
		if res, err := st.Once(t.Context(), claim("1"), exec("select 1")); err != nil || res.Outcome != dedupe.Processed {
			t.Errorf("Once: %v, %v; want processed in each schema", res.Outcome, err)
		}
	}
	f.wantInt(1, "select count(*) from unecho_key where id = '1' and consumer = 'billing'")
	f.wantInt(1, "select count(*) from "+pgx.Identifier{schema, "unecho_key"}.Sanitize()+" where coalesce(tenant, consumer, source, id) is null")
}

func TestPrune(t *testing.T) {
	f := newFixture(t, 2)
	f.exec(`insert into unecho_key (key, done_at, expires_at, fingerprint)
		select gen_random_uuid(), now(), now() - interval '1 second', '' from generate_series(1, 2500)`)
	f.exec(`insert into unecho_key (key, done_at, expires_at, fingerprint)
		select gen_random_uuid(), now(), now() - interval '1 second', '' from generate_series(1, 2)`)
	f.exec(`insert into unecho_conflict (key, seen_at, fingerprint, first_fingerprint)
		select key, now(), '1', '' from (select key from unecho_key order by key limit 2) as k`)
	f.exec(`insert into unecho_key (key, done_at, expires_at, fingerprint)
		select gen_random_uuid(), now(), now() + interval '1 minute', '' from generate_series(1, 7)`)
	for _, tc := range []struct{ limit, want, left int }{{1, 1, 2508}, {1700, 1700, 808}, {0, 799, 9}, {0, 0, 9}} {
		n, err := pgdedupe.Prune(t.Context(), f.pool, nil, tc.limit)
		if err != nil || n != tc.want {
			t.Errorf("Prune(%d) = %d, %v; want %d", tc.limit, n, err, tc.want)
		}
		f.wantInt(tc.left, "select count(*) from unecho_key")
	}
	f.exec("delete from unecho_conflict")
	if n, err := pgdedupe.Prune(t.Context(), f.pool, nil, 0); n != 2 || err != nil {
		t.Errorf("Prune after the conflicts were settled = %d, %v; want 2", n, err)
	}
}

func TestOptionsCheck(t *testing.T) {
	pool := testenv.Pool(t, 1)
	for _, o := range []*pgdedupe.Options{{Schema: `a"b`}, {Schema: strings.Repeat("x", 64)}, {Isolation: pgx.ReadUncommitted}, {Isolation: "x; drop"}} {
		if o.Check() == nil {
			t.Errorf("Check(%+v) = nil", o)
		}
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("NewStore with %+v does not panic", o)
				}
			}()
			pgdedupe.NewStore(pool, o)
		}()
	}
	if err := (*pgdedupe.Options)(nil).Check(); err != nil {
		t.Error(err)
	}
}

func TestSQL(t *testing.T) {
	pool := testenv.Pool(t, 1)
	if _, err := pool.Exec(t.Context(), pgdedupe.SQL(nil)); err != nil {
		t.Fatal(err)
	}
	if err := pgdedupe.Validate(t.Context(), pool, nil); err != nil {
		t.Error(err)
	}
}
