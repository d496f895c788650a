package pgdedupe

import (
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/pgkeys"
	"github.com/unecho/unecho/internal/migrate"
)

// Options are the settings of this package. The zero value, and nil, is the
// default. Everything that works on one set of tables needs the same Schema.
type Options struct {
	// Schema is where the tables are, unquoted. Defaults to none: the names
	// are unqualified, and the search path of the connections decides.
	Schema string
	// Isolation is the level of the transactions. Defaults to READ COMMITTED,
	// whatever the database's default is. Above it, a copy that comes while
	// the owner commits is a serialization failure, which is run again.
	Isolation pgx.TxIsoLevel
	// LockWait is how long a claim waits for another holder of the key before
	// it is ErrInProgress. It waits on a connection of the pool. It bounds the
	// claim alone, not the handler's statements.
	// Defaults to 2 s; -1 is as short as the server allows, 1 ms.
	LockWait time.Duration
	// Timeout bounds the wait for a free connection of the pool, and each
	// answer of the database that the store itself waits for, beside
	// LockWait. Defaults to 10 s.
	Timeout time.Duration
	// Anonymous leaves the readable parts of the key, and the names of fields,
	// out of the tables: tenant, consumer, source and id may be personal data,
	// and nothing but people reads them. Defaults to keeping them.
	Anonymous bool
	// Tx are the settings of the transactions.
	Tx dedupe.TxOptions
}

const (
	defaultLockWait = 2 * time.Second
	defaultTimeout  = 10 * time.Second
)

// Check returns nil, or what is wrong with o; nil is right. NewStore panics
// with it: check options that come from a file.
func (o *Options) Check() error {
	if o == nil {
		return nil
	}
	if o.Schema != "" {
		if err := migrate.CheckName(o.Schema); err != nil {
			return fmt.Errorf("pgdedupe: Options.Schema: %w", err)
		}
	}
	switch o.Isolation {
	case "", pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable:
		return nil
	}
	return fmt.Errorf("pgdedupe: Options.Isolation: %q is not a level that works; use read committed, repeatable read or serializable", o.Isolation)
}

// NewStore returns the store in the database of pool, which stays the
// caller's. o may be nil. Nothing is sent yet: see [Migrate] and [Validate].
// It panics if pool is nil, or with [Options.Check]'s error.
func NewStore(pool *pgxpool.Pool, o *Options) dedupe.Store[pgx.Tx] {
	if pool == nil {
		panic("pgdedupe: NewStore: the pool is nil")
	}
	d := newDriver(pool, o)
	return dedupe.NewTxStore(d, &d.o.Tx)
}

func newDriver(pool *pgxpool.Pool, o *Options) *driver {
	d := &driver{pool: pool, o: o.normal()}
	set := pgkeys.Set(d.o.Schema)
	d.sql, d.positions = pgkeys.New(set), pgkeys.NewPosition(set)
	return d
}

// normal fills in the defaults. It panics if o is wrong.
func (o *Options) normal() Options {
	if err := o.Check(); err != nil {
		panic(err)
	}
	var n Options
	if o != nil {
		n = *o
	}
	if n.Isolation == "" {
		n.Isolation = pgx.ReadCommitted
	}
	if n.LockWait == 0 {
		n.LockWait = defaultLockWait
	}
	n.LockWait = max(n.LockWait, 0)
	n.Timeout = n.timeout()
	return n
}

func (o *Options) timeout() time.Duration {
	if o == nil || o.Timeout <= 0 {
		return defaultTimeout
	}
	return o.Timeout
}
