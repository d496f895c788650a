package migrate

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// DB is a database as a front end presents it. Statements come without
// arguments, and Exec takes several at once.
type DB interface {
	// Dialect says what the database speaks.
	Dialect() Dialect
	// Int runs a query that returns one integer, outside a transaction.
	Int(ctx context.Context, sql string) (int, error)
	// InTx runs fn in a transaction that commits if fn returns nil, and rolls
	// back otherwise. On SQLite the transaction holds the write lock from the
	// start; on PostgreSQL it is READ COMMITTED. On MySQL, where DDL commits by
	// itself, it is a lock that others wait for and nothing else.
	InTx(ctx context.Context, fn func(ctx context.Context, tx Tx) error) error
}

// Tx is one transaction.
type Tx interface {
	Exec(ctx context.Context, sql string) error
	Int(ctx context.Context, sql string) (int, error)
}

// Dialect is a kind of database.
type Dialect int

const (
	DialectPostgres Dialect = iota + 1
	DialectSQLite
	DialectMySQL
)

// Timeout bounds Up, Version and Validate when their context has no deadline:
// another process may be holding the lock and have hung.
const Timeout = time.Minute

func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, Timeout)
}

var (
	// ErrOld: the database has not been migrated to the version that the
	// program needs.
	ErrOld = errors.New("the database is older than the program")
	// ErrNew: the database was migrated by a newer program.
	ErrNew = errors.New("the database is newer than the program")
)

// versions is the name of the table of versions. All lines of a schema share it.
const versions = "unecho_migration"

// Up runs what is missing. It is safe to call from any number of processes at
// once, and does nothing, at the price of one query, when nothing is missing.
// An error that matches ErrNew means that a newer program was here.
func (s *Set) Up(ctx context.Context, db DB) error {
	if v, err := s.Version(ctx, db); err == nil && v == s.Latest() {
		return nil // and Up works for a role that may not create tables
	}
	ctx, cancel := bounded(ctx)
	defer cancel()
	err := db.InTx(ctx, func(ctx context.Context, tx Tx) error {
		return s.up(ctx, tx, db.Dialect())
	})
	if err != nil {
		return fmt.Errorf("migrate: %s: %w", s.line, err)
	}
	return nil
}

func (s *Set) up(ctx context.Context, tx Tx, d Dialect) error {
	if err := s.prepare(ctx, tx, d); err != nil {
		return err
	}
	v, err := tx.Int(ctx, s.versionSQL())
	if err != nil {
		return fmt.Errorf("read the version: %w", err)
	}
	if v > s.Latest() {
		return s.newer(v)
	}
	for i := v; i < len(s.files); i++ {
		if err := tx.Exec(ctx, s.files[i].sql+s.recordSQL(i+1)); err != nil {
			return fmt.Errorf("%s: %w", s.files[i].name, err)
		}
	}
	return nil
}

// prepare takes the lock and makes the table of versions.
func (s *Set) prepare(ctx context.Context, tx Tx, d Dialect) error {
	if d == DialectPostgres {
		if err := tx.Exec(ctx, s.lockSQL()); err != nil {
			return fmt.Errorf("wait for another migration to end: %w", err)
		}
		if err := s.createSchema(ctx, tx); err != nil {
			return err
		}
	}
	if err := tx.Exec(ctx, s.versionsSQL(d)); err != nil {
		return fmt.Errorf("create the table of versions: %w", err)
	}
	return nil
}

// createSchema makes the schema if it is missing. CREATE SCHEMA IF NOT EXISTS
// asks for the privilege even when the schema is there.
func (s *Set) createSchema(ctx context.Context, tx Tx) error {
	if s.schema == "" {
		return nil
	}
	n, err := tx.Int(ctx, "select count(*) from pg_namespace where nspname = '"+s.schema+"'")
	if err == nil && n == 0 {
		err = tx.Exec(ctx, "create schema "+quote(s.schema))
	}
	if err != nil {
		return fmt.Errorf("create the schema %s: %w", quote(s.schema), err)
	}
	return nil
}

// Version returns the version of the database, 0 if nothing was migrated yet.
func (s *Set) Version(ctx context.Context, db DB) (int, error) {
	ctx, cancel := bounded(ctx)
	defer cancel()
	n, err := db.Int(ctx, s.existsSQL(db.Dialect()))
	if err == nil && n > 0 {
		n, err = db.Int(ctx, s.versionSQL())
	}
	if err != nil {
		return 0, fmt.Errorf("migrate: %s: read the version: %w", s.line, err)
	}
	return n, nil
}

// Validate returns nil if the database is at the version that the program
// needs, and an error that matches ErrOld or ErrNew if it is not.
func (s *Set) Validate(ctx context.Context, db DB) error {
	v, err := s.Version(ctx, db)
	switch {
	case err != nil:
		return err
	case v < s.Latest():
		return fmt.Errorf("migrate: %s: %w: its version is %d, this program needs %d; migrate it first", s.line, ErrOld, v, s.Latest())
	case v > s.Latest():
		return fmt.Errorf("migrate: %s: %w", s.line, s.newer(v))
	}
	return nil
}

func (s *Set) newer(v int) error {
	return fmt.Errorf("%w: its version is %d, this program knows %d; deploy the newer program", ErrNew, v, s.Latest())
}

// SQL returns all that Up would run on an empty database, for those who
// migrate with a tool of their own. [Set.Validate] accepts the result.
func (s *Set) SQL(d Dialect) string {
	var b strings.Builder
	fmt.Fprintf(&b, "-- %s, version %d\n", s.line, s.Latest())
	if d == DialectPostgres && s.schema != "" {
		b.WriteString("create schema if not exists " + quote(s.schema) + ";\n")
	}
	b.WriteString(s.versionsSQL(d))
	for i, f := range s.files {
		b.WriteString("\n-- " + f.name + "\n" + f.sql + s.recordSQL(i+1))
	}
	return b.String()
}

func (s *Set) versionsSQL(d Dialect) string {
	text, instant := "text", "timestamp with time zone"
	if d == DialectMySQL { // which has no key on a text, and whose timestamps are instants
		text, instant = "varchar(100)", "timestamp"
	}
	return "create table if not exists " + s.Table(versions) + ` (
	line ` + text + ` not null,
	version integer not null,
	applied_at ` + instant + ` not null default current_timestamp,
	primary key (line, version)
);
`
}

func (s *Set) recordSQL(v int) string {
	return fmt.Sprintf("insert into %s (line, version) values ('%s', %d);\n", s.Table(versions), s.line, v)
}

func (s *Set) versionSQL() string {
	return "select coalesce(max(version), 0) from " + s.Table(versions) + " where line = '" + s.line + "'"
}

// existsSQL counts the tables of versions that are in sight.
func (s *Set) existsSQL(d Dialect) string {
	if d == DialectPostgres {
		return "select count(to_regclass('" + s.Table(versions) + "'))"
	}
	if d == DialectMySQL {
		return "select count(*) from information_schema.tables where table_schema = " + s.SchemaSQL() + " and table_name = '" + versions + "'"
	}
	return "select count(*) from " + s.Table("sqlite_master") + " where type = 'table' and name = '" + versions + "'"
}

// lockSQL takes a lock for each schema: two schemas of one database do not
// wait for each other.
func (s *Set) lockSQL() string {
	name := "coalesce(current_schema(), '')"
	if s.schema != "" {
		name = "'" + s.schema + "'"
	}
	return "select pg_advisory_xact_lock(hashtextextended('" + versions + ":' || " + name + ", 0))"
}
