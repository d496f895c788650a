package pgdedupe

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/pgkeys"
)

// Claimer claims keys in transactions that the caller begins and ends. It is for
// programs whose transactions are made elsewhere; where they need not be,
// [NewStore] does more: it tells an unknown commit from a failed one, runs lost
// races again, and sees what a handler ignores. It is safe for concurrent use.
type Claimer struct {
	d        *driver
	maxReply int
}

// NewClaimer returns a Claimer. o may be nil; its Isolation and its Tx are not
// used, but for Tx.MaxReply. It panics with [Options.Check]'s error.
func NewClaimer(o *Options) *Claimer {
	d := newDriver(nil, o)
	return &Claimer{d: d, maxReply: d.o.Tx.MaxReply}
}

// Claim claims a key in tx, before anything else that the event brings about.
//
// A nil Result and a nil error mean that the key is new and tx's own: bring the
// effect about in tx, and commit. With a Result the event was done before, as
// its Outcome says: bring nothing about, commit (a conflict is recorded in tx),
// and acknowledge. On an error do not acknowledge:
//
//   - ErrInProgress: another transaction holds the key. tx is as it was before.
//   - ErrContention: tx has lost against another one, above READ COMMITTED.
//     Roll back, and run all of it again.
//   - ErrInvalidKey, ErrInvalidClaim: the claim cannot be stored, ever. tx is
//     as it was before.
//   - anything else, such as a lost connection: roll back.
//
// When the answer to the commit of tx is lost, nobody knows whether it
// happened; the redelivery's claim does.
func (c *Claimer) Claim(ctx context.Context, tx pgx.Tx, claim dedupe.Claim) (*dedupe.Result, error) {
	claim, err := claim.Normal()
	if err != nil {
		return nil, err
	}
	for range maxVanished {
		owned, err := c.claim(ctx, tx, claim)
		if owned || err != nil {
			return nil, err
		}
		prior, err := c.d.winner(ctx, tx, claim.Key, pgkeys.LockBack)
		switch {
		case err != nil:
			return nil, err
		case prior != nil:
			return c.settled(ctx, tx, claim, *prior)
		}
	}
	return nil, errVanishing
}

// claim is one round trip. The savepoint lets tx go on after a wait that was
// too long.
func (c *Claimer) claim(ctx context.Context, tx pgx.Tx, claim dedupe.Claim) (owned bool, _ error) {
	bounded, cancel := context.WithTimeout(ctx, c.d.o.LockWait+c.d.o.Timeout)
	defer cancel()
	b := &pgx.Batch{}
	b.Queue(pgkeys.Savepoint)
	b.Queue(c.d.sql.Claim, c.d.claimArgs(claim)...)
	b.Queue(pgkeys.Release)
	br := tx.SendBatch(bounded, b)
	_, err := br.Exec()
	if err == nil {
		var xid, lockTimeout string
		err = br.QueryRow().Scan(&xid, &lockTimeout)
	}
	taken := errors.Is(err, pgx.ErrNoRows)
	if taken {
		err = nil
	}
	if end := br.Close(); err == nil {
		err = end
	}
	if err != nil {
		return false, c.failed(ctx, tx, err)
	}
	return !taken, nil
}

// failed goes back to before the claim, where the server has refused it.
func (c *Claimer) failed(ctx context.Context, tx pgx.Tx, err error) error {
	if sqlState(err) != "" {
		ctx, cancel := context.WithTimeout(ctx, c.d.o.Timeout)
		defer cancel()
		if _, back := tx.Exec(ctx, pgkeys.Back); back != nil {
			err = errors.Join(err, back)
		}
	}
	if c.d.Classify(err) == dedupe.ClassRetry && sqlState(err) != pgkeys.LockTimeout {
		return fmt.Errorf("pgdedupe: %w; run the transaction again: %w", dedupe.ErrContention, err)
	}
	return c.d.claimError(ctx, err)
}

func (c *Claimer) settled(ctx context.Context, tx pgx.Tx, claim dedupe.Claim, prior dedupe.Record) (*dedupe.Result, error) {
	if prior.Fingerprint == claim.Fingerprint {
		return &dedupe.Result{Outcome: dedupe.Duplicate, Reply: prior.Reply}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, c.d.o.Timeout)
	defer cancel()
	if _, err := tx.Exec(ctx, c.d.sql.Conflict, c.d.conflictArgs(dedupe.NewConflictRecord(claim, prior))...); err != nil {
		return nil, fmt.Errorf("pgdedupe: record a conflict: %w", err)
	}
	return &dedupe.Result{Outcome: dedupe.Conflict}, nil
}

// SetReply stores the reply of a key that tx has claimed, to be replayed with
// every Duplicate. A nil reply is none. An error that matches ErrReplyTooLarge
// says that it is longer than Options.Tx.MaxReply allows, and tx is as it was.
func (c *Claimer) SetReply(ctx context.Context, tx pgx.Tx, k dedupe.Key, reply []byte) error {
	if err := dedupe.CheckReply(reply, c.maxReply); err != nil || reply == nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.d.o.Timeout)
	defer cancel()
	tag, err := tx.Exec(ctx, c.d.sql.Reply, uuid(k), reply)
	switch {
	case err != nil:
		return fmt.Errorf("pgdedupe: store the reply: %w", err)
	case tag.RowsAffected() == 0:
		return fmt.Errorf("pgdedupe: store the reply: %w: claim the key first", dedupe.ErrNotFound)
	}
	return nil
}
