package pgoutbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/outbox"
)

// ErrRestored is matched by errors about an outbox whose position belongs to
// another database cluster: it was dumped and restored, and transaction ids
// have begun anew, so no row would ever become visible. Call [Store.Rebase].
var ErrRestored = errors.New("pgoutbox: the position is that of another cluster")

// NewStore returns the relay's side of the outbox in pool, which stays the
// caller's. o may be nil. It panics if pool is nil or o names no usable schema.
func NewStore(pool *pgxpool.Pool, o *Options) *Store {
	if pool == nil {
		panic("pgoutbox: NewStore: the pool is nil")
	}
	return &Store{pool: pool, sql: statements(o.names())}
}

// Store implements [outbox.Store], [outbox.Pruner] and [outbox.Parker].
type Store struct {
	pool *pgxpool.Pool
	sql  sqlTexts
	pos  position
}

// Acquire implements [outbox.Store].
func (s *Store) Acquire(ctx context.Context, owner string, d time.Duration) (outbox.Lease, error) {
	l := outbox.Lease{Owner: owner, For: d}
	err := s.pool.QueryRow(ctx, s.sql.acquire, owner, d).Scan(&l.Epoch)
	if errors.Is(err, pgx.ErrNoRows) {
		return outbox.Lease{}, outbox.ErrHeld
	}
	if err != nil {
		return outbox.Lease{}, fmt.Errorf("pgoutbox: acquire: %w", err)
	}
	return l, nil
}

// Renew implements [outbox.Store].
func (s *Store) Renew(ctx context.Context, l outbox.Lease) error {
	return s.fenced(s.pool.Exec(ctx, s.sql.renew, l.Epoch, l.For))("renew")
}

// Release implements [outbox.Store].
func (s *Store) Release(ctx context.Context, l outbox.Lease) error {
	if _, err := s.pool.Exec(ctx, s.sql.release, l.Epoch); err != nil {
		return fmt.Errorf("pgoutbox: release: %w", err)
	}
	return nil
}

type tag interface{ RowsAffected() int64 }

// fenced makes an error of a statement that found another epoch.
func (s *Store) fenced(t tag, err error) func(op string) error {
	return func(op string) error {
		switch {
		case err != nil:
			return fmt.Errorf("pgoutbox: %s: %w", op, err)
		case t.RowsAffected() == 0:
			return outbox.ErrFenced
		}
		return nil
	}
}

// Rebase makes an outbox usable that was restored from a dump into another
// cluster. Rows that were settled before are deleted, the others are given
// transaction ids of this cluster; of the batch that was in hand at the dump
// some may be published again. No relay and no writer may run meanwhile.
func (s *Store) Rebase(ctx context.Context) error {
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		for _, sql := range s.sql.rebase {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("pgoutbox: rebase: %w", err)
	}
	s.pos = position{}
	return nil
}

// Prune implements [outbox.Pruner]. It deletes by visibility, not by id: an id
// below the position may belong to a transaction that has not committed yet.
func (s *Store) Prune(ctx context.Context, age time.Duration, limit int) (int, error) {
	t, err := s.pool.Exec(ctx, s.sql.prune, age, limit)
	if err != nil {
		return 0, fmt.Errorf("pgoutbox: prune: %w", err)
	}
	return int(t.RowsAffected()), nil
}

// Parked implements [outbox.Parker].
func (s *Store) Parked(ctx context.Context, after int64, limit int) ([]outbox.Parked, error) {
	rs, err := s.pool.Query(ctx, s.sql.parked, after, limit)
	if err != nil {
		return nil, fmt.Errorf("pgoutbox: list parked rows: %w", err)
	}
	ps, err := pgx.CollectRows(rs, pgx.RowToStructByPos[outbox.Parked])
	if err != nil {
		return nil, fmt.Errorf("pgoutbox: list parked rows: %w", err)
	}
	return ps, nil
}

// Requeue implements [outbox.Parker].
func (s *Store) Requeue(ctx context.Context, id int64) (bool, error) {
	return s.unpark(ctx, "requeue", s.sql.requeue, id)
}

// Drop implements [outbox.Parker].
func (s *Store) Drop(ctx context.Context, id int64) (bool, error) {
	return s.unpark(ctx, "drop", s.sql.drop, id)
}

// unpark changes a parked row, and then lets the row go that is the first of
// its lane. It locks the position before that, as every settlement does: if a
// row went behind this one at the same time, neither would see what the other
// did, and nobody would let that row go.
func (s *Store) unpark(ctx context.Context, what, change string, id int64) (found bool, err error) {
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, s.sql.lock); err != nil {
			return err
		}
		var topic string
		var key []byte
		err := tx.QueryRow(ctx, change, id).Scan(&topic, &key)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if found = err == nil; !found || key == nil {
			return err
		}
		_, err = tx.Exec(ctx, s.sql.promote, []string{topic}, [][]byte{key})
		return err
	})
	if err != nil {
		return false, fmt.Errorf("pgoutbox: %s: %w", what, err)
	}
	return found, nil
}
