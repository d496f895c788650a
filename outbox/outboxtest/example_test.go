package outboxtest_test

import (
	"context"
	"database/sql"
	"testing"

	_ "modernc.org/sqlite"

	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/outboxtest"
	"github.com/unecho/unecho/outbox/sqloutbox"
)

// fixture is all that a store needs to be tested.
type fixture struct{ db *sql.DB }

func (f fixture) Store(testing.TB) outbox.Store { return sqloutbox.NewStore(f.db) }

func (f fixture) Begin(t testing.TB) outboxtest.Tx {
	tx, err := f.db.BeginTx(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback() })
	return business{tx}
}

type business struct{ *sql.Tx }

func (b business) Write(msgs ...*envelope.Message) error {
	return sqloutbox.NewWriter(nil).Write(context.Background(), b.Tx, msgs...)
}

// The test of a store is a call.
func ExampleRun() {
	_ = func(t *testing.T) {
		outboxtest.Run(t, func(t testing.TB) outboxtest.Fixture {
			db, err := sql.Open("sqlite", "file:"+t.TempDir()+"/o.db?_pragma=journal_mode(wal)&_pragma=busy_timeout(5000)&_txlock=immediate")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = db.Close() })
			if err := sqloutbox.Migrate(t.Context(), db); err != nil {
				t.Fatal(err)
			}
			return fixture{db}
		})
	}
}
