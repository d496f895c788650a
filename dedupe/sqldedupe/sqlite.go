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

	positions positionStatements
	// writer is held by the transaction of this store that writes. Without it
	// the others would poll for the lock; against other processes they do.
	writer chan struct{}
}

func newSQLite(b base) *sqlite {
	set := sqliteSet(b.o.Schema)
	return &sqlite{b, newSQLiteStatements(set), newSQLitePositions(set), make(chan struct{}, 1)}
}

type sqliteStatements struct {
	claim, winner, reply, conflict, prune string

	claimEach, each, claimed string // before the rows, each of them, and after
	winners                  string // before the keys
	replies, repliesTo       string // around the pairs of key and reply
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
	const (
		into    = "insert into {{key}} (key, fingerprint, done_at, expires_at, tenant, consumer, source, id, fields) values "
		each    = "(?, ?, {{now}}, {{now}} + ?, ?, ?, ?, ?, ?)"
		claimed = " on conflict (key) do nothing returning key"
		winner  = "select key, fingerprint, fields, reply, reply is not null, done_at from {{key}} where key "
	)
	return sqliteStatements{
		// The row that it returns means that the key is ours: there is nobody
		// else in the middle of a write.
		claim:     fill(into + each + claimed),
		claimEach: fill(into), each: fill(each), claimed: claimed,
		winner:  fill(winner + "= ?"),
		winners: fill(winner + "in ("),
		replies: fill("update {{key}} set reply = r.column2 from (values "), repliesTo: ") as r where key = r.column1",
		reply: fill(`update {{key}} set reply = ?2 where key = ?1`),
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
func (l *sqlite) Begin(ctx context.Context, c dedupe.Claim) (s *scope, prior *dedupe.Record, err error) {
	s, err = l.write(ctx, l.o.LockWait, func(ctx context.Context, tx *sql.Tx) (owned bool, err error) {
		owned, prior, err = l.claimIn(ctx, tx, c)
		return owned, err
	})
	return s, prior, err
}

// BeginBatch implements dedupe.BatchDriver.
func (l *sqlite) BeginBatch(ctx context.Context, claims []dedupe.Claim) (*scope, []*dedupe.Record, error) {
	var b *batch
	s, err := l.write(ctx, l.batchWait(len(claims)), func(ctx context.Context, tx *sql.Tx) (bool, error) {
		b = newBatch(claims) // a try that failed may have seen what is no more
		return l.claimBatch(ctx, tx, b)
	})
	if err != nil {
		return nil, nil, err
	}
	return s, b.priors(), nil
}

// claims is what is done first in a transaction. If it owns nothing then, or
// there is an error, the transaction is undone.
type claims = func(ctx context.Context, tx *sql.Tx) (owned bool, err error)

// write claims as the only writer, for which it waits at most so long. There is
// a scope if anything is owned.
func (l *sqlite) write(ctx context.Context, most time.Duration, do claims) (*scope, error) {
	wait, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	select {
	case l.writer <- struct{}{}:
	case <-wait.Done():
		return nil, l.waited(ctx, wait.Err())
	}
	s, err := l.poll(ctx, wait, do)
	if s == nil {
		<-l.writer
	}
	return s, err
}

// waited is the error of a wait for another writer.
func (l *sqlite) waited(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("sqldedupe: wait for another writer: %w: %w", ctx.Err(), err)
	}
	return fmt.Errorf("sqldedupe: %w: waited %v for another writer: %w", dedupe.ErrInProgress, l.o.LockWait, err)
}

// poll claims as soon as no other process writes, until wait is done. Each try
// is a transaction of its own: one that was refused the lock may have taken a
// snapshot, and would be refused for that from then on.
func (l *sqlite) poll(ctx, wait context.Context, do claims) (*scope, error) {
	for {
		s, err := l.try(ctx, wait, do)
		if err == nil {
			return s, nil
		}
		switch {
		case errors.Is(err, dedupe.ErrUnavailable):
			return nil, err
		case !isBusy(err) && wait.Err() == nil:
			return nil, fmt.Errorf("sqldedupe: %w", err)
		case !pause(wait):
			return nil, l.waited(ctx, err)
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
func (l *sqlite) try(ctx, wait context.Context, do claims) (*scope, error) {
	s, err := l.begin(ctx)
	if err != nil {
		return nil, err
	}
	owned, err := do(wait, s.tx)
	if owned && err == nil {
		_, err = s.tx.ExecContext(ctx, mark)
	}
	if owned && err == nil {
		return s, nil
	}
	s.undo(ctx, l.o.Timeout)
	return nil, err
}

// claimBatch claims what is new and reads the winners of the rest, which nobody
// changes meanwhile.
func (l *sqlite) claimBatch(ctx context.Context, tx *sql.Tx, b *batch) (owned bool, err error) {
	ours := make(map[dedupe.KeyID]bool)
	for some := range chunks(b.rows, row.size) {
		claimed, err := collect(ctx, tx, scanID, l.sql.claimEach+list(l.sql.each, len(some))+l.sql.claimed, l.allArgs(some)...)
		if err != nil {
			return false, err
		}
		for _, id := range claimed {
			ours[id] = true
		}
	}
	for some := range chunks(b.without(func(id dedupe.KeyID) bool { return ours[id] }), row.size) {
		found, err := collect(ctx, tx, scanSQLiteWinner, l.sql.winners+list("?", len(some))+")", idArgs(some)...)
		if err != nil {
			return false, fmt.Errorf("read the records of the keys: %w", err)
		}
		b.add(found)
	}
	if len(ours)+len(b.done) != len(b.rows) {
		return false, errors.New("the table has neither taken a key nor has it")
	}
	return len(ours) > 0, nil
}

func scanID(scan func(...any) error) (dedupe.KeyID, error) {
	var key []byte
	err := scan(&key)
	if err == nil && len(key) != len(dedupe.KeyID{}) {
		err = fmt.Errorf("a key has %d bytes", len(key))
	}
	if err != nil {
		return dedupe.KeyID{}, err
	}
	return dedupe.KeyID(key), nil
}

func scanSQLiteWinner(scan func(...any) error) (w winner, err error) {
	var (
		fingerprint []byte
		replied     bool
		doneAt      int64
	)
	w.id, err = scanID(func(key ...any) error {
		return scan(key[0], &fingerprint, &w.record.Fields, &w.record.Reply, &replied, &doneAt)
	})
	copy(w.record.Fingerprint[:], fingerprint)
	w.record.DoneAt = time.UnixMilli(doneAt)
	if replied && w.record.Reply == nil {
		w.record.Reply = []byte{} // the driver has one value for an empty blob and none
	}
	return w, err
}

// claimIn implements claimsIn. It takes the write lock with its first statement,
// and with it a view of the database that nobody changes.
func (l *sqlite) claimIn(ctx context.Context, tx *sql.Tx, c dedupe.Claim) (owned bool, prior *dedupe.Record, err error) {
	r := row{c.Key.Stored(), c}
	err = tx.QueryRowContext(ctx, l.sql.claim, l.args(r)...).Scan(new([]byte))
	switch {
	case err == nil:
		return true, nil, nil
	case !errors.Is(err, sql.ErrNoRows):
		return false, nil, err
	}
	w, err := scanSQLiteWinner(tx.QueryRowContext(ctx, l.sql.winner, r.id[:]).Scan)
	if err != nil {
		return false, nil, fmt.Errorf("read the record of the key: %w", err)
	}
	return false, &w.record, nil
}

// Commit implements dedupe.TxDriver.
func (l *sqlite) Commit(ctx context.Context, s *scope, c dedupe.Claim, reply []byte) error {
	return l.CommitBatch(ctx, s, []dedupe.Claim{c}, [][]byte{reply})
}

// CommitBatch implements dedupe.BatchDriver.
func (l *sqlite) CommitBatch(ctx context.Context, s *scope, claims []dedupe.Claim, replies [][]byte) error {
	return l.CommitAt(ctx, s, dedupe.Advance{Claims: claims, Replies: replies})
}

// CommitAt implements dedupe.PlaceDriver.
func (l *sqlite) CommitAt(ctx context.Context, s *scope, a dedupe.Advance) error {
	err := s.finish(ctx, func(ready func() bool) error {
		defer func() { <-l.writer }()
		err := l.fit(ctx, s, ready)
		if err == nil {
			return commit(ctx, l, s, a, keptOut)
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

// repliesIn implements claimsIn.
func (l *sqlite) repliesIn(ctx context.Context, tx *sql.Tx, replies []kept) error {
	var args []any
	for _, k := range replies {
		key := k.key.Stored()
		args = append(args, key[:], k.reply)
	}
	_, err := tx.ExecContext(ctx, l.sql.replies+list("(?, ?)", len(replies))+l.sql.repliesTo, args...)
	return err
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
