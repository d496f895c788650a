package sqldedupe

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/pgkeys"
	"github.com/unecho/unecho/internal/sqlstate"
)

// postgres implements dedupe.TxDriver. It works on the tables of pgdedupe, with
// the statements of pgdedupe, one round trip for each.
type postgres struct {
	base
	sql       pgkeys.Statements
	positions pgkeys.PositionStatements
}

func newPostgres(b base) *postgres {
	set := pgkeys.Set(b.o.Schema)
	return &postgres{b, pgkeys.New(set), pgkeys.NewPosition(set)}
}

// maxVanished is how often a claim begins again because the winner that it met
// was pruned before it could be read.
const maxVanished = 5

// Begin implements dedupe.TxDriver.
func (p *postgres) Begin(ctx context.Context, c dedupe.Claim) (*scope, *dedupe.Record, error) {
	for range maxVanished {
		s, err := p.begin(ctx)
		if err != nil {
			return nil, nil, err
		}
		xid, err := p.claim(ctx, s.tx, c)
		if xid != "" {
			s.xid = xid
			return s, nil, nil
		}
		var prior *dedupe.Record
		if err == nil {
			prior, err = p.winner(ctx, s.tx, c)
		}
		s.undo(ctx, p.o.Timeout)
		if prior != nil || err != nil {
			return nil, prior, err
		}
	}
	return nil, nil, errVanishing
}

// BeginBatch implements dedupe.BatchDriver.
func (p *postgres) BeginBatch(ctx context.Context, claims []dedupe.Claim) (*scope, []*dedupe.Record, error) {
	for range maxVanished {
		s, err := p.begin(ctx)
		if err != nil {
			return nil, nil, err
		}
		b := newBatch(claims)
		all, err := p.claimBatch(ctx, s, b)
		if all && s.xid != "" {
			return s, b.priors(), nil
		}
		s.undo(ctx, p.o.Timeout)
		switch {
		case err != nil:
			return nil, nil, err
		case all:
			return nil, b.priors(), nil
		}
	}
	return nil, nil, errVanishing
}

// claimBatch claims the keys of b and reads the winners of the others. s has the
// id of the transaction if it owns any. all is false if a winner was pruned
// before it could be read.
func (p *postgres) claimBatch(ctx context.Context, s *scope, b *batch) (all bool, err error) {
	owned := make(map[dedupe.KeyID]bool)
	bounded, cancel := context.WithTimeout(ctx, p.batchWait(len(b.rows))+p.o.Timeout)
	defer cancel()
	for some := range chunks(b.rows, row.size) {
		claimed, err := collect(bounded, s.tx, s.scanClaimed, p.sql.ClaimEach, p.eachArgs(some)...)
		if err == nil {
			// Before the next statement, which notes the lock_timeout that it finds.
			_, err = s.tx.ExecContext(bounded, pgkeys.LockBack)
		}
		if err != nil {
			return false, p.claimError(ctx, err)
		}
		for _, id := range claimed {
			owned[id] = true
		}
	}
	for some := range chunks(b.without(func(id dedupe.KeyID) bool { return owned[id] }), row.size) {
		if err := p.winners(ctx, s.tx, b, some); err != nil {
			return false, err
		}
	}
	return len(owned)+len(b.done) == len(b.rows), nil
}

// scanClaimed reads a key that a claim has inserted, and the transaction's id.
func (s *scope) scanClaimed(scan func(...any) error) (dedupe.KeyID, error) {
	var text string
	if err := scan(&text, &s.xid); err != nil {
		return dedupe.KeyID{}, err
	}
	return dedupe.ParseKeyID(text)
}

func (p *postgres) winners(ctx context.Context, tx *sql.Tx, b *batch, rows []row) error {
	ctx, cancel := context.WithTimeout(ctx, p.o.Timeout)
	defer cancel()
	found, err := collect(ctx, tx, scanPostgresWinner, p.sql.Winners, array(rows, row.uuid))
	if err != nil {
		return fmt.Errorf("sqldedupe: read the records of the keys: %w", err)
	}
	b.add(found)
	return nil
}

