package pgdedupe

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// tx is the scope of a handler, or a savepoint in it.
type tx struct {
	s      *session
	inner  pgx.Tx // for statements; of the outermost one, Commit and Rollback are never called
	top    pgx.Tx // the outermost inner
	nested bool
}

var _ pgx.Tx = (*tx)(nil)

// orNil makes a nil *tx a nil interface.
func (t *tx) orNil() pgx.Tx {
	if t == nil {
		return nil
	}
	return t
}

// Begin opens a savepoint, whose Commit and Rollback are the handler's.
func (t *tx) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := t.s.enter(); err != nil {
		return nil, err
	}
	inner, err := t.inner.Begin(ctx)
	t.s.leave(err)
	if err != nil {
		return nil, err
	}
	return &tx{s: t.s, inner: inner, top: t.top, nested: true}, nil
}

// Commit is refused, but for a savepoint.
func (t *tx) Commit(ctx context.Context) error { return t.finish(ctx, "Commit", t.inner.Commit) }

// Rollback is refused, but for a savepoint.
func (t *tx) Rollback(ctx context.Context) error { return t.finish(ctx, "Rollback", t.inner.Rollback) }

func (t *tx) finish(ctx context.Context, name string, savepoint func(context.Context) error) error {
	if err := t.s.enter(); err != nil {
		return err
	}
	if !t.nested {
		t.s.leave(nil)
		return t.s.refuse(name)
	}
	err := savepoint(ctx)
	t.s.leave(err)
	return err
}

// begin starts a statement, unless its text would end the transaction.
func (t *tx) begin(sql string) error {
	if err := t.s.enter(); err != nil {
		return err
	}
	if err := t.check(sql); err != nil {
		t.s.leave(nil)
		return err
	}
	return nil
}

func (t *tx) check(sql string) error {
	if word := endsTransaction(sql); word != "" {
		return t.s.refuse("the statement " + word)
	}
	return nil
}

func (t *tx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := t.begin(sql); err != nil {
		return pgconn.CommandTag{}, err
	}
	tag, err := t.inner.Exec(ctx, sql, args...)
	t.s.leave(err)
	return tag, err
}

func (t *tx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := t.begin(sql); err != nil {
		return failedRows(err), err
	}
	inner, err := t.inner.Query(ctx, sql, args...)
	t.s.leave(err)
	return &rows{Rows: inner, s: t.s}, err
}

func (t *tx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	r, _ := t.Query(ctx, sql, args...) // the error is the row's as well
	return row{r}
}

func (t *tx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	if err := t.s.enter(); err != nil {
		return 0, err
	}
	n, err := t.inner.CopyFrom(ctx, table, columns, src)
	t.s.leave(err)
	return n, err
}

func (t *tx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if err := t.s.enter(); err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	for _, q := range b.QueuedQueries {
		if err := t.check(q.SQL); err != nil {
			t.s.leave(nil)
			return pgx.FailedBatchResults(b, err)
		}
	}
	inner := t.inner.SendBatch(ctx, b)
	t.s.leave(nil)
	return &batchResults{BatchResults: inner, s: t.s}
}

func (t *tx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := t.begin(sql); err != nil {
		return nil, err
	}
	sd, err := t.inner.Prepare(ctx, name, sql)
	t.s.leave(err)
	return sd, err
}

// LargeObjects returns the large objects of the transaction.
func (t *tx) LargeObjects() pgx.LargeObjects {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	t.s.large = t.top
	return t.inner.LargeObjects()
}

// Conn returns the connection. What is done by it is not seen here, but for
// one thing: a transaction that was ended by it is found out at the commit.
func (t *tx) Conn() *pgx.Conn { return t.inner.Conn() }
