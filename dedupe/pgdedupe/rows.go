package pgdedupe

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// rows are those of a scope: they end with it, and tell it of their error.
type rows struct {
	pgx.Rows
	s    *session
	over error // the scope's end, if it came before that of the rows
}

var _ pgx.Rows = (*rows)(nil)

func (r *rows) enter() bool {
	err := r.s.enter()
	if err != nil && r.over == nil {
		r.over = err
	}
	return err == nil
}

func (r *rows) Next() bool {
	if !r.enter() {
		return false
	}
	more := r.Rows.Next()
	if more {
		r.s.leave(nil)
	} else {
		r.s.leave(r.Rows.Err())
	}
	return more
}

func (r *rows) Close() {
	if !r.enter() {
		return
	}
	r.Rows.Close()
	r.s.leave(r.Rows.Err())
}

func (r *rows) Scan(dest ...any) error {
	if !r.enter() {
		return r.over
	}
	err := r.Rows.Scan(dest...)
	r.s.leave(nil) // a value that does not fit is no error of the transaction
	return err
}

func (r *rows) Values() ([]any, error) {
	if !r.enter() {
		return nil, r.over
	}
	values, err := r.Rows.Values()
	r.s.leave(nil)
	return values, err
}

func (r *rows) Err() error {
	if r.over != nil {
		return r.over
	}
	return r.Rows.Err()
}

// row is the first of some rows.
type row struct{ rows pgx.Rows }

func (r row) Scan(dest ...any) error {
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(dest...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}

// failedRows are the rows of a query that was refused. pgx makes them, so that
// they are complete whatever methods the interface gets.
func failedRows(err error) pgx.Rows {
	r, _ := pgx.FailedBatchResults(&pgx.Batch{}, err).Query()
	return r
}

// batchResults are those of a scope.
type batchResults struct {
	pgx.BatchResults
	s *session
}

var _ pgx.BatchResults = (*batchResults)(nil)

func (r *batchResults) Exec() (pgconn.CommandTag, error) {
	if err := r.s.enter(); err != nil {
		return pgconn.CommandTag{}, err
	}
	tag, err := r.BatchResults.Exec()
	r.s.leave(err)
	return tag, err
}

func (r *batchResults) Query() (pgx.Rows, error) {
	if err := r.s.enter(); err != nil {
		return failedRows(err), err
	}
	inner, err := r.BatchResults.Query()
	r.s.leave(err)
	return &rows{Rows: inner, s: r.s}, err
}

func (r *batchResults) QueryRow() pgx.Row {
	first, _ := r.Query() // the error is the row's as well
	return row{first}
}

func (r *batchResults) Close() error {
	if err := r.s.enter(); err != nil {
		return err
	}
	err := r.BatchResults.Close()
	r.s.leave(err)
	return err
}