func scanPostgresWinner(scan func(...any) error) (w winner, err error) {
	var id string
	var fingerprint []byte
	if err := scan(&id, &fingerprint, &w.record.Fields, &w.record.Reply, &w.record.DoneAt); err != nil {
		return winner{}, err
	}
	copy(w.record.Fingerprint[:], fingerprint)
	w.id, err = dedupe.ParseKeyID(id)
	return w, err
}

var errVanishing = fmt.Errorf("sqldedupe: %w: its record has come and gone %d times", dedupe.ErrInProgress, maxVanished)

// claim returns the id of the transaction if it owns the key. If there is none
// and no error, the key was there.
func (p *postgres) claim(ctx context.Context, tx *sql.Tx, c dedupe.Claim) (xid string, _ error) {
	bounded, cancel := context.WithTimeout(ctx, p.o.LockWait+p.o.Timeout)
	defer cancel()
	args := []any{uuid(c.Key), c.Fingerprint[:], pgkeys.Microseconds(c.Retain), strconv.FormatInt(pgkeys.Milliseconds(p.o.LockWait), 10)}
	var lockTimeout string
	err := tx.QueryRowContext(bounded, p.sql.Claim, append(append(args, p.readable(c.Key)...), p.fields(c))...).Scan(&xid, &lockTimeout)
	switch {
	case err == nil:
		return xid, nil
	case errors.Is(err, sql.ErrNoRows):
		return "", nil
	}
	return "", p.claimError(ctx, err)
}

// claimError: a claim that was waiting for another holder says so. A caller's
// context that ended is not the other holder's doing.
func (p *postgres) claimError(ctx context.Context, err error) error {
	code := sqlState(err)
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("sqldedupe: %w: %w", ctx.Err(), err)
	case code == pgkeys.LockTimeout, code == pgkeys.QueryCanceled:
		return fmt.Errorf("sqldedupe: %w: waited %v: %w", dedupe.ErrInProgress, p.o.LockWait, err)
	}
	return fmt.Errorf("sqldedupe: %w", err)
}

// claimIn implements claimsIn. The savepoint lets tx go on after a wait that was
// too long.
func (p *postgres) claimIn(ctx context.Context, tx *sql.Tx, c dedupe.Claim) (owned bool, prior *dedupe.Record, err error) {
	if _, err := tx.ExecContext(ctx, pgkeys.Savepoint); err != nil {
		return false, nil, fmt.Errorf("sqldedupe: %w", err)
	}
	xid, err := p.claim(ctx, tx, c)
	if err != nil {
		if _, back := tx.ExecContext(ctx, pgkeys.Back); back != nil {
			err = errors.Join(err, back)
		}
		return false, nil, err
	}
	after := pgkeys.Release
	if xid == "" {
		after = pgkeys.Back // to the lock_timeout of before
	}
	if _, err := tx.ExecContext(ctx, after); err != nil {
		return false, nil, fmt.Errorf("sqldedupe: %w", err)
	}
	if xid != "" {
		return true, nil, nil
	}
	prior, err = p.winner(ctx, tx, c)
	return false, prior, err
}

// replyIn implements claimsIn.
func (p *postgres) replyIn(ctx context.Context, tx *sql.Tx, k dedupe.Key, reply []byte) (sql.Result, error) {
	return tx.ExecContext(ctx, p.sql.Reply, uuid(k), reply)
}

// repliesIn implements claimsIn.
func (p *postgres) repliesIn(ctx context.Context, tx *sql.Tx, replies []kept) error {
	_, err := tx.ExecContext(ctx, p.sql.Replies,
		array(replies, func(k kept) *string { return hexText(k.key.Stored()) }),
		array(replies, func(k kept) *string { return byteaText(k.reply) }))
	return err
}

