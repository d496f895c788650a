package pgdedupe

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/pgkeys"
)

// driver implements dedupe.TxDriver and dedupe.Explainer. The pgx.Tx that it
// takes is always a *tx that it has made.
type driver struct {
	pool *pgxpool.Pool
	o    Options
	sql  pgkeys.Statements

	positions pgkeys.PositionStatements
}

// maxVanished is how often a claim begins again because the winner that it met
// was pruned before it could be read.
const maxVanished = 5

// Begin implements dedupe.TxDriver. A key that is new takes one round trip
// beside those of the handler and the commit, a duplicate two in all.
func (d *driver) Begin(ctx context.Context, c dedupe.Claim) (pgx.Tx, *dedupe.Record, error) {
	conn, err := d.acquire(ctx)
	if err != nil {
		return nil, nil, err
	}
	s := newSession(conn)
	for range maxVanished {
		t, err := d.claim(ctx, s, c)
		if t != nil || err != nil {
			return t.orNil(), nil, err
		}
		prior, err := d.winner(ctx, s.pgx, c.Key, "rollback")
		if prior != nil || err != nil {
			s.release()
			return nil, prior, err
		}
	}
	s.release()
	return nil, nil, errVanishing
}

var errVanishing = fmt.Errorf("pgdedupe: %w: its record has come and gone %d times", dedupe.ErrInProgress, maxVanished)

// acquire waits a bounded time for a connection.
func (d *driver) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	bounded, cancel := context.WithTimeout(ctx, d.o.Timeout)
	defer cancel()
	conn, err := d.pool.Acquire(bounded)
	switch {
	case err == nil:
		return conn, nil
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		stat, class := d.pool.Stat(), dedupe.ErrUnavailable
		if stat.AcquiredConns() == stat.MaxConns() { // others work with them: the server serves
			class = dedupe.ErrBusy
		}
		return nil, fmt.Errorf("pgdedupe: %w: no connection of the pool was free for %v, %d of %d are in use: %w",
			class, d.o.Timeout, stat.AcquiredConns(), stat.MaxConns(), err)
	}
	return nil, fmt.Errorf("pgdedupe: get a connection: %w", err)
}

// claim opens a transaction and claims the key, in one round trip. It returns
// nil and no error if the key was there; the transaction is open then. After an
// error it is not, and the connection is back in the pool.
func (d *driver) claim(ctx context.Context, s *session, c dedupe.Claim) (*tx, error) {
	bounded, cancel := context.WithTimeout(ctx, d.o.LockWait+d.o.Timeout)
	defer cancel()
	b := &pgx.Batch{}
	b.BeginTx(pgx.TxOptions{IsoLevel: d.o.Isolation})
	b.Queue(d.sql.Claim, d.claimArgs(c)...)
	br := s.pgx.SendBatch(bounded, b)
	inner := br.Tx()
	_, err := br.Exec()
	if err == nil {
		var lockTimeout string
		err = br.QueryRow().Scan(&s.xid, &lockTimeout)
	}
	taken := errors.Is(err, pgx.ErrNoRows)
	if taken {
		err = nil
	}
	if end := br.Close(); err == nil {
		err = end
	}
	switch {
	case err != nil:
		_ = d.giveBack(ctx, s)
		return nil, d.claimError(ctx, err)
	case taken:
		return nil, nil
	}
	return &tx{s: s, inner: inner, top: inner}, nil
}

func (d *driver) claimArgs(c dedupe.Claim) []any {
	args := []any{uuid(c.Key), c.Fingerprint[:], pgkeys.Microseconds(c.Retain), strconv.FormatInt(pgkeys.Milliseconds(d.o.LockWait), 10)}
	return append(append(args, d.readable(c.Key)...), d.fields(c))
}

// fields are kept where the readable parts are: they are names that people use.
func (d *driver) fields(c dedupe.Claim) []byte {
	if d.o.Anonymous {
		return nil
	}
	return c.Fields
}

func uuid(k dedupe.Key) pgtype.UUID { return pgtype.UUID{Bytes: k.Stored(), Valid: true} }

// readable is the key for people.
func (d *driver) readable(k dedupe.Key) []any {
	if d.o.Anonymous {
		return []any{nil, nil, nil, nil}
	}
	return []any{k.Tenant, k.Consumer, k.Source, k.ID}
}

// claimError: a claim that was waiting for another holder says so. A caller's
// context that ended is not the other holder's doing, whatever the server says
// about the statement that was cancelled for it.
func (d *driver) claimError(ctx context.Context, err error) error {
	code := sqlState(err)
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("pgdedupe: %w: %w", ctx.Err(), err)
	case code == pgkeys.LockTimeout, code == pgkeys.QueryCanceled:
		return fmt.Errorf("pgdedupe: %w: waited %v: %w", dedupe.ErrInProgress, d.o.LockWait, err)
	}
	return fmt.Errorf("pgdedupe: %w", err)
}

// sender is what winner needs of a connection or a transaction.
type sender interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// winner reads who has done the key, and does what else is to be done, in one
// round trip. It has to be a statement of its own: the one that met the
// winner's row does not see it. nil and no error: there is none any more.
func (d *driver) winner(ctx context.Context, on sender, k dedupe.Key, then ...string) (*dedupe.Record, error) {
	ctx, cancel := context.WithTimeout(ctx, d.o.Timeout)
	defer cancel()
	b := &pgx.Batch{}
	b.Queue(d.sql.Winner, uuid(k))
	for _, statement := range then {
		b.Queue(statement)
	}
	br := on.SendBatch(ctx, b)
	var r dedupe.Record
	var fingerprint []byte
	err := br.QueryRow().Scan(&fingerprint, &r.Fields, &r.Reply, &r.DoneAt)
	gone := errors.Is(err, pgx.ErrNoRows)
	if gone {
		err = nil
	}
	if end := br.Close(); err == nil {
		err = end
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("pgdedupe: read the record of the key: %w", err)
	case gone:
		return nil, nil
	}
	copy(r.Fingerprint[:], fingerprint)
	return &r, nil
}

// Conflict implements dedupe.TxDriver.
func (d *driver) Conflict(ctx context.Context, r dedupe.ConflictRecord) error {
	conn, err := d.acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	if _, err := conn.Exec(ctx, d.sql.Conflict, d.conflictArgs(r)...); err != nil {
		return fmt.Errorf("pgdedupe: %w", err)
	}
	return nil
}

func (d *driver) conflictArgs(r dedupe.ConflictRecord) []any {
	args := []any{uuid(r.Key), r.Fingerprint[:], r.First[:], string(r.Reason), pgkeys.Fields(r.Fields)}
	return append(args, d.readable(r.Key)...)
}

// Classify implements dedupe.TxDriver.
func (d *driver) Classify(err error) dedupe.Class {
	if code := sqlState(err); code != "" {
		return pgkeys.Classify(code)
	}
	var connect *pgconn.ConnectError
	if errors.As(err, &connect) && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) {
		return dedupe.ClassUnavailable
	}
	return dedupe.ClassOther
}

// sqlState returns the code of the server's error in err, or "".
func sqlState(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// Explain implements dedupe.Explainer.
func (d *driver) Explain(t pgx.Tx) error { return t.(*tx).s.explain() }

// MaxConcurrent implements dedupe.Bounded.
func (d *driver) MaxConcurrent() int { return int(d.pool.Config().MaxConns) }
