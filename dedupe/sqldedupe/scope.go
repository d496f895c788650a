package sqldedupe

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/pgkeys"
)

// base is what the drivers of all dialects share.
type base struct {
	db *sql.DB
	o  Options
	// prelude and epilogue are statements before the transaction and after it;
	// "" if the dialect needs none.
	prelude, epilogue string
}

// scope is one transaction on one connection.
type scope struct {
	tx   *sql.Tx
	conn *sql.Conn
	// kill ends the context of tx, which database/sql answers with a
	// rollback, and with closing the connection if that does not work.
	kill context.CancelFunc
	xid  string // of the transaction, as PostgreSQL names it

	epilogue string

	finished atomic.Int32 // one of the stages
}

// begin opens a transaction. Its context is its own: database/sql would roll
// back as soon as the handler's ends, and the commit must be able to go on.
func (b *base) begin(ctx context.Context) (*scope, error) {
	conn, err := b.acquire(ctx)
	if err != nil {
		return nil, err
	}
	life, kill := context.WithCancel(context.WithoutCancel(ctx))
	s := &scope{conn: conn, kill: kill}
	release := s.killAfter(ctx, b.o.Timeout)
	if b.prelude != "" {
		_, err = conn.ExecContext(life, b.prelude)
		s.epilogue = b.epilogue
	}
	if err == nil {
		s.tx, err = conn.BeginTx(life, &sql.TxOptions{Isolation: b.o.Isolation})
	}
	if release(); err != nil {
		s.close()
		return nil, fmt.Errorf("sqldedupe: begin: %w", errors.Join(ctx.Err(), err))
	}
	return s, nil
}

// acquire waits a bounded time for a connection.
func (b *base) acquire(ctx context.Context) (*sql.Conn, error) {
	bounded, cancel := context.WithTimeout(ctx, b.o.Timeout)
	defer cancel()
	conn, err := b.db.Conn(bounded)
	switch {
	case err == nil:
		return conn, nil
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		stats := b.db.Stats()
		return nil, fmt.Errorf("sqldedupe: %w: no connection was free for %v, %d of %d are in use: %w",
			dedupe.ErrUnavailable, b.o.Timeout, stats.InUse, stats.MaxOpenConnections, err)
	}
	return nil, fmt.Errorf("sqldedupe: get a connection: %w", err)
}

// killAfter kills the transaction when ctx is done or d is over, until the
// function that it returns is called.
func (s *scope) killAfter(ctx context.Context, d time.Duration) (release func()) {
	ctx, cancel := context.WithTimeout(ctx, d)
	stop := context.AfterFunc(ctx, s.kill)
	return func() {
		stop()
		cancel()
	}
}

// close gives the connection back. The transaction must be over.
func (s *scope) close() {
	s.kill()
	if s.epilogue != "" {
		ctx, cancel := context.WithTimeout(context.Background(), epilogueTimeout)
		defer cancel()
		if _, err := s.conn.ExecContext(ctx, s.epilogue); err != nil {
			s.discard()
		}
	}
	_ = s.conn.Close()
}

// epilogueTimeout bounds the last statement before a connection goes back.
const epilogueTimeout = 5 * time.Second

// undo rolls back a transaction that no handler has seen.
func (s *scope) undo(ctx context.Context, d time.Duration) {
	release := s.killAfter(context.WithoutCancel(ctx), d)
	defer release()
	if err := s.tx.Rollback(); err != nil && !errors.Is(err, sql.ErrTxDone) && sqliteCode(err) != sqliteError {
		s.discard()
	}
	s.close()
}

// discard makes database/sql throw the connection away instead of using it
// again.
func (s *scope) discard() {
	_ = s.conn.Raw(func(any) error { return driver.ErrBadConn })
}

// The stages of the end of a transaction: see finish.
const (
	stageOpen int32 = iota
	stageEnding
	stageAbandoned
	stageOver
)

var errInUse = fmt.Errorf("%w: a goroutine of it was using the transaction when it returned, and still is", dedupe.ErrScope)

// finish ends the transaction by end, which is called once. database/sql makes
// every call on a transaction wait for the one before it, without a bound: when
// the handler has left a goroutine behind in the middle of a statement, the
// commit waits for that statement. So end runs in a goroutine, and calls ready
// when it has got through to the connection. If ctx is done before that, ready
// answers false, end rolls back instead, whenever that will be, and finish
// reports errInUse, knowing that nothing is committed. If ctx is done after
// that, the transaction is killed, which ends the call to the driver.
func (s *scope) finish(ctx context.Context, end func(ready func() bool) error) error {
	if !s.finished.CompareAndSwap(stageOpen, stageEnding) {
		return sql.ErrTxDone
	}
	ended := make(chan error, 1)
	go func() {
		err := end(func() bool { return s.finished.CompareAndSwap(stageEnding, stageOver) })
		s.close()
		ended <- err
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	s.kill()
	if s.finished.CompareAndSwap(stageEnding, stageAbandoned) {
		return errInUse
	}
	return <-ended
}

// sqlState returns the code of PostgreSQL's error in err, or "".
func sqlState(err error) string {
	var coded interface{ SQLState() string }
	if errors.As(err, &coded) {
		return coded.SQLState()
	}
	return ""
}

// readable is the key for people.
func (b *base) readable(k dedupe.Key) []any {
	if b.o.Anonymous {
		return []any{nil, nil, nil, nil}
	}
	return []any{k.Tenant, k.Consumer, k.Source, k.ID}
}

// fields are kept where the readable parts are: they are names that people use.
func (b *base) fields(c dedupe.Claim) []byte {
	if b.o.Anonymous {
		return nil
	}
	return c.Fields
}

// names are those of the fields of a conflict.
func (b *base) names(r dedupe.ConflictRecord) any {
	if b.o.Anonymous {
		return nil
	}
	return pgkeys.Fields(r.Fields)
}

// isLostConn reports what database/sql says of a connection that is gone.
func isLostConn(err error) bool {
	return errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone) || isInvalidConn(err)
}

// isInvalidConn reports what go-sql-driver/mysql says of one: an error value
// that only its text tells from others.
func isInvalidConn(err error) bool {
	for ; err != nil; err = errors.Unwrap(err) {
		if several, ok := err.(interface{ Unwrap() []error }); ok { //nolint:errorlint // this walks the chain itself
			return slices.ContainsFunc(several.Unwrap(), isInvalidConn)
		}
		if err.Error() == "invalid connection" {
			return true
		}
	}
	return false
}
