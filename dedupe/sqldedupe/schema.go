package sqldedupe

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"

	"github.com/unecho/unecho/dedupe/internal/pgkeys"
	"github.com/unecho/unecho/internal/migrate"
	"github.com/unecho/unecho/internal/prune"
)

//go:embed sqlite/*.sql mysql/*.sql
var files embed.FS

func folder(name string) fs.FS {
	sub, err := fs.Sub(files, name)
	if err != nil {
		panic(err) // the folder is embedded
	}
	return sub
}

func sqliteSet(schema string) *migrate.Set {
	return migrate.MustNew("dedupe/sqlite", folder("sqlite"), schema)
}

func mysqlSet(schema string) *migrate.Set {
	return migrate.MustNewMySQL("dedupe/mysql", folder("mysql"), schema)
}

func (o *Options) set(d Dialect) *migrate.Set {
	schema := ""
	if o != nil {
		schema = o.Schema
	}
	switch d {
	case MySQL:
		return mysqlSet(schema)
	case SQLite:
		return sqliteSet(schema)
	}
	return pgkeys.Set(schema)
}

func frontEnd(db *sql.DB, d Dialect) migrate.DB {
	switch d {
	case MySQL:
		return migrate.MySQL(db)
	case SQLite:
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
// needs and, on MySQL and SQLite, if what it commits outlives a crash: see the
// package's comment. The error says what to do. It changes nothing. o may be nil.
func Validate(ctx context.Context, db *sql.DB, d Dialect, o *Options) error {
	if err := o.Check(d); err != nil {
		return err
	}
	if err := o.set(d).Validate(ctx, frontEnd(db, d)); err != nil {
		return fmt.Errorf("sqldedupe: %w", err)
	}
	switch d {
	case MySQL:
		return validateMySQL(ctx, db, o.set(d))
	case SQLite:
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
	return o.set(d).SQL(map[Dialect]migrate.Dialect{
		Postgres: migrate.DialectPostgres, MySQL: migrate.DialectMySQL, SQLite: migrate.DialectSQLite,
	}[d])
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
	var statement string
	switch d {
	case MySQL:
		statement = newMySQLStatements(o.set(d)).prune
	case SQLite:
		statement = newSQLiteStatements(o.set(d)).prune
	default:
		statement = pgkeys.New(o.set(d)).Prune
	}
	n, err := prune.Run(limit, func(n int) (int, error) {
		ctx, cancel := context.WithTimeout(ctx, o.timeout())
		defer cancel()
		return deleteBatch(ctx, db, d, statement, n)
	})
	if err != nil {
		return n, fmt.Errorf("sqldedupe: prune: %w", err)
	}
	return n, nil
}

// deleteBatch is one transaction. Above READ COMMITTED MySQL would lock the gaps
// between the rows as well, and claims with them.
func deleteBatch(ctx context.Context, db *sql.DB, d Dialect, statement string, limit int) (int, error) {
	o := &sql.TxOptions{Isolation: sql.LevelReadCommitted}
	if d == SQLite {
		o = nil
	}
	tx, err := db.BeginTx(ctx, o)
	if err != nil {
		return 0, err
	}
	defer func() { _ = tx.Rollback() }() // after the commit it does nothing
	res, err := tx.ExecContext(ctx, statement, limit)
	if err != nil {
		return 0, err
	}
	n, err := res.RowsAffected()
	if err != nil {
		return 0, err
	}
	return int(n), tx.Commit()
}
