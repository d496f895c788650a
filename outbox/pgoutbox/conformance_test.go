package pgoutbox

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/outboxtest"
)

func TestConformance(t *testing.T) {
	outboxtest.Run(t, func(t testing.TB) outboxtest.Fixture { return open(t) })
}

type fixture struct {
	pool   *pgxpool.Pool
	writer *outbox.Writer[pgx.Tx]
	// break_ changes the statements of every store, to plant a bug.
	break_ func(*sqlTexts)
}

func open(t testing.TB) *fixture {
	t.Helper()
	pool := testenv.Pool(t, 8)
	if err := Migrate(t.Context(), pool, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), "create table business (id int primary key); insert into business values (1)"); err != nil {
		t.Fatal(err)
	}
	return &fixture{pool: pool, writer: NewWriter(nil, nil)}
}

func (f *fixture) Store(testing.TB) outbox.Store {
	s := NewStore(f.pool, nil)
	if f.break_ != nil {
		f.break_(&s.sql)
	}
	return s
}

func (f *fixture) Begin(t testing.TB) outboxtest.Tx {
	t.Helper()
	tx, err := f.pool.Begin(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return &business{tx, f.writer}
}

func (f *fixture) TakeID(t testing.TB, tx outboxtest.Tx) {
	t.Helper()
	if _, err := tx.(*business).tx.Exec(context.Background(), "select pg_current_xact_id()"); err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) Lock(t testing.TB, tx outboxtest.Tx) {
	t.Helper()
	if _, err := tx.(*business).tx.Exec(context.Background(), "select 1 from business where id = 1 for update"); err != nil {
		t.Fatal(err)
	}
}

type business struct {
	tx     pgx.Tx
	writer *outbox.Writer[pgx.Tx]
}

func (b *business) Write(msgs ...*envelope.Message) error {
	return b.writer.Write(context.Background(), b.tx, msgs...)
}
func (b *business) Commit() error   { return b.tx.Commit(context.Background()) }
func (b *business) Rollback() error { return b.tx.Rollback(context.Background()) }
