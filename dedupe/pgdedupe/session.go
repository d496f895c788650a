package pgdedupe

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/dedupe/internal/pgkeys"
)

// session is one transaction on one connection, with all the scopes that were
// handed out in it.
type session struct {
	conn *pgxpool.Conn
	pgx  *pgx.Conn // conn's; conn forgets it when it is given back
	xid  string    // of the transaction, as the server names it

	state atomic.Int32
	left  chan struct{} // closed when the last call has left, after end has asked

	mu      sync.Mutex
	cause   error // the latest statement's error after which the transaction was unusable
	misuse  error // the first attempt to end the transaction
	large   pgx.Tx
	settled bool // the connection is back in the pool, or gone
}

// The states of a session. A connection serves one call at a time: the call
// takes it from idle to busy and back. At the end it becomes over, so that a
// scope that outlives its handler does not reach the connection, which may be
// another transaction's by then. The race is this: a goroutine that the
// handler has left behind is in the middle of a call when the handler returns.
// end then takes the session from busy to leaving, and cuts the connection, so
// that the call fails; the call takes it from leaving to over when it leaves.
const (
	stateIdle int32 = iota
	stateBusy
	stateLeaving
	stateOver
)

var (
	errOver  = fmt.Errorf("pgdedupe: the transaction was used after its handler had returned: %w", pgx.ErrTxClosed)
	errBusy  = errors.New("pgdedupe: the transaction is in use by another goroutine")
	errInUse = errors.New("a goroutine of it was using the transaction when it returned, and the connection was cut")
)

// discardTimeout bounds the farewell to a connection.
const discardTimeout = time.Second

func newSession(conn *pgxpool.Conn) *session {
	return &session{conn: conn, pgx: conn.Conn(), left: make(chan struct{})}
}

// enter begins a call of a scope.
func (s *session) enter() error {
	if s.state.CompareAndSwap(stateIdle, stateBusy) {
		return nil
	}
	if s.state.Load() == stateBusy {
		return errBusy
	}
	return errOver
}

// leave ends a call of a scope, which ended with err.
func (s *session) leave(err error) {
	if err != nil {
		s.saw(err)
	}
	if !s.state.CompareAndSwap(stateBusy, stateIdle) {
		s.state.Store(stateOver)
		close(s.left)
	}
}

// end makes the session the driver's alone. After an error it is not, and its
// connection is gone; errOver means that it was ended before.
func (s *session) end(ctx context.Context) error {
	for !s.state.CompareAndSwap(stateIdle, stateOver) {
		if s.state.CompareAndSwap(stateBusy, stateLeaving) {
			return s.evict(ctx)
		}
		if state := s.state.Load(); state == stateOver || state == stateLeaving {
			return errOver
		}
	}
	return nil
}

// evict makes the call that is in the session fail, and waits until it leaves.
func (s *session) evict(ctx context.Context) error {
	_ = s.pgx.PgConn().Conn().Close() // the net.Conn: the only part that another goroutine may close
	select {
	case <-s.left:
		s.release()
	case <-ctx.Done():
		s.abandon()
	}
	return errInUse
}

// abandon leaves a connection to a call that does not return: touching it any
// more would be a race. The pool may open another one in its place.
func (s *session) abandon() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settled = true
	_ = s.conn.Hijack()
}

// release gives the connection back, once. The pool keeps it only if it is
// idle and outside a transaction.
func (s *session) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.settled {
		return
	}
	s.settled = true
	s.closeLarge()
	s.conn.Release()
}

// discard closes a connection that is not fit to be given back.
func (s *session) discard() {
	ctx, cancel := context.WithTimeout(context.Background(), discardTimeout)
	defer cancel()
	_ = s.pgx.Close(ctx)
}

// closeLarge makes the large objects of the transaction unusable. They hold
// pgx's own transaction, which does not know yet that it is over, and can only
// be told by a commit; one whose context is done sends nothing.
func (s *session) closeLarge() {
	if s.large == nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = s.large.Commit(ctx)
}

// saw notes an error after which the transaction is unusable. The state is the
// caller's, so no other call changes the status meanwhile.
func (s *session) saw(err error) {
	if s.usable() {
		return // the statement never got there, or a savepoint has caught it
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cause == nil || sqlState(err) != pgkeys.Aborted {
		s.cause = err
	}
}

func (s *session) usable() bool {
	pg := s.pgx.PgConn()
	return !pg.IsClosed() && pg.TxStatus() == statusOpen
}

// explain returns what has made the transaction unusable, or nil if it is
// usable, or in use.
func (s *session) explain() error {
	if state := s.state.Load(); state == stateBusy || state == stateLeaving || s.usable() {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cause
}

// refuse notes and returns a misuse.
func (s *session) refuse(what string) error {
	err := fmt.Errorf("it tried to end the transaction that it was lent: %s", what)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.misuse == nil {
		s.misuse = err
	}
	return fmt.Errorf("pgdedupe: the transaction ends when the handler returns: %s is refused", what)
}

func (s *session) misused() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.misuse
}
