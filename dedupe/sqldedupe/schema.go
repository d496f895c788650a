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

// Version returns the version of the tables, and the one that this program
// needs. The first is 0 if nothing was migrated yet. o may be nil.
func Version(ctx context.Context, db *sql.DB, d Dialect, o *Options) (has, needs int, err error) {
	if err := o.Check(d); err != nil {
		return 0, 0, err
	}
	set := o.set(d)
	has, err = set.Version(ctx, frontEnd(db, d))
	if err != nil {
		return 0, set.Latest(), fmt.Errorf("sqldedupe: %w", err)
	}
	return has, set.Latest(), nil
}

// Prune deletes keys whose retention is over, by the database's clock: up to
// limit rows, or all of them if limit is 0 or less, in transactions of at most
// 1,000 rows, and of fewer where that takes longer than 50 ms. It returns how
// many, also beside an error. Keys with a conflict that nobody has settled stay.
// Any number of processes may call it at once. o may be nil.
//
// Until it is pruned an expired key still counts: after a downtime, what the
// broker redelivers first must meet it. Let [dedupe.RunPruner] call Prune.
func Prune(ctx context.Context, db *sql.DB, d Dialect, o *Options, limit int) (int, error) {
	if err := o.Check(d); err != nil {
		return 0, err
	}
	statement := pgkeys.New(o.set(d)).Prune
	if d == SQLite {
		statement = newSQLiteStatements(o.set(d)).prune
	}
	n, err := prune.Run(limit, func(n int) (int, error) {
		ctx, cancel := context.WithTimeout(ctx, o.timeout())
		defer cancel()
		return deleteBatch(ctx, db, statement, n)
	})
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
