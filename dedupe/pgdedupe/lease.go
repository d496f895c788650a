package pgdedupe

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/pgkeys"
)

// LeaseOptions are the settings of [NewLeaseStore]. The zero value, and nil, is
// the default.
type LeaseOptions struct {
	// Options say where the tables are and what is kept in them. Isolation,
	// LockWait, Timeout and Tx are not used: there are no transactions.
	Options
	// Lease are the settings of the leases.
	Lease dedupe.LeaseOptions
}

// NewLeaseStore returns a store of leases in the database of pool, which stays
// the caller's, for handlers whose effect is not in it. o may be nil. See
// [Migrate]. It panics if pool is nil, or with [Options.Check]'s error.
//
// A lease takes two transactions for each event, one to claim and one to
// complete. Where the effect can be written by the handler's transaction,
// [NewStore] is faster and promises more.
func NewLeaseStore(pool *pgxpool.Pool, o *LeaseOptions) dedupe.Store[*dedupe.Lease] {
	if pool == nil {
		panic("pgdedupe: NewLeaseStore: the pool is nil")
	}
	if o == nil {
		o = &LeaseOptions{}
	}
	return dedupe.NewLeaseStore(newLeaseDriver(pool, &o.Options), &o.Lease)
}

// NewLeaseDriver returns the driver behind [NewLeaseStore], for those who build
// on it. o may be nil. It panics as NewLeaseStore does.
func NewLeaseDriver(pool *pgxpool.Pool, o *Options) dedupe.LeaseDriver {
	if pool == nil {
		panic("pgdedupe: NewLeaseDriver: the pool is nil")
	}
	return newLeaseDriver(pool, o)
}

// leaseDriver implements dedupe.LeaseDriver.
type leaseDriver struct {
	d   *driver // for conflicts, and the readable parts of a key
	sql pgkeys.LeaseStatements
}

func newLeaseDriver(pool *pgxpool.Pool, o *Options) *leaseDriver {
	return &leaseDriver{d: newDriver(pool, o), sql: pgkeys.NewLease(o.set())}
}

// Acquire implements dedupe.LeaseDriver. When the insert takes no row, a
// statement of its own reads who has the key: the insert waited for that and
// cannot see it. Between the two the key may be given up; the claim begins anew
// then.
func (l *leaseDriver) Acquire(ctx context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	if err := dedupe.CheckLifetimes(lease, c.Retain); err != nil {
		return dedupe.Grant{}, nil, err
	}
	for range maxVanished {
		g, err := l.insert(ctx, c, owner, lease)
		if err == nil {
			return g, nil, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return dedupe.Grant{}, nil, fmt.Errorf("pgdedupe: acquire: %w", err)
		}
		g, r, err := l.holder(ctx, c, owner)
		if !errors.Is(err, errGivenUp) {
			return g, r, err
		}
	}
	return dedupe.Grant{}, nil, errVanishing
}

func (l *leaseDriver) insert(ctx context.Context, c dedupe.Claim, owner string, lease time.Duration) (g dedupe.Grant, err error) {
	args := append([]any{uuid(c.Key), c.Fingerprint[:], owner, pgkeys.Microseconds(lease)}, l.d.readable(c.Key)...)
	err = l.d.pool.QueryRow(ctx, l.sql.Acquire, append(args, l.d.fields(c))...).Scan(&g.Token, &g.Attempt, &g.Unknown)
	return g, err
}

var errGivenUp = errors.New("the key has just been given up")

// holder says why a claim took no row.
func (l *leaseDriver) holder(ctx context.Context, c dedupe.Claim, owner string) (dedupe.Grant, *dedupe.Record, error) {
	var state, has string
	var g dedupe.Grant
	var fp []byte
	var r dedupe.Record
	var doneAt *time.Time
	var left int64
	err := l.d.pool.QueryRow(ctx, l.sql.Holder, uuid(c.Key)).Scan(&state, &has, &g.Token, &g.Attempt, &g.Unknown, &fp, &r.Fields, &r.Reply, &doneAt, &left)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return dedupe.Grant{}, nil, errGivenUp
	case err != nil:
		return dedupe.Grant{}, nil, fmt.Errorf("pgdedupe: acquire: %w", err)
	}
	copy(r.Fingerprint[:], fp)
	if doneAt != nil {
		r.DoneAt = *doneAt
	}
	switch {
	case state == "d":
		return dedupe.Grant{}, &r, nil
	case r.Fingerprint != c.Fingerprint && (state != "f" || g.Unknown): // another content, of which it is not known what came
		r.Reply = nil
		return dedupe.Grant{}, &r, nil
	case state == "r" && has == owner: // our own claim, whose answer was lost
		return g, nil, nil
	case state == "p":
		return dedupe.Grant{}, nil, dedupe.ErrParked
	case state == "f":
		return dedupe.Grant{}, nil, errGivenUp
	}
	return dedupe.Grant{}, nil, &dedupe.HeldError{Left: time.Duration(left) * time.Microsecond}
}

// Extend implements dedupe.LeaseDriver.
func (l *leaseDriver) Extend(ctx context.Context, k dedupe.Key, owner string, token int64, lease time.Duration) error {
	if err := dedupe.CheckLifetimes(lease); err != nil {
		return err
	}
	return l.change(ctx, "extend", l.sql.Extend, uuid(k), owner, token, pgkeys.Microseconds(lease))
}

// Complete implements dedupe.LeaseDriver.
func (l *leaseDriver) Complete(ctx context.Context, c dedupe.Claim, owner string, token int64, reply []byte) error {
	if err := dedupe.CheckLifetimes(c.Retain); err != nil {
		return err
	}
	return l.change(ctx, "complete", l.sql.Complete, uuid(c.Key), owner, token, reply, pgkeys.Microseconds(c.Retain))
}

// Release implements dedupe.LeaseDriver.
func (l *leaseDriver) Release(ctx context.Context, k dedupe.Key, owner string, token int64, to dedupe.State) error {
	state, unknown, ok := pgkeys.Released(to)
	if !ok {
		return fmt.Errorf("pgdedupe: release: %w: no lease is given up as %v", dedupe.ErrWrongState, to)
	}
	return l.change(ctx, "release", l.sql.Release, uuid(k), owner, token, state, unknown)
}

func (l *leaseDriver) change(ctx context.Context, what, sql string, args ...any) error {
	tag, err := l.d.pool.Exec(ctx, sql, args...)
	switch {
	case err != nil:
		return fmt.Errorf("pgdedupe: %s: %w", what, err)
	case tag.RowsAffected() == 0:
		return fmt.Errorf("%w: %s: another owner has the key, or nobody", dedupe.ErrLeaseLost, what)
	}
	return nil
}

// Conflict implements dedupe.LeaseDriver.
func (l *leaseDriver) Conflict(ctx context.Context, r dedupe.ConflictRecord) error {
	return l.d.Conflict(ctx, r)
}
