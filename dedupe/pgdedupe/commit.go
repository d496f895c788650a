package pgdedupe

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/pgkeys"
	"github.com/unecho/unecho/internal/sqlstate"
)

// States of a transaction, as the server reports them.
const (
	statusIdle   = 'I'
	statusOpen   = 'T'
	statusFailed = 'E'
)

// Commit implements dedupe.TxDriver.
func (d *driver) Commit(ctx context.Context, t pgx.Tx, c dedupe.Claim, reply []byte) error {
	return d.end(ctx, t, func(b *pgx.Batch) {
		if reply != nil {
			b.Queue(d.sql.Reply, uuid(c.Key), reply)
		}
	})
}

// end commits what came back from the handler, with the replies that are queued
// by it.
func (d *driver) end(ctx context.Context, t pgx.Tx, replies func(*pgx.Batch)) error {
	s := t.(*tx).s
	if err := s.end(ctx); err != nil {
		return fmt.Errorf("pgdedupe: %w: %w", dedupe.ErrScope, err)
	}
	defer s.release()
	if err := d.fit(s); err != nil {
		_ = d.giveBack(ctx, s)
		return fmt.Errorf("pgdedupe: %w", err)
	}
	if err := d.commit(ctx, s, replies); err != nil {
		return fmt.Errorf("pgdedupe: %w", err)
	}
	return nil
}

// fit says whether the transaction that came back from the handler is one that
// can be committed, as far as this end knows.
func (d *driver) fit(s *session) error {
	pg := s.pgx.PgConn()
	cause := s.explain()
	switch {
	case s.misused() != nil:
		return fmt.Errorf("%w: %w", dedupe.ErrScope, s.misused())
	case d.Classify(cause) == dedupe.ClassUnavailable:
		return fmt.Errorf("%w: a statement of the handler, which ignored it: %w", dedupe.ErrUnavailable, cause)
	case pg.IsClosed() && isContextError(cause):
		return because(dedupe.ErrScope, "it ignored that a statement was cut off", cause)
	case pg.IsClosed():
		return because(dedupe.ErrUnavailable, "the connection was lost before the commit", cause)
	case pg.IsBusy():
		return fmt.Errorf("%w: it did not close its rows, batch or copy", dedupe.ErrScope)
	case pg.TxStatus() == statusFailed:
		return because(dedupe.ErrScope, "it ignored that a statement failed", cause)
	case pg.TxStatus() != statusOpen:
		return fmt.Errorf("%w: it ended the transaction", dedupe.ErrScope)
	}
	return nil
}

// because adds a cause that is not always known.
func because(class error, what string, cause error) error {
	if cause == nil {
		return fmt.Errorf("%w: %s", class, what)
	}
	return fmt.Errorf("%w: %s: %w", class, what, cause)
}

// commit sends, in one round trip, the guard, the replies and the commit. The
// guard is for a handler that has ended the transaction by the connection and
// begun another: the server then skips what follows.
func (d *driver) commit(ctx context.Context, s *session, replies func(*pgx.Batch)) error {
	b := &pgx.Batch{}
	b.Queue(d.sql.Guard, s.xid)
	replies(b)
	b.Queue("commit")
	br := s.pgx.SendBatch(ctx, b)
	var (
		tag pgconn.CommandTag
		err error
		n   int
	)
	for ; n < b.Len() && err == nil; n++ {
		tag, err = br.Exec()
	}
	end := br.Close()
	switch {
	case err != nil:
		unknown, err := commitError(err, n == 1)
		if unknown {
			s.discard()
		}
		return err
	case tag.String() == "COMMIT":
		return nil // whatever becomes of the connection after the server has said so
	case tag.String() == "ROLLBACK":
		return fmt.Errorf("%w: the server answered the commit with a rollback", dedupe.ErrScope)
	}
	s.discard()
	return fmt.Errorf("%w: the server answered the commit with %q: %w", dedupe.ErrUnknownOutcome, tag, end)
}

// commitError judges what came back instead of an answer. Only the server's own
// verdict on a statement says that nothing is committed; of anything else that
// comes after the commit was sent nobody knows, and what the library says about
// whether it is safe to try again is not to be relied upon.
func commitError(err error, byGuard bool) (unknown bool, _ error) {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || !sqlstate.Verdict(pg.Severity, pg.SeverityUnlocalized, pg.Code) {
		return true, fmt.Errorf("%w: %w", dedupe.ErrUnknownOutcome, err)
	}
	if pg.Code == pgkeys.Aborted || byGuard && pg.Code == pgkeys.GuardFailed {
		return false, fmt.Errorf("%w: it ended the transaction: %w", dedupe.ErrScope, err)
	}
	return false, err
}

// Rollback implements dedupe.TxDriver.
func (d *driver) Rollback(ctx context.Context, t pgx.Tx) error {
	s := t.(*tx).s
	if err := s.end(ctx); err != nil {
		if errors.Is(err, errOver) {
			return nil // Commit was here
		}
		return fmt.Errorf("pgdedupe: %w: %w", dedupe.ErrScope, err)
	}
	pg := s.pgx.PgConn()
	if !pg.IsClosed() && !pg.IsBusy() && pg.TxStatus() == statusIdle {
		s.release()
		return fmt.Errorf("pgdedupe: %w: it ended the transaction", dedupe.ErrScope)
	}
	return d.giveBack(ctx, s)
}

// giveBack rolls back and gives the connection back to the pool. Where that
// takes waiting for the rest of a result, the connection is closed instead,
// and the server rolls back.
func (d *driver) giveBack(ctx context.Context, s *session) error {
	defer s.release()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.o.Timeout)
	defer cancel()
	pg := s.pgx.PgConn()
	switch {
	case pg.IsClosed():
		return fmt.Errorf("pgdedupe: the connection was lost: %w", errors.Join(pgconn.ErrConnClosed, s.explain()))
	case pg.IsBusy():
		s.discard()
		return nil
	case pg.TxStatus() == statusIdle:
		return nil
	}
	if _, err := s.pgx.Exec(ctx, "rollback"); err != nil {
		s.discard()
		return fmt.Errorf("pgdedupe: rollback: %w", err)
	}
	return nil
}

func isContextError(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}
