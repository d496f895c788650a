package sqldedupe

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/internal/migrate"
)

// sqlite implements dedupe.TxDriver. SQLite has one writer at a time: a claim
// holds the whole database until its transaction ends, whatever its key.
type sqlite struct {
	base
	sql sqliteStatements
	// writer is held by the transaction of this store that writes. Without it
	// the others would poll for the lock; against other processes they do.
	writer chan struct{}
}

func newSQLite(b base) *sqlite {
	return &sqlite{b, newSQLiteStatements(sqliteSet(b.o.Schema)), make(chan struct{}, 1)}
}

type sqliteStatements struct {
	claim, winner, reply, conflict, prune string
}

// mark is a savepoint that lives as long as the transaction of the claim. The
// commit releases it first, which fails if the handler has ended that
// transaction, even if it has begun another one.
const (
	mark      = `savepoint unecho_claim`
	clearMark = `release savepoint unecho_claim`
)

func newSQLiteStatements(s *migrate.Set) sqliteStatements {
	fill := strings.NewReplacer("{{key}}", s.Table("unecho_key"), "{{conflict}}", s.Table("unecho_conflict"),
		"{{now}}", "cast(unixepoch('subsec') * 1000 as integer)").Replace
	return sqliteStatements{
		// The row that it returns means that the key is ours: there is nobody
		// else in the middle of a write.
		claim: fill(`insert into {{key}} (key, fingerprint, done_at, expires_at, tenant, consumer, source, id, fields)
values (?1, ?2, {{now}}, {{now}} + ?3, ?4, ?5, ?6, ?7, ?8)
on conflict (key) do nothing
returning 1`),
		winner: fill(`select fingerprint, fields, reply, reply is not null, done_at from {{key}} where key = ?1`),
		reply:  fill(`update {{key}} set reply = ?2 where key = ?1`),
		conflict: fill(`insert into {{conflict}} (key, fingerprint, first_fingerprint, seen_at, reason, fields, tenant, consumer, source, id)
values (?1, ?2, ?3, {{now}}, ?4, ?5, ?6, ?7, ?8, ?9) on conflict do nothing`),
		prune: fill(`delete from {{key}} where rowid in
	(select rowid from {{key}} k where expires_at <= {{now}} and not exists (select 1 from {{conflict}} c where c.key = k.key) limit ?1)`),
	}
}

// milliseconds is d in the unit of the statements, rounded up.
func milliseconds(d time.Duration) int64 {
	ms := d.Milliseconds()
	if d%time.Millisecond > 0 {
		ms++
	}
	return ms
}

// Begin implements dedupe.TxDriver.
func (l *sqlite) Begin(ctx context.Context, c dedupe.Claim) (*scope, *dedupe.Record, error) {
	wait, cancel := context.WithTimeout(ctx, l.o.LockWait)
	defer cancel()
	select {
	case l.writer <- struct{}{}:
	case <-wait.Done():
		return nil, nil, l.waited(ctx, wait.Err())
	}
	s, prior, err := l.poll(ctx, wait, c)
	if s == nil {
		<-l.writer
	}
	return s, prior, err
}

// waited is the error of a wait for another writer.
func (l *sqlite) waited(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("sqldedupe: wait for another writer: %w: %w", ctx.Err(), err)
	}
	return fmt.Errorf("sqldedupe: %w: waited %v for another writer: %w", dedupe.ErrInProgress, l.o.LockWait, err)
}

// poll claims the key as soon as no other process writes, until wait is done.
// Each try is a transaction of its own: one that was refused the lock may have
// taken a snapshot, and would be refused for that from then on.
func (l *sqlite) poll(ctx, wait context.Context, c dedupe.Claim) (*scope, *dedupe.Record, error) {
	for {
		s, prior, err := l.try(ctx, wait, c)
		if err == nil {
			return s, prior, nil
		}
		switch {
		case errors.Is(err, dedupe.ErrUnavailable):
			return nil, nil, err
		case !isBusy(err) && wait.Err() == nil:
			return nil, nil, fmt.Errorf("sqldedupe: %w", err)
		case !pause(wait):
			return nil, nil, l.waited(ctx, err)
		}
	}
}

