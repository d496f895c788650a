package migrate

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Postgres is the front end for PostgreSQL by database/sql.
func Postgres(db *sql.DB) DB { return postgres{db} }

type postgres struct{ db *sql.DB }

func (p postgres) Dialect() Dialect { return DialectPostgres }

func (p postgres) Int(ctx context.Context, q string) (int, error) { return scanInt(ctx, p.db, q) }

func (p postgres) InTx(ctx context.Context, fn func(context.Context, Tx) error) error {
	tx, err := p.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // does nothing after a commit
	if err := fn(ctx, execer{tx}); err != nil {
		return err
	}
	return tx.Commit()
}

// SQLite is the front end for SQLite by database/sql.
func SQLite(db *sql.DB) DB { return sqlite{db} }

type sqlite struct{ db *sql.DB }

func (s sqlite) Dialect() Dialect { return DialectSQLite }

func (s sqlite) Int(ctx context.Context, q string) (n int, err error) {
	err = retryBusy(ctx, func() error {
		n, err = scanInt(ctx, s.db, q)
		return err
	})
	return n, err
}

// InTx holds one connection, because BEGIN IMMEDIATE is text to database/sql.
func (s sqlite) InTx(ctx context.Context, fn func(context.Context, Tx) error) (err error) {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := retryBusy(ctx, func() error { return execer{conn}.Exec(ctx, "begin immediate") }); err != nil {
		return fmt.Errorf("wait for the write lock: %w", err)
	}
	open := true
	defer func() {
		if open {
			discard(ctx, conn)
		}
	}()
	if err := fn(ctx, execer{conn}); err != nil {
		return err
	}
	if err := retryBusy(ctx, func() error { return execer{conn}.Exec(ctx, "commit") }); err != nil {
		return err
	}
	open = false
	return nil
}

// MySQL is the front end for MySQL and MariaDB by database/sql.
func MySQL(db *sql.DB) DB { return mysql{db} }

type mysql struct{ db *sql.DB }

func (m mysql) Dialect() Dialect { return DialectMySQL }

func (m mysql) Int(ctx context.Context, q string) (int, error) { return scanInt(ctx, m.db, q) }

// InTx holds one connection, whose named lock goes with it: for each database
// one, and the server's other databases do not wait.
func (m mysql) InTx(ctx context.Context, fn func(context.Context, Tx) error) (err error) {
	conn, err := m.db.Conn(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	const lock = "concat('unecho_migration:', sha1(coalesce(database(), '')))"
	wait := Timeout
	if end, ok := ctx.Deadline(); ok {
		wait = time.Until(end)
	}
	got, err := scanInt(ctx, conn, fmt.Sprintf("select coalesce(get_lock(%s, %d), 0)", lock, max(int(wait.Seconds()), 1)))
	switch {
	case err != nil:
		return fmt.Errorf("wait for another migration to end: %w", err)
	case got != 1:
		return fmt.Errorf("another migration did not end within %v", wait)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if _, free := scanInt(ctx, conn, "select coalesce(release_lock("+lock+"), 0)"); free != nil {
			_ = conn.Raw(func(any) error { return driver.ErrBadConn })
		}
	}()
	return fn(ctx, oneByOne{execer{conn}})
}

// oneByOne executes several statements one after the other, which the driver
// does not by default.
type oneByOne struct{ execer }

func (o oneByOne) Exec(ctx context.Context, q string) error {
	for statement := range strings.SplitSeq(q, ";\n") {
		if strings.TrimSpace(statement) == "" {
			continue
		}
		if err := o.execer.Exec(ctx, statement); err != nil {
			return err
		}
	}
	return nil
}

// discard rolls back although ctx may be done, and throws the connection away
// if that fails: the pool must not get it back with an open transaction.
func discard(ctx context.Context, conn *sql.Conn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if (execer{conn}).Exec(ctx, "rollback") != nil {
		_ = conn.Raw(func(any) error { return driver.ErrBadConn })
	}
}

// querier is a *sql.DB, *sql.Conn or *sql.Tx.
type querier interface {
	ExecContext(ctx context.Context, q string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, q string, args ...any) *sql.Row
}

type execer struct{ q querier }

func (e execer) Exec(ctx context.Context, q string) error {
	_, err := e.q.ExecContext(ctx, q)
	return err
}

func (e execer) Int(ctx context.Context, q string) (int, error) { return scanInt(ctx, e.q, q) }

func scanInt(ctx context.Context, q querier, query string) (n int, err error) {
	err = q.QueryRowContext(ctx, query).Scan(&n)
	return n, err
}

// retryBusy runs f until SQLite's locks are free: a database without a
// busy_timeout answers at once.
func retryBusy(ctx context.Context, f func() error) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil || !isBusy(err) {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		}
	}
}

// isBusy reports SQLITE_BUSY or SQLITE_LOCKED, whichever driver is in use:
// the low byte of an extended code is the code.
func isBusy(err error) bool {
	var coded interface{ Code() int }
	if !errors.As(err, &coded) {
		return false
	}
	primary := coded.Code() & 0xff
	return primary == 5 || primary == 6
}
