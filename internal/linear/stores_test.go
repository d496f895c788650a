// Package linear runs what storetest knows of one key on every store there is:
// histories of clients at once, random sequences, and one script whose answers
// must be the same everywhere.
package linear

import (
	"context"
	"database/sql"
	"path/filepath"
	"sync"
	"testing"

	_ "github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/redis/go-redis/v9"
	_ "modernc.org/sqlite"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/dedupe/redisdedupe"
	"github.com/unecho/unecho/dedupe/sqldedupe"
	"github.com/unecho/unecho/dedupe/storetest"
	"github.com/unecho/unecho/internal/testenv"
)

// store is one of the stores, without its type parameter.
type store struct {
	name string
	// machine and linear run the models of storetest.
	machine func(t *testing.T)
	linear  func(tb testing.TB, n int)
	// once claims; the handler adds one effect of a name, and ends as told.
	once  func(ctx context.Context, c dedupe.Claim, effect string, reply []byte, err error) (dedupe.Result, error)
	count func(tb testing.TB, effect string) int
	admin dedupe.Admin
	prune func(tb testing.TB) // nil where keys go by themselves
	eager bool
}

// each runs f on every store, on a database of its own.
func each(t *testing.T, f func(t *testing.T, s store)) {
	for name, open := range map[string]func(tb testing.TB) store{
		"memdedupe":            openMemory,
		"memdedupe leases":     openMemoryLeases,
		"pgdedupe":             openPgx,
		"pgdedupe pipelined":   openPipelined,
		"pgdedupe leases":      openPgxLeases,
		"sqldedupe PostgreSQL": openSQLPostgres,
		"sqldedupe MariaDB":    openMariaDB,
		"sqldedupe SQLite":     openSQLite,
		"redisdedupe":          openRedis,
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			s.name = name
			f(t, s)
		})
	}
}

// harness implements storetest.Harness, storetest.Administered and
// storetest.Pruner by functions.
type harness[S any] struct {
	store dedupe.Store[S]
	add   func(ctx context.Context, scope S, name string) error
	count func(tb testing.TB, name string) int
	admin dedupe.Admin
}

func (h harness[S]) Store() dedupe.Store[S] { return h.store }
func (h harness[S]) Add(ctx context.Context, scope S, name string) error {
	return h.add(ctx, scope, name)
}
func (h harness[S]) Count(tb testing.TB, name string) int { return h.count(tb, name) }
func (h harness[S]) Conflicts(testing.TB) int             { return 0 }
func (h harness[S]) Admin() dedupe.Admin                  { return h.admin }

// eager implements storetest.Eager.
type eager[S any] struct{ harness[S] }

func (eager[S]) Eager() {}

func erase[S any](h interface {
	storetest.Harness[S]
	storetest.Administered
}) store {
	_, eager := any(h).(storetest.Eager)
	return store{
		machine: func(t *testing.T) { storetest.RunMachine[S](t, h) },
		linear:  func(tb testing.TB, n int) { storetest.RunLinear[S](tb, h, n) },
		once:    onceOf(h.Store(), h.Add),
		count:   h.Count,
		admin:   h.Admin(),
		eager:   eager,
	}
}

func onceOf[S any](st dedupe.Store[S], add func(context.Context, S, string) error) func(context.Context, dedupe.Claim, string, []byte, error) (dedupe.Result, error) {
	return func(ctx context.Context, c dedupe.Claim, effect string, reply []byte, err error) (dedupe.Result, error) {
		return st.Once(ctx, c, func(ctx context.Context, scope S) ([]byte, error) {
			if err != nil {
				return nil, err // before the effect: no lease undoes it
			}
			return reply, add(ctx, scope, effect)
		})
	}
}

// leases implements storetest.LeaseHarness.
type leases struct {
	driver dedupe.LeaseDriver
	admin  dedupe.Admin
}

func (l leases) Driver() dedupe.LeaseDriver { return l.driver }
func (l leases) Admin() dedupe.Admin        { return l.admin }

func eraseLeases(l leases) store {
	e := &effects{n: make(map[string]int)}
	return store{
		machine: func(t *testing.T) { storetest.RunLeaseMachine(t, l) },
		linear:  func(tb testing.TB, n int) { storetest.RunLeaseLinear(tb, l, n) },
		once: onceOf(dedupe.NewLeaseStore(l.driver, nil), func(_ context.Context, _ *dedupe.Lease, name string) error {
			e.add(name)
			return nil
		}),
		count: func(_ testing.TB, name string) int { return e.count(name) },
		admin: l.admin,
	}
}

// effects are those outside any store.
type effects struct {
	mu sync.Mutex
	n  map[string]int
}

func (e *effects) add(name string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.n[name]++
}

func (e *effects) count(name string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.n[name]
}

func openMemory(testing.TB) store {
	d, e := memdedupe.NewDriver(nil), &effects{n: make(map[string]int)}
	return erase(harness[*memdedupe.Tx]{dedupe.NewTxStore(d, nil), func(_ context.Context, tx *memdedupe.Tx, name string) error {
		return tx.OnCommit(func() { e.add(name) })
	}, func(_ testing.TB, name string) int { return e.count(name) }, d.Admin()})
}

