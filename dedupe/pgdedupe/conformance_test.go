package pgdedupe_test

import (
	"cmp"
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/dedupe/storetest"
	"github.com/unecho/unecho/internal/dbcut"
	"github.com/unecho/unecho/internal/testenv"
)

func TestConformance(t *testing.T) {
	for _, level := range []pgx.TxIsoLevel{"", pgx.RepeatableRead, pgx.Serializable} {
		t.Run("isolation="+cmp.Or(string(level), "default"), func(t *testing.T) {
			storetest.Run(t, open(pgdedupe.Options{Isolation: level}, pgx.QueryExecModeCacheStatement))
		})
	}
}

// TestConformanceModes: a pooler in transaction mode needs one of the first
// two.
func TestConformanceModes(t *testing.T) {
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeDescribeExec,
	} {
		t.Run(mode.String(), func(t *testing.T) { storetest.Run(t, open(pgdedupe.Options{Anonymous: true}, mode)) })
	}
}

// base is what the stores have in common.
type base struct {
	*dbcut.Proxy
	pool   *pgxpool.Pool // of the store, through the proxy
	direct *pgxpool.Pool
	o      pgdedupe.Options
}

// harness implements storetest.Harness and all of its powers but Eager.
type harness struct {
	base
	store dedupe.Store[pgx.Tx]
}

func open(o pgdedupe.Options, mode pgx.QueryExecMode) storetest.Open[pgx.Tx] {
	return func(tb testing.TB, s storetest.Settings) storetest.Harness[pgx.Tx] {
		tb.Helper()
		h := &harness{base: openBase(tb, &o, mode, s)}
		h.store = pgdedupe.NewStore(h.pool, &o)
		return h
	}
}

// openBase migrates a schema of its own, and sets in o what a case asks for.
func openBase(tb testing.TB, o *pgdedupe.Options, mode pgx.QueryExecMode, s storetest.Settings) base {
	tb.Helper()
	url := testenv.SchemaURL(tb)
	return openBaseAt(tb, url, url, o, mode, s)
}

// openBaseAt works at url, and looks at the same database by direct.
func openBaseAt(tb testing.TB, url, direct string, o *pgdedupe.Options, mode pgx.QueryExecMode, s storetest.Settings) base {
	tb.Helper()
	o.LockWait = s.Wait
	conns := s.Conns
	if conns == 0 {
		conns = 8
	}
	h := base{direct: testenv.PoolOf(tb, direct, 2), o: *o}
	var through string
	h.Proxy, through = dbcut.Start(tb, url)
	cfg, err := pgxpool.ParseConfig(through)
	if err != nil {
		tb.Fatal(err)
	}
	cfg.MaxConns = int32(conns)
	cfg.ConnConfig.DefaultQueryExecMode = mode
	if h.pool, err = pgxpool.NewWithConfig(context.Background(), cfg); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(h.pool.Close)
	if err := pgdedupe.Migrate(tb.Context(), h.direct, o); err != nil {
		tb.Fatal(err)
	}
	if _, err := h.direct.Exec(tb.Context(), "create table effect (name text not null)"); err != nil {
		tb.Fatal(err)
	}
	return h
}

func (h *harness) Store() dedupe.Store[pgx.Tx] { return h.store }

func (h *harness) Add(ctx context.Context, tx pgx.Tx, name string) error {
	_, err := tx.Exec(ctx, "insert into effect (name) values ($1)", name)
	return err
}

func (h *base) Count(tb testing.TB, name string) int {
	tb.Helper()
	return h.count(tb, "select count(*) from effect where name = $1", name)
}

func (h *base) Conflicts(tb testing.TB) int {
	tb.Helper()
	return h.count(tb, "select count(*) from unecho_conflict")
}

func (h *base) count(tb testing.TB, sql string, args ...any) (n int) {
	tb.Helper()
	if err := h.direct.QueryRow(tb.Context(), sql, args...).Scan(&n); err != nil {
		tb.Fatal(err)
	}
	return n
}

func (h *base) Admin() dedupe.Admin { return pgdedupe.NewAdmin(h.direct, &h.o) }

func (h *base) Prune(tb testing.TB) int {
	tb.Helper()
	n, err := pgdedupe.Prune(tb.Context(), h.direct, &h.o, 0)
	if err != nil {
		tb.Fatal(err)
	}
	return n
}

func (h *base) InUse() int { return int(h.pool.Stat().AcquiredConns()) }

func (h *base) Lost() error { return &pgconn.PgError{Severity: "ERROR", Code: "40001"} }

func (h *harness) Abort(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, "select 1/0")
	return err
}

func (h *harness) Ends() []storetest.End[pgx.Tx] {
	exec := func(sql string) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, sql)
			return err
		}
	}
	byConn := func(sql string) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Conn().Exec(ctx, sql)
			return err
		}
	}
	return []storetest.End[pgx.Tx]{
		{Name: "Commit", Do: func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) }},
		{Name: "Rollback", Do: func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) }},
		{Name: "text commit", Do: exec("commit")},
		{Name: "text rollback", Do: exec("rollback")},
		{Name: "text behind comments", Do: exec(" -- x\n /* /* */ */ COMMIT work;")},
		{Name: "text behind another", Do: exec("select ';'; abort")},
		{Name: "text rollback and begin", Do: exec("rollback; begin")},
		{Name: "text and chain", Do: exec("commit and chain")},
		{Name: "text in a query", Do: func(ctx context.Context, tx pgx.Tx) error {
			rows, err := tx.Query(ctx, "end")
			rows.Close()
			return err
		}},
		{Name: "text in a row", Do: func(ctx context.Context, tx pgx.Tx) error {
			return tx.QueryRow(ctx, "commit").Scan(new(int))
		}},
		{Name: "text in a batch", Do: func(ctx context.Context, tx pgx.Tx) error {
			b := &pgx.Batch{}
			b.Queue("select 1")
			b.Queue("commit")
			return tx.SendBatch(ctx, b).Close()
		}},
		{Name: "text in a savepoint", Do: func(ctx context.Context, tx pgx.Tx) error {
			return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return exec("rollback")(ctx, tx) })
		}},
		{Name: "prepared", Do: func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Prepare(ctx, "p", "commit")
			return err
		}},
		{Name: "two phases", Do: exec("prepare transaction 'x'")},
		{Name: "connection commit", Do: byConn("commit")},
		{Name: "connection rollback", Do: byConn("rollback")},
		{Name: "connection commit and begin", Do: byConn("commit; begin")},
		{Name: "connection rollback and begin", Do: byConn("rollback; begin; select pg_current_xact_id()")},
		{Name: "connection rollback and chain", Do: byConn("rollback and chain")},
		{Name: "connection dies in a failed transaction", Do: byConn("rollback; begin; select 1/0")},
	}
}
