package sqloutbox

import (
	"context"
	"database/sql"
	"path/filepath"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

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
	outboxtest.Run(t, func(t testing.TB) outboxtest.Fixture {
		db := open(t, "sqlite", "file:"+filepath.Join(t.TempDir(), "o.db")+"?_pragma=journal_mode(wal)&_pragma=busy_timeout(5000)&_txlock=immediate")
		if err := Migrate(t.Context(), db); err != nil {
			t.Fatal(err)
		}
		return &fixture{db: db, writer: NewWriter(nil), store: func() outbox.Store { return NewStore(db) }}
	})
}

// The writing side for *sql.Tx, with the tables and the relay of pgoutbox.
func TestConformancePostgresWriter(t *testing.T) {
	outboxtest.Run(t, func(t testing.TB) outboxtest.Fixture {
		url := testenv.SchemaURL(t)
		pool := testenv.PoolOf(t, url, 4)
		if err := pgoutbox.Migrate(t.Context(), pool, nil); err != nil {
			t.Fatal(err)
		}
		return &fixture{db: open(t, "pgx", url), writer: NewPostgresWriter("", nil),
			store: func() outbox.Store { return pgoutbox.NewStore(pool, nil) }}
	})
}
