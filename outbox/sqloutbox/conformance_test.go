package sqloutbox

import (
	"context"
	"database/sql"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/outboxtest"
	"github.com/unecho/unecho/outbox/pgoutbox"
)

type fixture struct {
	db     *sql.DB
	writer *outbox.Writer[*sql.Tx]
	store  func() outbox.Store
}

func (f *fixture) Store(testing.TB) outbox.Store { return f.store() }

func (f *fixture) Begin(t testing.TB) outboxtest.Tx {
	t.Helper()
	tx, err := f.db.BeginTx(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback() })
	return &business{tx, f.writer}
}

type business struct {
	*sql.Tx
	writer *outbox.Writer[*sql.Tx]
}

func (b *business) Write(msgs ...*envelope.Message) error {
	return b.writer.Write(context.Background(), b.Tx, msgs...)
}

func open(t testing.TB, driver, source string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, source)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func TestConformanceSQLite(t *testing.T) {
	outboxtest.Run(t, func(t testing.TB) outboxtest.Fixture { return openSQLite(t) })
}

// overlapping is a fixture whose write transactions can be open side by side.
type overlapping struct{ *fixture }

func (overlapping) TakeID(t testing.TB, tx outboxtest.Tx) {
	t.Helper()
	exec(t, tx.(*business).Tx, "select pg_current_xact_id()")
}

func (overlapping) Lock(t testing.TB, tx outboxtest.Tx) {
	t.Helper()
	exec(t, tx.(*business).Tx, "select 1 from business where id = 1 for update")
}

func exec(t testing.TB, db interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}, query string, args ...any) {
	t.Helper()
	if _, err := db.ExecContext(context.Background(), query, args...); err != nil {
		t.Fatal(err)
	}
}

// The writing side for *sql.Tx, with the tables and the relay of pgoutbox.
func TestConformancePostgresWriter(t *testing.T) {
	outboxtest.Run(t, func(t testing.TB) outboxtest.Fixture {
		url := testenv.SchemaURL(t)
		pool := testenv.PoolOf(t, url, 4)
		if err := pgoutbox.Migrate(t.Context(), pool, nil); err != nil {
			t.Fatal(err)
		}
		db := open(t, "pgx", url)
		exec(t, db, "create table business (id int primary key)")
		exec(t, db, "insert into business values (1)")
		return overlapping{&fixture{db: db, writer: NewPostgresWriter("", nil),
			store: func() outbox.Store { return pgoutbox.NewStore(pool, nil) }}}
	})
}
