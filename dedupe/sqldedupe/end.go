package sqldedupe

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/unecho/unecho/dedupe"
)

// commit stores what goes with the effect, and commits. refused says of an
// error in answer to the commit that there was no commit; after any other one
// nobody knows.
func commit(ctx context.Context, in dialect, s *scope, a dedupe.Advance, refused func(error) bool) error {
	if err := storeAdvance(ctx, in, s.tx, a); err != nil {
		return errors.Join(err, ignoreDone(s.tx.Rollback()))
	}
	err := s.tx.Commit()
	if err == nil || refused(err) {
		return err
	}
	s.discard()
	return fmt.Errorf("%w: %w", dedupe.ErrUnknownOutcome, err)
}

// rollback is for finish: the handler must not have ended the transaction.
func rollback(s *scope, ready func() bool) error {
	err := s.tx.Rollback()
	ready()
	if errors.Is(err, sql.ErrTxDone) {
		return fmt.Errorf("%w: it ended the transaction", dedupe.ErrScope)
	}
	return err
}

// rolledBack is the answer of a driver's Rollback to what finish has said.
func rolledBack(err error) error {
	if ignoreDone(err) == nil { // Commit was here
		return nil
	}
	return fmt.Errorf("sqldedupe: rollback: %w", err)
}

func ignoreDone(err error) error {
	if errors.Is(err, sql.ErrTxDone) {
		return nil
	}
	return err
}

// unfit tells a transaction that the handler has left in a state where nothing
// can be sent, such as with rows open, from a connection that is lost: there,
// the rollback fails too.
func unfit(err, rollback error) error {
	switch {
	case errors.Is(err, dedupe.ErrScope):
		return err
	case ignoreDone(rollback) != nil:
		return fmt.Errorf("%w: the connection was lost before the commit: %w", dedupe.ErrUnavailable, errors.Join(err, rollback))
	}
	return fmt.Errorf("%w: it left the transaction in use: %w", dedupe.ErrScope, err)
}
