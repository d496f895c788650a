package pgdedupe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/pgkeys"
)

// NewPipelinedStore returns the store in the database of pool, for handlers
// that only contribute statements: claim and statements go out together, as one
// transaction in one round trip, which is faster than the usual transaction
// without a claim. pool stays the caller's. o may be nil. It panics as
// [NewStore] does.
//
// The handler queues statements in the batch that it is lent, and reads
// nothing: the answers come after the commit, so a batch with a callback is
// dedupe.ErrScope. A condition that must hold is written in SQL, so that its
// statement fails where it does not. So is the result of a statement that
// another one needs.
//
// The key is claimed when the handler has returned. The handler therefore runs
// for a duplicate, too, whose statements are then not executed, and two copies
// may run at once, of which one takes effect. It must do nothing but queue.
//
// The transaction is an implicit one, at the database's default level, unless
// o.Isolation names another; then BEGIN and COMMIT go with the rest.
func NewPipelinedStore(pool *pgxpool.Pool, o *Options) dedupe.Store[*pgx.Batch] {
	if pool == nil {
		panic("pgdedupe: NewPipelinedStore: the pool is nil")
	}
	p := &pipeline{driver: newDriver(pool, o), explicit: o != nil && o.Isolation != ""}
	return dedupe.NewTxStore(p, &p.o.Tx)
}

// pipeline implements dedupe.TxDriver. The claim comes with the commit.
type pipeline struct {
	*driver
	explicit bool // with BEGIN and COMMIT
}

var _ dedupe.TxDriver[*pgx.Batch] = (*pipeline)(nil)

// Begin implements dedupe.TxDriver: it only lends a batch.
func (p *pipeline) Begin(context.Context, dedupe.Claim) (*pgx.Batch, *dedupe.Record, error) {
	return &pgx.Batch{}, nil, nil
}

// Probe claims as a store of transactions does, since Begin asks nobody.
func (p *pipeline) Probe(ctx context.Context) error {
	return dedupe.NewTxStore(p.driver, nil).(dedupe.Prober).Probe(ctx)
}

// Rollback implements dedupe.TxDriver: nothing was sent.
func (p *pipeline) Rollback(context.Context, *pgx.Batch) error { return nil }

// Commit implements dedupe.TxDriver: it claims, executes and commits at once.
// The same statements may go out again, if the record of the winner that they
// met has gone before it could be read.
func (p *pipeline) Commit(ctx context.Context, b *pgx.Batch, c dedupe.Claim, reply []byte) error {
	if err := contributes(b); err != nil {
		return err
	}
	conn, err := p.acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	for range maxVanished {
		taken, err := p.send(ctx, conn.Conn(), b, c, reply)
		if !taken {
			return err
		}
		prior, err := p.winner(ctx, conn.Conn(), c.Key)
		switch {
		case err != nil:
			return err
		case prior != nil:
			return &dedupe.Taken{Record: *prior}
		}
	}
	return errVanishing
}

// contributes reports what a handler has queued that a pipeline cannot honour.
func contributes(b *pgx.Batch) error {
	for i, q := range b.QueuedQueries {
		if word := endsTransaction(q.SQL); word != "" {
			return fmt.Errorf("pgdedupe: %w: statement %d of its batch is %q, but the transaction is not its own to begin or end", dedupe.ErrScope, i+1, word)
		}
		if q.Fn != nil {
			return fmt.Errorf("pgdedupe: %w: statement %d of its batch has a callback, but answers come after the commit; write the condition in SQL, or use NewStore", dedupe.ErrScope, i+1)
		}
	}
	return nil
}

