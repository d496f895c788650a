package outboxtest_test

import (
	"context"
	"database/sql"
	"testing"

	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/sqlitetest"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/outboxtest"
	"github.com/unecho/unecho/outbox/sqloutbox"
)

// fixture is one empty outbox. If write transactions can be open side by side,
// it has the methods of outboxtest.Overlapping as well, or nothing is shown of
// transactions that commit late.
type fixture struct {
	db     *sql.DB
	writer *outbox.Writer[*sql.Tx]
}

func (f *fixture) Store(testing.TB) outbox.Store { return sqloutbox.NewStore(f.db) }

func (f *fixture) Begin(t testing.TB) outboxtest.Tx {
	tx, err := f.db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback() })
	return &business{tx, f.writer}
}

// business is a transaction; Commit and Rollback are those of *sql.Tx.
type business struct {
	*sql.Tx
	writer *outbox.Writer[*sql.Tx]
}

func (b *business) Write(msgs ...*envelope.Message) error {
	return b.writer.Write(context.Background(), b.Tx, msgs...)
}

// A store is right when its conformance test passes:
//
//	func TestConformance(t *testing.T) {
//		outboxtest.Run(t, open)
//	}
func ExampleRun() {
	open := func(t testing.TB) outboxtest.Fixture { // called for each case
		db := sqlitetest.Open(t)
		if err := sqloutbox.Migrate(t.Context(), db); err != nil {
			t.Fatal(err)
		}
		return &fixture{db, sqloutbox.NewWriter(nil)}
	}
	var t *testing.T // of the test
	outboxtest.Run(t, open)
}