// winner reads who has done the key; nil if there is nobody any more.
func (p *postgres) winner(ctx context.Context, tx *sql.Tx, c dedupe.Claim) (*dedupe.Record, error) {
	ctx, cancel := context.WithTimeout(ctx, p.o.Timeout)
	defer cancel()
	var r dedupe.Record
	var fingerprint []byte
	err := tx.QueryRowContext(ctx, p.sql.Winner, uuid(c.Key)).Scan(&fingerprint, &r.Fields, &r.Reply, &r.DoneAt)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("sqldedupe: read the record of the key: %w", err)
	}
	copy(r.Fingerprint[:], fingerprint)
	return &r, nil
}

func uuid(k dedupe.Key) string { return hexID(k.Stored()) }

func hexID(id dedupe.KeyID) string { return hex.EncodeToString(id[:]) }

// Commit implements dedupe.TxDriver.
func (p *postgres) Commit(ctx context.Context, s *scope, c dedupe.Claim, reply []byte) error {
	return p.CommitBatch(ctx, s, []dedupe.Claim{c}, [][]byte{reply})
}

// CommitBatch implements dedupe.BatchDriver.
func (p *postgres) CommitBatch(ctx context.Context, s *scope, claims []dedupe.Claim, replies [][]byte) error {
	return p.CommitAt(ctx, s, dedupe.Advance{Claims: claims, Replies: replies})
}

// CommitAt implements dedupe.PlaceDriver.
func (p *postgres) CommitAt(ctx context.Context, s *scope, a dedupe.Advance) error {
	err := s.finish(ctx, func(ready func() bool) error {
		if err := p.fit(ctx, s, ready); err != nil {
			return unfit(err, s.tx.Rollback())
		}
		return commit(ctx, p, s, a, func(err error) bool { return sqlstate.Refused(sqlState(err)) })
	})
	if err != nil {
		return fmt.Errorf("sqldedupe: %w", err)
	}
	return nil
}

// fit says whether the transaction that came back from the handler is the one
// that the claim was made in, and can be committed.
func (p *postgres) fit(ctx context.Context, s *scope, ready func() bool) error {
	var xid string
	err := s.tx.QueryRowContext(ctx, "select pg_current_xact_id()::text").Scan(&xid)
	switch {
	case !ready():
		return errInUse
	case errors.Is(err, sql.ErrTxDone):
		return fmt.Errorf("%w: it ended the transaction", dedupe.ErrScope)
	case sqlState(err) == pgkeys.Aborted:
		return fmt.Errorf("%w: it ignored that a statement failed", dedupe.ErrScope)
	case err != nil:
		return err
	case xid != s.xid:
		return fmt.Errorf("%w: it ended the transaction", dedupe.ErrScope)
	}
	return nil
}

// Rollback implements dedupe.TxDriver.
func (p *postgres) Rollback(ctx context.Context, s *scope) error {
	return rolledBack(s.finish(ctx, func(ready func() bool) error { return rollback(s, ready) }))
}

// Conflict implements dedupe.TxDriver.
func (p *postgres) Conflict(ctx context.Context, r dedupe.ConflictRecord) error {
	return p.conflictIn(ctx, p.db, r)
}

// conflictIn implements claimsIn.
func (p *postgres) conflictIn(ctx context.Context, on execer, r dedupe.ConflictRecord) error {
	args := []any{uuid(r.Key), r.Fingerprint[:], r.First[:], string(r.Reason), p.names(r)}
	if _, err := on.ExecContext(ctx, p.sql.Conflict, append(args, p.readable(r.Key)...)...); err != nil {
		return fmt.Errorf("sqldedupe: %w", err)
	}
	return nil
}

// Classify implements dedupe.TxDriver.
func (p *postgres) Classify(err error) dedupe.Class {
	if code := sqlState(err); code != "" {
		return pgkeys.Classify(code)
	}
	if isLostConn(err) {
		return dedupe.ClassUnavailable
	}
	return dedupe.ClassOther
}
