package pgdedupe

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/pgkeys"
)

// NewAdmin returns a view for people of the keys and leases in the database of
// pool, which stays the caller's. It is a [dedupe.PositionAdmin], too. o may be nil. It panics if pool is nil, or
// with [Options.Check]'s error.
func NewAdmin(pool *pgxpool.Pool, o *Options) dedupe.Admin {
	if pool == nil {
		panic("pgdedupe: NewAdmin: the pool is nil")
	}
	n := o.normal()
	return &admin{pool: pool, o: n, sql: pgkeys.NewAdmin(n.set()), positions: pgkeys.NewPosition(n.set())}
}

type admin struct {
	pool *pgxpool.Pool
	o    Options
	sql  pgkeys.AdminStatements

	positions pgkeys.PositionStatements
}

func idOf(id dedupe.KeyID) pgtype.UUID { return pgtype.UUID{Bytes: id, Valid: true} }

func (a *admin) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, a.o.Timeout)
}

// Find implements dedupe.Admin.
func (a *admin) Find(ctx context.Context, id dedupe.KeyID) (dedupe.Entry, error) {
	entries, err := query(ctx, a, pgkeys.ScanEntry, a.sql.Find, idOf(id))
	switch {
	case err != nil:
		return dedupe.Entry{}, fmt.Errorf("pgdedupe: find: %w", err)
	case len(entries) == 0:
		return dedupe.Entry{}, fmt.Errorf("pgdedupe: %w: %v", dedupe.ErrNotFound, id)
	}
	return entries[0], nil
}

// List implements dedupe.Admin.
func (a *admin) List(ctx context.Context, f dedupe.Filter) (dedupe.Page, error) {
	statement, after, err := a.sql.List(f)
	if err != nil {
		return dedupe.Page{}, fmt.Errorf("pgdedupe: list: %w", err)
	}
	entries, err := query(ctx, a, pgkeys.ScanEntry, statement, idOf(after), f.PageSize())
	if err != nil {
		return dedupe.Page{}, fmt.Errorf("pgdedupe: list: %w", err)
	}
	page := dedupe.Page{Entries: entries}
	if len(entries) >= f.PageSize() {
		page.Next = entries[len(entries)-1].ID.String()
	}
	return page, nil
}

// Conflicts implements dedupe.Admin.
func (a *admin) Conflicts(ctx context.Context, id dedupe.KeyID) ([]dedupe.ConflictRecord, error) {
	found, err := query(ctx, a, pgkeys.ScanConflict, a.sql.Conflicts, idOf(id))
	if err != nil {
		return nil, fmt.Errorf("pgdedupe: conflicts: %w", err)
	}
	return found, nil
}

// query reads all rows of a statement.
func query[T any](ctx context.Context, a *admin, scan func(func(...any) error) (T, error), statement string, args ...any) ([]T, error) {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	rows, err := a.pool.Query(ctx, statement, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (T, error) { return scan(row.Scan) })
}

// Release implements dedupe.Admin.
func (a *admin) Release(ctx context.Context, id dedupe.KeyID) error {
	bounded, cancel := a.bounded(ctx)
	defer cancel()
	tag, err := a.pool.Exec(bounded, a.sql.Release, idOf(id))
	if err != nil {
		return fmt.Errorf("pgdedupe: release: %w", err)
	}
	if tag.RowsAffected() > 0 {
		return nil
	}
	e, err := a.Find(ctx, id)
	if err != nil {
		return err
	}
	return fmt.Errorf("pgdedupe: release: %w: it is %v, only one that is unknown or parked can be released", dedupe.ErrWrongState, e.State)
}

// Evict implements dedupe.Admin. The deletes are one transaction.
func (a *admin) Evict(ctx context.Context, id dedupe.KeyID) error {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	var n int64
	err := pgx.BeginFunc(ctx, a.pool, func(tx pgx.Tx) error {
		for _, step := range a.sql.Evict {
			var args []any
			if step.Key {
				args = []any{idOf(id)}
			}
			tag, err := tx.Exec(ctx, step.Text, args...)
			if err != nil {
				return err
			}
			if step.Counts {
				n += tag.RowsAffected()
			}
		}
		return nil
	})
	switch {
	case err != nil:
		return fmt.Errorf("pgdedupe: evict: %w", err)
	case n == 0:
		return fmt.Errorf("pgdedupe: %w: %v", dedupe.ErrNotFound, id)
	}
	return nil
}

// Settle implements dedupe.Admin.
func (a *admin) Settle(ctx context.Context, id dedupe.KeyID) error {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	if _, err := a.pool.Exec(ctx, a.sql.Settle, idOf(id)); err != nil {
		return fmt.Errorf("pgdedupe: settle: %w", err)
	}
	return nil
}

// Counts implements dedupe.Admin.
func (a *admin) Counts(ctx context.Context) (dedupe.Counts, error) {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	var done *int64
	var c dedupe.Counts
	err := a.pool.QueryRow(ctx, a.sql.Counts).Scan(&done, &c.Running, &c.Free, &c.Unknown, &c.Parked, &c.Conflicts)
	if err != nil {
		return dedupe.Counts{}, fmt.Errorf("pgdedupe: counts: %w", err)
	}
	c.Done = -1 // the tables were never analysed
	if done != nil {
		c.Done = *done
	}
	return c, nil
}
