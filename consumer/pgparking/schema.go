package pgparking

import (
	"context"
	"embed"
	"fmt"
	"io/fs"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/internal/migrate"
	"github.com/unecho/unecho/internal/migrate/pgxmigrate"
	"github.com/unecho/unecho/internal/prune"
)

// Options are the settings of this package. The zero value, and nil, is the
// default. Everything that works on one set of tables needs the same Schema.
type Options struct {
	// Schema is where the tables are, unquoted. Defaults to none: the names
	// are unqualified, and the search path of the connections decides.
	Schema string
	// Timeout bounds the wait for a free connection of the pool, and that for
	// each answer of the database. Defaults to 10 s.
	Timeout time.Duration
	// Keep is how long Prune keeps a record after it was settled, and after the
	// message came again. Defaults to 30 days.
	Keep time.Duration
	// KeepStarts is how long Prune keeps starts that have no end. Defaults to 7
	// days.
	KeepStarts time.Duration
}

const (
	defaultTimeout    = 10 * time.Second
	defaultKeep       = 30 * 24 * time.Hour
	defaultKeepStarts = 7 * 24 * time.Hour
)

// Check returns nil, or what is wrong with o; nil is right. NewLot and
// NewStartCounter panic with it: check options that come from a file.
func (o *Options) Check() error {
	switch {
	case o == nil:
		return nil
	case o.Timeout < 0 || o.Keep < 0 || o.KeepStarts < 0:
		return fmt.Errorf("pgparking: Options: a negative setting: timeout %v, keep %v, keep starts %v", o.Timeout, o.Keep, o.KeepStarts)
	case o.Schema == "":
		return nil
	}
	if err := migrate.CheckName(o.Schema); err != nil {
		return fmt.Errorf("pgparking: Options.Schema: %w", err)
	}
	return nil
}

// normal fills in the defaults. It panics if o is wrong.
func (o *Options) normal() (n Options) {
	if err := o.Check(); err != nil {
		panic(err)
	}
	if o != nil {
		n = *o
	}
	for _, d := range [...]struct {
		of        *time.Duration
		byDefault time.Duration
	}{{&n.Timeout, defaultTimeout}, {&n.Keep, defaultKeep}, {&n.KeepStarts, defaultKeepStarts}} {
		if *d.of == 0 {
			*d.of = d.byDefault
		}
	}
	return n
}

//go:embed migrations/*.sql
var migrations embed.FS

// set returns the migrations. It panics if o is wrong.
func (o *Options) set() *migrate.Set {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		panic(err) // the folder is embedded
	}
	return migrate.MustNew("parking/postgres", files, o.normal().Schema)
}

// Migrate brings the tables to the version that this program needs. Any number
// of processes may call it at once, on every start: when there is nothing to
// do, it sends one query and needs no privilege to create anything. It refuses
// a database that a newer program has migrated. Afterwards a program needs
// SELECT, INSERT, UPDATE and DELETE on unecho_parked and unecho_start. o may be
// nil.
func Migrate(ctx context.Context, pool *pgxpool.Pool, o *Options) error {
	return onSet(o, func(s *migrate.Set) error { return s.Up(ctx, pgxmigrate.DB(pool)) })
}

// Validate returns nil if the tables are at the version that this program
// needs, and otherwise an error that says what to do. It changes nothing. o may be
// nil.
func Validate(ctx context.Context, pool *pgxpool.Pool, o *Options) error {
	return onSet(o, func(s *migrate.Set) error { return s.Validate(ctx, pgxmigrate.DB(pool)) })
}

func onSet(o *Options, do func(*migrate.Set) error) error {
	if err := o.Check(); err != nil {
		return err
	}
	if err := do(o.set()); err != nil {
		return fmt.Errorf("pgparking: %w", err)
	}
	return nil
}

// SQL returns what Migrate runs on an empty database, for those who migrate
// with a tool of their own; [Validate] accepts the result. o may be nil. It
// panics with [Options.Check]'s error.
func SQL(o *Options) string { return o.set().SQL(migrate.DialectPostgres) }

// Prune deletes records that were settled longer than Options.Keep ago, and
// starts without an end that are older than Options.KeepStarts, by the database's
// clock: up to limit rows, or all of them if limit is 0 or less, in transactions
// of at most 1,000 rows, and of fewer where that takes longer than 50 ms. It
// returns how many, also beside an error. Records that wait stay, however old. It
// waits for no lock. Any number of processes may call it at once; let
// dedupe.RunPruner do so. o may be nil.
func Prune(ctx context.Context, pool *pgxpool.Pool, o *Options, limit int) (int, error) {
	if err := o.Check(); err != nil {
		return 0, err
	}
	d := newDB(pool, o)
	deleting := func(statement string, age time.Duration) func(int) (int, error) {
		return func(n int) (int, error) {
			changed, err := d.change(ctx, "prune", statement, age, n)
			return int(changed), err
		}
	}
	return prune.Run(limit, deleting(d.sql.pruneParked, d.o.Keep), deleting(d.sql.pruneStarts, d.o.KeepStarts))
}
