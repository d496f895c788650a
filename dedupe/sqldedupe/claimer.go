package sqldedupe

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/unecho/unecho/dedupe"
)

// Claimer claims keys in transactions that the caller begins and ends. It is for
// programs whose transactions are made elsewhere; where they need not be,
// [NewStore] does more: it tells an unknown commit from a failed one, runs lost
// races again, and sees what a handler ignores. It is safe for concurrent use.
type Claimer struct {
	in       claimsIn
	maxReply int
}

// claimsIn is what a dialect does in a transaction that is not its own.
type claimsIn interface {
	// claimIn claims the key; or it returns the record of the winner, or
	// neither if there was one and is none any more. After an error that
	// matches ErrInProgress tx is as it was before.
	claimIn(ctx context.Context, tx *sql.Tx, c dedupe.Claim) (owned bool, prior *dedupe.Record, err error)
	conflictIn(ctx context.Context, on execer, r dedupe.ConflictRecord) error
	replyIn(ctx context.Context, tx *sql.Tx, k dedupe.Key, reply []byte) (sql.Result, error)
	// repliesIn is replyIn for several keys in one statement.
	repliesIn(ctx context.Context, tx *sql.Tx, replies []kept) error
	Classify(err error) dedupe.Class
}

// execer is a transaction or a database.
type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// NewClaimer returns a Claimer. o may be nil; its Isolation and its Tx are not
// used, but for Tx.MaxReply. It panics with [Options.Check]'s error.
func NewClaimer(d Dialect, o *Options) *Claimer {
	n := o.normal(d)
	return &Claimer{in: newDriver(base{o: n}, d), maxReply: n.Tx.MaxReply}
}

// Claim claims a key in tx, before anything else that the event brings about.
//
// A nil Result and a nil error mean that the key is new and tx's own: bring the
// effect about in tx, and commit. With a Result the event was done before, as
// its Outcome says: bring nothing about, commit (a conflict is recorded in tx),
// and acknowledge. On an error do not acknowledge:
//
//   - ErrInProgress: another transaction holds the key. tx is as it was before.
//   - ErrContention: tx has lost against another one. Roll back, and run all of
//     it again.
//   - ErrInvalidKey, ErrInvalidClaim: the claim cannot be stored, ever. tx is
//     as it was before.
//   - anything else, such as a lost connection: roll back.
//
// When the answer to the commit of tx is lost, nobody knows whether it
// happened; the redelivery's claim does. On SQLite, begin tx so that it takes
// the write lock at once (_txlock=immediate): one that has read before it writes
// may be refused.
func (c *Claimer) Claim(ctx context.Context, tx *sql.Tx, claim dedupe.Claim) (*dedupe.Result, error) {
	claim, err := claim.Normal()
	if err != nil {
		return nil, err
	}
	for range maxVanished {
		owned, prior, err := c.in.claimIn(ctx, tx, claim)
		switch {
		case err != nil:
			return nil, c.failed(err)
		case owned:
			return nil, nil
		case prior != nil:
			return c.settled(ctx, tx, claim, *prior)
		}
	}
	return nil, errVanishing
}

func (c *Claimer) failed(err error) error {
	if !errors.Is(err, dedupe.ErrInProgress) && c.in.Classify(err) == dedupe.ClassRetry {
		return fmt.Errorf("sqldedupe: %w; run the transaction again: %w", dedupe.ErrContention, err)
	}
	return err
}

func (c *Claimer) settled(ctx context.Context, tx *sql.Tx, claim dedupe.Claim, prior dedupe.Record) (*dedupe.Result, error) {
	if prior.Fingerprint == claim.Fingerprint {
		return &dedupe.Result{Outcome: dedupe.Duplicate, Reply: prior.Reply}, nil
	}
	if err := c.in.conflictIn(ctx, tx, dedupe.NewConflictRecord(claim, prior)); err != nil {
		return nil, c.failed(fmt.Errorf("sqldedupe: record a conflict: %w", err))
	}
	return &dedupe.Result{Outcome: dedupe.Conflict}, nil
}

// SetReply stores the reply of a key that tx has claimed, to be replayed with
// every Duplicate. A nil reply is none. An error that matches ErrReplyTooLarge
// says that it is longer than Options.Tx.MaxReply allows, and tx is as it was.
func (c *Claimer) SetReply(ctx context.Context, tx *sql.Tx, k dedupe.Key, reply []byte) error {
	if err := dedupe.CheckReply(reply, c.maxReply); err != nil || reply == nil {
		return err
	}
	res, err := c.in.replyIn(ctx, tx, k, reply)
	if err != nil {
		return fmt.Errorf("sqldedupe: store the reply: %w", err)
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		return fmt.Errorf("sqldedupe: store the reply: %w: claim the key first", errors.Join(dedupe.ErrNotFound, err))
	}
	return nil
}