func openMemoryLeases(testing.TB) store {
	d := memdedupe.NewLeaseDriver()
	return eraseLeases(leases{d, d.Admin()})
}

func pgxPool(tb testing.TB) *pgxpool.Pool {
	pool := testenv.Pool(tb, 8)
	if err := pgdedupe.Migrate(tb.Context(), pool, nil); err != nil {
		tb.Fatal(err)
	}
	if _, err := pool.Exec(tb.Context(), "create table effect (name text not null)"); err != nil {
		tb.Fatal(err)
	}
	return pool
}

func pgxCount(pool *pgxpool.Pool) func(tb testing.TB, name string) int {
	return func(tb testing.TB, name string) (n int) {
		if err := pool.QueryRow(tb.Context(), "select count(*) from effect where name = $1", name).Scan(&n); err != nil {
			tb.Fatal(err)
		}
		return n
	}
}

func pgxPrune(pool *pgxpool.Pool) func(tb testing.TB) {
	return func(tb testing.TB) {
		if _, err := pgdedupe.Prune(tb.Context(), pool, nil, 0); err != nil {
			tb.Fatal(err)
		}
	}
}

const insert = "insert into effect (name) values ($1)"

func openPgx(tb testing.TB) store {
	pool := pgxPool(tb)
	s := erase(harness[pgx.Tx]{pgdedupe.NewStore(pool, nil), func(ctx context.Context, tx pgx.Tx, name string) error {
		_, err := tx.Exec(ctx, insert, name)
		return err
	}, pgxCount(pool), pgdedupe.NewAdmin(pool, nil)})
	s.prune = pgxPrune(pool)
	return s
}

func openPipelined(tb testing.TB) store {
	pool := pgxPool(tb)
	s := erase(eager[*pgx.Batch]{harness[*pgx.Batch]{pgdedupe.NewPipelinedStore(pool, nil), func(_ context.Context, b *pgx.Batch, name string) error {
		b.Queue(insert, name)
		return nil
	}, pgxCount(pool), pgdedupe.NewAdmin(pool, nil)}})
	s.prune = pgxPrune(pool)
	return s
}

func openPgxLeases(tb testing.TB) store {
	pool := pgxPool(tb)
	s := eraseLeases(leases{pgdedupe.NewLeaseDriver(pool, nil), pgdedupe.NewAdmin(pool, nil)})
	s.prune = pgxPrune(pool)
	return s
}

func openRedis(tb testing.TB) store {
	rdb := redis.NewClient(&redis.Options{Addr: testenv.Redis(tb), ContextTimeoutEnabled: true})
	tb.Cleanup(func() { _ = rdb.Close() })
	d, err := redisdedupe.NewDriver(rdb, &redisdedupe.Options{Prefix: testenv.Name("lin") + ":"})
	if err != nil {
		tb.Fatal(err)
	}
	return eraseLeases(leases{d, d.Admin()})
}

func openSQLPostgres(tb testing.TB) store {
	return openSQL(tb, sqldedupe.Postgres, "pgx", testenv.SchemaURL(tb))
}

func openMariaDB(tb testing.TB) store {
	return openSQL(tb, sqldedupe.MySQL, "mysql", testenv.MariaDB(tb))
}

func openSQLite(tb testing.TB) store {
	return openSQL(tb, sqldedupe.SQLite, "sqlite", "file:"+filepath.Join(tb.TempDir(), "test.db")+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)")
}

func openSQL(tb testing.TB, d sqldedupe.Dialect, driver, dsn string) store {
	db, err := sql.Open(driver, dsn)
	if err != nil {
		tb.Fatal(err)
	}
	db.SetMaxOpenConns(8)
	tb.Cleanup(func() { _ = db.Close() })
	if err := sqldedupe.Migrate(tb.Context(), db, d, nil); err != nil {
		tb.Fatal(err)
	}
	if _, err := db.ExecContext(tb.Context(), "create table effect (name varchar(200) not null)"); err != nil {
		tb.Fatal(err)
	}
	arg := "$1"
	if d == sqldedupe.MySQL {
		arg = "?"
	}
	s := erase(harness[*sql.Tx]{sqldedupe.NewStore(db, d, nil), func(ctx context.Context, tx *sql.Tx, name string) error {
		_, err := tx.ExecContext(ctx, "insert into effect (name) values ("+arg+")", name)
		return err
	}, func(tb testing.TB, name string) (n int) {
		if err := db.QueryRowContext(tb.Context(), "select count(*) from effect where name = "+arg, name).Scan(&n); err != nil {
			tb.Fatal(err)
		}
		return n
	}, sqldedupe.NewAdmin(db, d, nil)})
	s.prune = func(tb testing.TB) {
		if _, err := sqldedupe.Prune(tb.Context(), db, d, nil, 0); err != nil {
			tb.Fatal(err)
		}
	}
	return s
}