// send is one round trip. It reports whether the key was taken, in which case
// nothing of the batch has happened.
//
// A failed statement makes the server skip all that follow, and undo what went
// before. What is behind the handler's statements is a guard against one that
// has ended the transaction after all, such as a procedure.
func (p *pipeline) send(ctx context.Context, conn *pgx.Conn, b *pgx.Batch, c dedupe.Claim, reply []byte) (taken bool, _ error) {
	ctx, cancel := context.WithTimeout(ctx, p.o.LockWait+p.o.Timeout)
	defer cancel()
	all, claim, guard := p.frame(b, c, reply)
	br := conn.SendBatch(ctx, all)
	var tag pgconn.CommandTag
	var err error
	n := 0
	for ; n < all.Len() && err == nil; n++ {
		tag, err = br.Exec()
	}
	if end := br.Close(); err == nil && end != nil { // such as a deferred constraint
		err, n = end, 0
	}
	switch {
	case err == nil && p.explicit && tag.String() != "COMMIT":
		return false, fmt.Errorf("pgdedupe: %w: the server answered the commit with %q", dedupe.ErrScope, tag)
	case err == nil:
		return false, nil
	}
	if p.explicit {
		p.abort(ctx, conn)
	}
	switch {
	case n == claim && isTaken(err):
		return true, nil
	case n == claim && sqlState(err) == pgkeys.LockTimeout, n == claim && sqlState(err) == pgkeys.QueryCanceled:
		return false, p.claimError(ctx, err)
	}
	return false, p.sendError(conn, err, n == guard)
}

// frame puts the handler's statements between the claim and the guard. It
// returns the numbers of both, from 1.
func (p *pipeline) frame(b *pgx.Batch, c dedupe.Claim, reply []byte) (all *pgx.Batch, claim, guard int) {
	all = &pgx.Batch{}
	if p.explicit {
		all.Queue("begin isolation level " + string(p.o.Isolation))
	}
	all.Queue(p.sql.ClaimOrFail, p.claimArgs(c)...)
	claim = all.Len()
	for _, q := range b.QueuedQueries {
		all.Queue(q.SQL, q.Arguments...) // anew, because sending changes them
	}
	if reply != nil {
		all.Queue(p.sql.Reply, uuid(c.Key), reply)
	}
	all.Queue(p.sql.GuardSame)
	guard = all.Len()
	if p.explicit {
		all.Queue("commit")
	}
	return all, claim, guard
}

// isTaken reports whether a claim has met another one's row.
func isTaken(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == pgkeys.UniqueViolation && pg.ConstraintName == pgkeys.KeyConstraint
}

// abort ends a transaction that has failed. If it cannot, the pool closes the
// connection, and the server undoes it.
func (p *pipeline) abort(ctx context.Context, conn *pgx.Conn) {
	if !conn.IsClosed() && conn.PgConn().TxStatus() != statusIdle {
		_, _ = conn.Exec(ctx, "rollback")
	}
}

// sendError judges an error that came instead of a commit. What fails while the
// statements are prepared or their arguments encoded has not executed anything:
// the batch is the handler's, unless the connection is to blame.
func (p *pipeline) sendError(conn *pgx.Conn, err error, byGuard bool) error {
	var pg *pgconn.PgError
	unsent := errors.As(err, new(pgx.ErrPreprocessingBatch)) || !conn.IsClosed() && !conn.PgConn().IsBusy()
	switch {
	case errors.As(err, &pg):
	case unsent && isLost(err):
		return fmt.Errorf("pgdedupe: %w: the batch cannot be sent: %w", dedupe.ErrUnavailable, err)
	case unsent:
		return fmt.Errorf("pgdedupe: the batch cannot be sent: %w", err)
	}
	unknown, err := commitError(err, byGuard)
	if unknown && !conn.IsClosed() {
		ctx, cancel := context.WithTimeout(context.Background(), discardTimeout)
		defer cancel()
		_ = conn.Close(ctx)
	}
	return fmt.Errorf("pgdedupe: %w", err)
}

// isLost reports whether an error is of a connection.
func isLost(err error) bool {
	return errors.As(err, new(net.Error)) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || isContextError(err)
}

// Explain implements dedupe.Explainer in place of the driver's: a handler that
// fails has sent nothing.
func (p *pipeline) Explain(*pgx.Batch) error { return nil }
