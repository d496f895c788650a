package sqldedupe

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/internal/migrate"
)

// Dialect is the kind of database behind a *sql.DB.
type Dialect int

const (
	// Postgres is PostgreSQL 13 or newer, by a driver whose errors have a
	// SQLState method: github.com/jackc/pgx/v5/stdlib or github.com/lib/pq.
	Postgres Dialect = iota + 1
	// MySQL is MariaDB 10.6 or newer, or MySQL 8.0 or newer, by
	// github.com/go-sql-driver/mysql.
	MySQL
	// SQLite is SQLite 3.42 or newer, by a driver whose errors have a Code
	// method: modernc.org/sqlite.
	SQLite
)

// String returns the name of the database.
func (d Dialect) String() string {
	switch d {
	case Postgres:
		return "PostgreSQL"
	case MySQL:
		return "MySQL"
	case SQLite:
		return "SQLite"
	}
	return fmt.Sprintf("dialect(%d)", int(d))
}

// Options are the settings of this package. The zero value, and nil, is the
// default. Everything that works on one set of tables needs the same Schema.
type Options struct {
	// Schema is where the tables are, unquoted; on MySQL the name of a
	// database, on SQLite that of an attached one. Defaults to none: the names
	// are unqualified.
	Schema string
	// Isolation is the level of the transactions. Defaults to READ COMMITTED
	// on PostgreSQL and MySQL, whatever the database's default is; SQLite is
	// always serializable, and takes no other.
	Isolation sql.IsolationLevel
	// LockWait is how long a claim waits for another holder of the key, or on
	// SQLite for any other writer, before it is ErrInProgress. It does not
	// bound the handler's statements. Defaults to 2 s; -1 is hardly at all. On
	// MySQL, though not on MariaDB, it is rounded up to whole seconds. For a
	// batch it bounds the wait for each key on PostgreSQL and MySQL; on MariaDB
	// and SQLite that for all of them, with a millisecond more for each.
	LockWait time.Duration
	// Timeout bounds the wait for a free connection, and each answer of the
	// database that the store itself waits for, beside LockWait.
	// Defaults to 10 s.
	Timeout time.Duration
	// Anonymous leaves the readable parts of the key, and the names of fields,
	// out of the tables: tenant, consumer, source and id may be personal data,
	// and nothing but people reads them. Defaults to keeping them.
	Anonymous bool
	// Tx are the settings of the transactions.
	Tx dedupe.TxOptions

	bound int32 // for tests: how a claim on MySQL bounds its wait
}

const (
	defaultLockWait = 2 * time.Second
	defaultTimeout  = 10 * time.Second
)

// Check returns nil, or what is wrong with o for a dialect; nil is right.
// NewStore panics with it: check options that come from a file.
func (o *Options) Check(d Dialect) error {
	if d != Postgres && d != MySQL && d != SQLite {
		return fmt.Errorf("sqldedupe: %v is not supported; use sqldedupe.Postgres, sqldedupe.MySQL or sqldedupe.SQLite", d)
	}
	if o == nil {
		return nil
	}
	if o.Schema != "" {
		check := migrate.CheckName
		if d == MySQL {
			check = migrate.CheckMySQLName
		}
		if err := check(o.Schema); err != nil {
			return fmt.Errorf("sqldedupe: Options.Schema: %w", err)
		}
	}
	switch o.Isolation {
	case sql.LevelDefault, sql.LevelSerializable:
		return nil
	case sql.LevelReadCommitted, sql.LevelRepeatableRead:
		if d != SQLite {
			return nil
		}
	}
	return fmt.Errorf("sqldedupe: Options.Isolation: %v does not work with %v", o.Isolation, d)
}

// normal fills in the defaults. It panics if o is wrong.
func (o *Options) normal(d Dialect) Options {
	if err := o.Check(d); err != nil {
		panic(err)
	}
	var n Options
	if o != nil {
		n = *o
	}
	if n.Isolation == sql.LevelDefault && d != SQLite {
		n.Isolation = sql.LevelReadCommitted
	}
	if d == SQLite {
		n.Isolation = sql.LevelDefault // the only one, and not every driver takes it by name
	}
	if n.LockWait == 0 {
		n.LockWait = defaultLockWait
	}
	n.LockWait = max(n.LockWait, time.Millisecond)
	n.Timeout = n.timeout()
	return n
}

func (o *Options) timeout() time.Duration {
	if o == nil || o.Timeout <= 0 {
		return defaultTimeout
	}
	return o.Timeout
}

// NewStore returns the store in db, which stays the caller's. It is a
// [dedupe.Batcher] and a [dedupe.Placer] on every dialect. o may be nil.
// Nothing is sent yet: see [Migrate] and [Validate]. It panics if db is nil, or
// with [Options.Check]'s error.
func NewStore(db *sql.DB, d Dialect, o *Options) dedupe.Store[*sql.Tx] {
	if db == nil {
		panic("sqldedupe: NewStore: the database is nil")
	}
	n := o.normal(d)
	return newStore(newDriver(base{db: db, o: n}, d), &n.Tx)
}

// dialect is what a driver of a dialect can do.
type dialect interface {
	dedupe.TxDriver[*scope]
	dedupe.BatchDriver[*scope]
	claimsIn
	placesIn
}

func newDriver(b base, d Dialect) dialect {
	switch d {
	case MySQL:
		return newMySQL(b)
	case SQLite:
		return newSQLite(b)
	}
	return newPostgres(b)
}

// store hides what a scope is beside its *sql.Tx.
type store struct {
	inner dedupe.Store[*scope]
	batch dedupe.Batcher[*scope]
	place dedupe.Placer[*scope]
}

func newStore(d dialect, o *dedupe.TxOptions) store {
	inner := dedupe.NewTxStore[*scope](placer{d}, o)
	return store{inner, inner.(dedupe.Batcher[*scope]), inner.(dedupe.Placer[*scope])}
}

// Once implements dedupe.Store.
func (s store) Once(ctx context.Context, c dedupe.Claim, fn func(context.Context, *sql.Tx) ([]byte, error)) (dedupe.Result, error) {
	return s.inner.Once(ctx, c, func(ctx context.Context, scope *scope) ([]byte, error) {
		return fn(ctx, scope.tx)
	})
}

// OnceEach implements dedupe.Batcher.
func (s store) OnceEach(ctx context.Context, claims []dedupe.Claim, fn func(context.Context, *sql.Tx, []int) ([][]byte, error)) ([]dedupe.Answer, error) {
	return s.batch.OnceEach(ctx, claims, func(ctx context.Context, scope *scope, fresh []int) ([][]byte, error) {
		return fn(ctx, scope.tx, fresh)
	})
}

// OnceAt implements dedupe.Placer.
func (s store) OnceAt(ctx context.Context, p dedupe.Partition, places []dedupe.Place, claims []dedupe.Claim,
	fn func(context.Context, *sql.Tx, []int) ([][]byte, error)) ([]dedupe.Answer, error) {
	return s.place.OnceAt(ctx, p, places, claims, func(ctx context.Context, scope *scope, fresh []int) ([][]byte, error) {
		return fn(ctx, scope.tx, fresh)
	})
}

var (
	_ dedupe.Batcher[*sql.Tx] = store{}
	_ dedupe.Placer[*sql.Tx]  = store{}
)
