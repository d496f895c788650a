package pgdedupe

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/pgkeys"
)

var _ dedupe.PlaceDriver[pgx.Tx] = (*driver)(nil)

// BeginAt implements dedupe.PlaceDriver: one round trip, and two more for the
// first record of a partition.
func (d *driver) BeginAt(ctx context.Context, p dedupe.Partition) (pgx.Tx, dedupe.Position, error) {
	conn, err := d.acquire(ctx)
	if err != nil {
		return nil, dedupe.Position{}, err
	}
	s := newSession(conn)
	bounded, cancel := context.WithTimeout(ctx, d.o.LockWait+d.o.Timeout)
	defer cancel()
	t, at, err := d.lock(bounded, s, p)
	if err != nil {
		_ = d.giveBack(ctx, s)
		return nil, at, d.claimError(ctx, err)
	}
	return t, at, nil
}

// lock opens a transaction that holds the row of p. The row is made in the
// transaction, where there is none: of two that make it, the second waits, finds
// it there, and waits for its lock.
func (d *driver) lock(ctx context.Context, s *session, p dedupe.Partition) (*tx, dedupe.Position, error) {
	b := &pgx.Batch{}
	b.BeginTx(pgx.TxOptions{IsoLevel: d.o.Isolation})
	d.queueLock(b, p, false)
	t := &tx{s: s}
	at, err := d.locked(ctx, s, b, t)
	if errors.Is(err, pgx.ErrNoRows) {
		b = &pgx.Batch{}
		d.queueLock(b, p, true)
		at, err = d.locked(ctx, s, b, nil)
	}
	return t, at, err
}

func (d *driver) queueLock(b *pgx.Batch, p dedupe.Partition, create bool) {
	b.Queue(d.positions.Bound, strconv.FormatInt(pgkeys.Milliseconds(d.o.LockWait), 10))
	if create { // bounded, too: it waits for another transaction that makes the row
		b.Queue(d.positions.Create, d.createArgs(p, 0)...)
	}
	b.Queue(d.positions.Lock, pgtype.UUID{Bytes: p.Stored(), Valid: true})
	b.Queue(pgkeys.LockBack)
}

// locked sends a batch that ends with queueLock, and reads the row that is locked
// by it. t, if there is one, gets the transaction that the batch has begun.
func (d *driver) locked(ctx context.Context, s *session, b *pgx.Batch, t *tx) (at dedupe.Position, err error) {
	br := s.pgx.SendBatch(ctx, b)
	if t != nil {
		t.inner = br.Tx()
		t.top = t.inner
	}
	for range b.Len() - 2 {
		if err == nil {
			_, err = br.Exec()
		}
	}
	if err == nil {
		at, err = pgkeys.ScanPosition(br.QueryRow().Scan, &s.xid)
	}
	if end := br.Close(); err == nil {
		err = end
	}
	return at, err
}

func (d *driver) createArgs(p dedupe.Partition, next int64) []any {
	args := []any{pgtype.UUID{Bytes: p.Stored(), Valid: true}, next}
	if d.o.Anonymous {
		return append(args, nil, nil, nil, nil)
	}
	return append(args, p.Tenant, p.Consumer, p.Topic, p.Number)
}

// ClaimAt implements dedupe.PlaceDriver: one round trip, and another one if not
// all keys are new.
func (d *driver) ClaimAt(ctx context.Context, t pgx.Tx, claims []dedupe.Claim) ([]*dedupe.Record, error) {
	s := t.(*tx).s
	bounded, cancel := context.WithTimeout(ctx, d.o.LockWait+d.o.Timeout)
	defer cancel()
	b := &pgx.Batch{}
	b.Queue(d.sql.ClaimEach, d.claimEachArgs(claims)...)
	b.Queue(pgkeys.LockBack)
	br := s.pgx.SendBatch(bounded, b)
	owned, err := s.owned(br)
	if end := br.Close(); err == nil {
		err = end
	}
	if err != nil {
		return nil, d.claimError(ctx, err)
	}
	return d.winners(ctx, s, claims, owned)
}

// CommitAt implements dedupe.PlaceDriver: one round trip, as Commit.
func (d *driver) CommitAt(ctx context.Context, t pgx.Tx, a dedupe.Advance) error {
	return d.end(ctx, t, func(b *pgx.Batch) {
		d.queueReplies(b, a.Claims, a.Replies)
		for _, r := range a.Conflicts {
			b.Queue(d.sql.Conflict, d.conflictArgs(r)...)
		}
		b.Queue(d.positions.Move, pgtype.UUID{Bytes: a.To.Partition.Stored(), Valid: true}, a.To.Next, pgkeys.Time(a.To.MaxTime), pgkeys.Digest(a.To.Last))
	})
}

// Positions implements dedupe.PositionAdmin.
func (a *admin) Positions(ctx context.Context) ([]dedupe.Position, error) {
	all, err := query(ctx, a, func(scan func(...any) error) (dedupe.Position, error) {
		var moved time.Time
		p, err := pgkeys.ScanListed(scan, &moved)
		p.MovedAt = moved
		return p, err
	}, a.positions.List, dedupe.CountCap)
	if err != nil {
		return nil, fmt.Errorf("pgdedupe: positions: %w", err)
	}
	return all, nil
}

// ResetPosition implements dedupe.PositionAdmin.
func (a *admin) ResetPosition(ctx context.Context, p dedupe.Partition, next int64) error {
	if err := dedupe.CheckReset(p, next); err != nil {
		return fmt.Errorf("pgdedupe: reset a position: %w", err)
	}
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	d := driver{o: a.o}
	if _, err := a.pool.Exec(ctx, a.positions.Reset, d.createArgs(p, next)...); err != nil {
		return fmt.Errorf("pgdedupe: reset a position: %w", err)
	}
	return nil
}

var _ dedupe.PositionAdmin = (*admin)(nil)
