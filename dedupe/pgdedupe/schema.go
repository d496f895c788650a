package pgdedupe

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/dedupe/internal/pgkeys"
	"github.com/unecho/unecho/internal/migrate"
	"github.com/unecho/unecho/internal/migrate/pgxmigrate"
	"github.com/unecho/unecho/internal/prune"
)

// Migrate brings the tables to the version that this program needs. Any number
// of processes may call it at once, on every start: when there is nothing to
// do, it sends one query and needs no privilege to create anything. It refuses
// a database that a newer program has migrated. o may be nil.
func Migrate(ctx context.Context, pool *pgxpool.Pool, o *Options) error {
	if err := o.Check(); err != nil {
		return err
	}
	if err := o.set().Up(ctx, pgxmigrate.DB(pool)); err != nil {
		return fmt.Errorf("pgdedupe: %w", err)
	}
	return nil
}

// Validate returns nil if the tables are at the version that this program
// needs, and an error that says what to do if they are older or newer, or if
// the database is out of reach, a standby or read-only. It changes nothing. o may
// be nil.
func Validate(ctx context.Context, pool *pgxpool.Pool, o *Options) error {
	if err := o.Check(); err != nil {
		return err
	}
	if err := o.set().Validate(ctx, pgxmigrate.DB(pool)); err != nil {
		return fmt.Errorf("pgdedupe: %w", err)
	}
	return validateServer(ctx, pool, o.timeout())
}

// validateServer refuses what cannot commit.
func validateServer(ctx context.Context, pool *pgxpool.Pool, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var standby, readOnly bool
	err := pool.QueryRow(ctx, "select pg_is_in_recovery(), current_setting('default_transaction_read_only')::boolean").Scan(&standby, &readOnly)
	switch {
	case err != nil:
		return fmt.Errorf("pgdedupe: ask the server what it is: %w", err)
	case standby:
		return errors.New("pgdedupe: the server is a standby, where nothing can be written; connect to the primary, with target_session_attrs=read-write in the URL and both hosts in it")
	case readOnly:
		return errors.New("pgdedupe: default_transaction_read_only is on: transactions cannot write; turn it off for this role or database")
	}
	return nil
}

// SQL returns what Migrate runs on an empty database, for those who migrate
// with a tool of their own; [Validate] accepts the result. o may be nil. It
// panics with [Options.Check]'s error.
func SQL(o *Options) string {
	if err := o.Check(); err != nil {
		panic(err)
	}
	return o.set().SQL(migrate.DialectPostgres)
}

func (o *Options) set() *migrate.Set {
	if o == nil {
		return pgkeys.Set("")
	}
	return pgkeys.Set(o.Schema)
}

// Version returns the version of the tables, and the one that this program
// needs. The first is 0 if nothing was migrated yet. o may be nil.
func Version(ctx context.Context, pool *pgxpool.Pool, o *Options) (has, needs int, err error) {
	if err := o.Check(); err != nil {
		return 0, 0, err
	}
	set := o.set()
	has, err = set.Version(ctx, pgxmigrate.DB(pool))
	if err != nil {
		return 0, set.Latest(), fmt.Errorf("pgdedupe: %w", err)
	}
	return has, set.Latest(), nil
}

// Prune deletes keys and completed leases whose retention is over, by the
// database's clock: up to limit rows, or all of them if limit is 0 or less, in
// transactions of at most 1,000 rows, and of fewer where that takes longer than
// 50 ms. It returns how many, also beside an error. Leases that are not done
// stay, and so do keys with a conflict that nobody has settled. It takes no
// lock that a claim waits for, unless the claim is of an expired key, and waits
// for none. Any number of processes may call it at once. o may be nil.
//
// Until it is pruned an expired key still counts: after a downtime, what the
// broker redelivers first must meet it. Let [dedupe.RunPruner] call Prune.
func Prune(ctx context.Context, pool *pgxpool.Pool, o *Options, limit int) (int, error) {
	if err := o.Check(); err != nil {
		return 0, err
	}
	deleting := func(statement string) func(int) (int, error) {
		return func(n int) (int, error) {
			ctx, cancel := context.WithTimeout(ctx, o.timeout())
			defer cancel()
			tag, err := pool.Exec(ctx, statement, n)
			return int(tag.RowsAffected()), err
		}
	}
	total, err := prune.Run(limit, deleting(pgkeys.New(o.set()).Prune), deleting(pgkeys.NewLease(o.set()).Prune))
	if err != nil {
		return total, fmt.Errorf("pgdedupe: prune: %w", err)
	}
	return total, nil
}