// pause waits a moment for another writer. It reports whether ctx is not done.
func pause(ctx context.Context) bool {
	t := time.NewTimer(time.Millisecond + rand.N(9*time.Millisecond))
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// try is one transaction: it is open, and ours, if there is a scope.
func (l *sqlite) try(ctx, wait context.Context, c dedupe.Claim) (*scope, *dedupe.Record, error) {
	s, err := l.begin(ctx)
	if err != nil {
		return nil, nil, err
	}
	owned, prior, err := l.claimIn(wait, s.tx, c)
	if owned && err == nil {
		_, err = s.tx.ExecContext(ctx, mark)
	}
	if owned && err == nil {
		return s, nil, nil
	}
	s.undo(ctx, l.o.Timeout)
	return nil, prior, err
}

// claimIn implements claimsIn. It takes the write lock with its first statement,
// and with it a view of the database that nobody changes.
func (l *sqlite) claimIn(ctx context.Context, tx *sql.Tx, c dedupe.Claim) (owned bool, prior *dedupe.Record, err error) {
	key := c.Key.Stored()
	args := []any{key[:], c.Fingerprint[:], milliseconds(c.Retain)}
	err = tx.QueryRowContext(ctx, l.sql.claim, append(append(args, l.readable(c.Key)...), l.fields(c))...).Scan(new(int))
	switch {
	case err == nil:
		return true, nil, nil
	case !errors.Is(err, sql.ErrNoRows):
		return false, nil, err
	}
	var (
		r           dedupe.Record
		fingerprint []byte
		replied     bool
		doneAt      int64
	)
	if err := tx.QueryRowContext(ctx, l.sql.winner, key[:]).Scan(&fingerprint, &r.Fields, &r.Reply, &replied, &doneAt); err != nil {
		return false, nil, fmt.Errorf("read the record of the key: %w", err)
	}
	copy(r.Fingerprint[:], fingerprint)
	r.DoneAt = time.UnixMilli(doneAt)
	if replied && r.Reply == nil {
		r.Reply = []byte{} // the driver has one value for an empty blob and none
	}
	return false, &r, nil
}

// Commit implements dedupe.TxDriver.
func (l *sqlite) Commit(ctx context.Context, s *scope, c dedupe.Claim, reply []byte) error {
	err := s.finish(ctx, func(ready func() bool) error {
		defer func() { <-l.writer }()
		err := l.fit(ctx, s, ready)
		if err == nil {
			return commit(ctx, l, s, c, reply, keptOut)
		}
		_ = s.tx.Rollback()
		return err
	})
	if err != nil {
		return fmt.Errorf("sqldedupe: %w", err)
	}
	return nil
}

func (l *sqlite) fit(ctx context.Context, s *scope, ready func() bool) error {
	_, err := s.tx.ExecContext(ctx, clearMark)
	switch {
	case !ready():
		return errInUse
	case errors.Is(err, sql.ErrTxDone):
		return fmt.Errorf("%w: it ended the transaction", dedupe.ErrScope)
	case sqliteCode(err) == sqliteError:
		return fmt.Errorf("%w: it ended the transaction, or ignored an error that did: %w", dedupe.ErrScope, err)
	}
	return err
}

// Rollback implements dedupe.TxDriver. SQLite ends a transaction by itself at
// some errors, so there may be none to roll back any more.
func (l *sqlite) Rollback(ctx context.Context, s *scope) error {
	err := s.finish(ctx, func(ready func() bool) error {
		defer func() { <-l.writer }()
		err := rollback(s, ready)
		if sqliteCode(err) == sqliteError {
			return nil
		}
		return err
	})
	return rolledBack(err)
}

// replyIn implements claimsIn.
func (l *sqlite) replyIn(ctx context.Context, tx *sql.Tx, k dedupe.Key, reply []byte) (sql.Result, error) {
	key := k.Stored()
	return tx.ExecContext(ctx, l.sql.reply, key[:], reply)
}

// conflictIn implements claimsIn.
func (l *sqlite) conflictIn(ctx context.Context, on execer, r dedupe.ConflictRecord) error {
	key := r.Key.Stored()
	args := []any{key[:], r.Fingerprint[:], r.First[:], string(r.Reason), l.names(r)}
	_, err := on.ExecContext(ctx, l.sql.conflict, append(args, l.readable(r.Key)...)...)
	return err
}

// Conflict implements dedupe.TxDriver.
func (l *sqlite) Conflict(ctx context.Context, r dedupe.ConflictRecord) error {
	for {
		err := l.conflictIn(ctx, l.db, r)
		switch {
		case err == nil:
			return nil
		case !isBusy(err) || !pause(ctx):
			return fmt.Errorf("sqldedupe: %w", err)
		}
	}
}

// Primary result codes.
const (
	sqliteError      = 1
	sqliteBusy       = 5
	sqliteLocked     = 6
	sqliteConstraint = 19
)

// sqliteCode returns the primary code of SQLite's error in err, or 0.
func sqliteCode(err error) int {
	var coded interface{ Code() int }
	if errors.As(err, &coded) {
		return coded.Code() & 0xff
	}
	return 0
}

// keptOut reports whether an error in answer to a commit says that there was
// none, and that the driver has rolled back: a reader was in the way, or a
// deferred foreign key.
func keptOut(err error) bool { return isBusy(err) || sqliteCode(err) == sqliteConstraint }

func isBusy(err error) bool {
	code := sqliteCode(err)
	return code == sqliteBusy || code == sqliteLocked
}

// minSQLite has unixepoch('subsec').
const minSQLite = 3_042_000

// validateSQLite looks at the connection's settings.
func validateSQLite(ctx context.Context, db *sql.DB) error {
	var (
		version           int
		file, journal     string
		synchronous, full = 0, 2
	)
	err := db.QueryRowContext(ctx, `select
		(select substr(v, 1, 1) * 1000000 + substr(v, 3, instr(substr(v, 3), '.') - 1) * 1000 from (select sqlite_version() as v)),
		(select file from pragma_database_list where name = 'main'),
		(select journal_mode from pragma_journal_mode),
		(select synchronous from pragma_synchronous)`).Scan(&version, &file, &journal, &synchronous)
	switch {
	case err != nil:
		return fmt.Errorf("sqldedupe: read the settings of SQLite: %w", err)
	case version < minSQLite:
		return fmt.Errorf("sqldedupe: SQLite 3.42 or newer is needed")
	case file == "":
		return nil // in memory: it outlives nothing
	case journal == "off" || journal == "memory":
		return fmt.Errorf("sqldedupe: journal_mode is %s: a crash may leave the effect without its key; use WAL, with _pragma=journal_mode(WAL) in the name of the data source", journal)
	case synchronous < full:
		return fmt.Errorf("sqldedupe: synchronous is %d: a power failure may undo what was acknowledged; use FULL, with _pragma=synchronous(FULL) in the name of the data source", synchronous)
	}
	return nil
}

// Classify implements dedupe.TxDriver.
func (l *sqlite) Classify(err error) dedupe.Class {
	switch sqliteCode(err) {
	case sqliteBusy, sqliteLocked:
		return dedupe.ClassRetry
	case 7, 8, 10, 11, 13, 14, 26: // no memory, read-only, I/O, corrupt, full, cannot open, not a database
		return dedupe.ClassUnavailable
	}
	if isLostConn(err) {
		return dedupe.ClassUnavailable
	}
	return dedupe.ClassOther
}
