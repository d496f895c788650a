package sqldedupe

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"

	"github.com/unecho/unecho/dedupe/internal/pgkeys"
	"github.com/unecho/unecho/dedupe/internal/prune"
	"github.com/unecho/unecho/internal/migrate"
)

//go:embed sqlite/*.sql
var files embed.FS

func sqliteSet(schema string) *migrate.Set {
	sub, err := fs.Sub(files, "sqlite")
	if err != nil {
		panic(err) // the folder is embedded
	}
	return migrate.MustNew("dedupe/sqlite", sub, schema)
}

func (o *Options) set(d Dialect) *migrate.Set {
	schema := ""
	if o != nil {
		schema = o.Schema
	}
	if d == SQLite {
		return sqliteSet(schema)
	}
	return pgkeys.Set(schema)
}

func frontEnd(db *sql.DB, d Dialect) migrate.DB {
	if d == SQLite {
		return migrate.SQLite(db)
	}
	return migrate.Postgres(db)
}

// Migrate brings the tables to the version that this program needs. Any number
// of processes may call it at once, on every start: when there is nothing to
// do, it sends one query. It refuses a database that a newer program has
// migrated. o may be nil.
func Migrate(ctx context.Context, db *sql.DB, d Dialect, o *Options) error {
	if err := o.Check(d); err != nil {
		return err
	}
	if err := o.set(d).Up(ctx, frontEnd(db, d)); err != nil {
		return fmt.Errorf("sqldedupe: %w", err)
	}
	return nil
}

// Validate returns nil if the tables are at the version that this program
// needs and, on SQLite, if what it commits outlives a crash: see the package's
// comment. The error says what to do. It changes nothing. o may be nil.
func Validate(ctx context.Context, db *sql.DB, d Dialect, o *Options) error {
	if err := o.Check(d); err != nil {
		return err
	}
	if err := o.set(d).Validate(ctx, frontEnd(db, d)); err != nil {
		return fmt.Errorf("sqldedupe: %w", err)
	}
	if d == SQLite {
		return validateSQLite(ctx, db)
	}
	return nil
}

// SQL returns what Migrate runs on an empty database, for those who migrate
// with a tool of their own; [Validate] accepts the result. o may be nil. It
// panics with [Options.Check]'s error.
func SQL(d Dialect, o *Options) string {
	if err := o.Check(d); err != nil {
		panic(err)
	}
	if d == SQLite {
		return o.set(d).SQL(migrate.DialectSQLite)
	}
	return o.set(d).SQL(migrate.DialectPostgres)
}

// Prune deletes keys and conflicts whose retention is over, by the database's
// clock: up to limit rows, or all of them if limit is 0 or less, in
// transactions of at most 1,000 rows. It returns how many, also beside an
// error. Any number of processes may call it at once. o may be nil.
func Prune(ctx context.Context, db *sql.DB, d Dialect, o *Options, limit int) (int, error) {
	if err := o.Check(d); err != nil {
		return 0, err
	}
	del := func(statement string) func(n int) (int, error) {
		return func(n int) (int, error) { return deleteBatch(ctx, db, statement, n) }
	}
	var keys, conflicts string
	if d == SQLite {
		s := newSQLiteStatements(o.set(d))
		keys, conflicts = s.pruneKeys, s.pruneConflicts
	} else {
		s := pgkeys.New(o.set(d))
		keys, conflicts = s.PruneKeys, s.PruneConflicts
	}
	n, err := prune.Run(limit, del(keys), del(conflicts))
	if err != nil {
		return n, fmt.Errorf("sqldedupe: prune: %w", err)
	}
	return n, nil
}

func deleteBatch(ctx context.Context, db *sql.DB, statement string, limit int) (int, error) {
	res, err := db.ExecContext(ctx, statement, limit)
	if err != nil {
		return 0, err
	}
	n, err := res.RowsAffected()
	return int(n), err
}
