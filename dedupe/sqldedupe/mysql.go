package sqldedupe

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/internal/migrate"
)

// mysql implements dedupe.TxDriver and claimsIn on MySQL and MariaDB.
type mysql struct {
	base
	sql mysqlStatements
	// bound is how a claim bounds its wait for a lock: 0 is not known yet.
	bound atomic.Int32

	positions positionStatements
}

// How a claim bounds its wait. MariaDB takes a bound of microseconds along with
// a statement. MySQL has one of whole seconds, and it is the session's.
const (
	boundByStatement int32 = iota + 1
	boundBySession
)

// A statement that fails undoes itself on MySQL and not the transaction, but
// for a deadlock, which undoes all of it; what follows would be committed
// statement by statement. With autocommit off it begins a transaction, which
// the commit finds not to be the one of the claim.
const (
	mysqlPrelude  = `set @unecho_autocommit = @@autocommit, autocommit = 0`
	mysqlEpilogue = `set autocommit = @unecho_autocommit`
)

func newMySQL(b base) *mysql {
	b.prelude, b.epilogue = mysqlPrelude, mysqlEpilogue
	m := &mysql{base: b, sql: newMySQLStatements(mysqlSet(b.o.Schema)), positions: newMySQLPositions(mysqlSet(b.o.Schema))}
	m.bound.Store(b.o.bound)
	return m
}

type mysqlStatements struct {
	claim, winner, reply, conflict, prune string

	claimEach, each     string // before the rows, and each of them
	winners             string // before the keys
	replies, repliesFor string // before the pairs of key and reply, and between them and the keys
}

// mysqlNow is the database's clock in milliseconds, in no time zone.
const mysqlNow = `(timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000)`

func newMySQLStatements(s *migrate.Set) mysqlStatements {
	fill := strings.NewReplacer("{{key}}", s.Table("unecho_key"), "{{conflict}}", s.Table("unecho_conflict"), "{{now}}", mysqlNow).Replace
	const (
		// A plain insert, decided by its error. IGNORE would swallow others,
		// and what ON DUPLICATE KEY UPDATE answers depends on the client's flags.
		into   = "insert into {{key}} (`key`, fingerprint, done_at, expires_at, tenant, consumer, source, id, fields) values "
		each   = "(?, ?, {{now}}, {{now}} + ?, ?, ?, ?, ?, ?)"
		winner = "select `key`, fingerprint, fields, reply, done_at from {{key}} where `key` "
	)
	return mysqlStatements{
		claim:     fill(into + each),
		claimEach: fill(into), each: fill(each),
		// With a lock, because a view of the database that was taken before
		// the winner's commit does not show it.
		winner:  fill(winner + "= ? lock in share mode"),
		winners: fill(winner + "in ("),
		replies: fill("update {{key}} set reply = case `key`"), repliesFor: " end where `key` in (",
		reply: fill("update {{key}} set reply = ? where `key` = ?"),
		conflict: fill("insert into {{conflict}} (`key`, fingerprint, first_fingerprint, seen_at, reason, fields, tenant, consumer, source, id)\n" +
			"values (?, ?, ?, {{now}}, ?, ?, ?, ?, ?, ?) on duplicate key update reason = reason"),
		prune: fill("delete from {{key}} where expires_at <= {{now}} and not exists\n" +
			"	(select 1 from {{conflict}} c where c.`key` = {{key}}.`key`) order by expires_at limit ?"),
	}
}

// Begin implements dedupe.TxDriver.
func (m *mysql) Begin(ctx context.Context, c dedupe.Claim) (*scope, *dedupe.Record, error) {
	for range maxVanished {
		s, err := m.begin(ctx)
		if err != nil {
			return nil, nil, err
		}
		owned, prior, err := m.claimIn(ctx, s.tx, c)
		if owned && err == nil {
			if _, err = s.tx.ExecContext(ctx, mark); err == nil {
				return s, nil, nil
			}
			err = fmt.Errorf("sqldedupe: %w", err)
		}
		s.undo(ctx, m.o.Timeout)
		if prior != nil || err != nil {
			return nil, prior, err
		}
	}
	return nil, nil, errVanishing
}

// BeginBatch implements dedupe.BatchDriver. An insert of several rows is undone
// as a whole when one of its keys is there, so nobody has to guess which rows
// are ours: all or none. Then the transaction is given up, with whatever it has
// inserted before and the locks on what it has met; a transaction of its own
// reads who has done which keys; and the rest is claimed, first thing in a new
// transaction. Each round finds a winner more than the last one, so there are no
// more rounds than claims, and the bound of the wait is that of each: a round
// that finds a winner has waited for nobody who is still at work, however slow
// the server is.
func (m *mysql) BeginBatch(ctx context.Context, claims []dedupe.Claim) (*scope, []*dedupe.Record, error) {
	b := newBatch(claims)
	for vanished := 0; vanished < maxVanished; {
		rest := b.open()
		if len(rest) == 0 {
			return nil, b.priors(), nil
		}
		s, err := m.claimRows(ctx, rest, m.batchWait(len(rest)))
		if err == nil {
			return s, b.priors(), nil
		}
		if mysqlCode(err) != mysqlDuplicate {
			return nil, nil, err
		}
		if err := m.winners(ctx, b, rest); err != nil {
			return nil, nil, err
		}
		if len(b.open()) == len(rest) {
			vanished++
		}
	}
	return nil, nil, errVanishing
}

// claimRows opens a transaction that owns all rows. After an error, the
// database's own for a key that is there, none is open.
func (m *mysql) claimRows(ctx context.Context, rows []row, wait time.Duration) (*scope, error) {
	s, err := m.begin(ctx)
	if err != nil {
		return nil, err
	}
	bounded, cancel := context.WithTimeout(ctx, wait+time.Second+m.o.Timeout)
	defer cancel()
	for some := range chunks(rows, row.size) {
		if err = m.insert(bounded, s.tx, wait, m.sql.claimEach+list(m.sql.each, len(some)), m.allArgs(some)...); err != nil {
			break
		}
	}
	if err == nil {
		_, err = s.tx.ExecContext(ctx, mark)
	}
	if err != nil {
		s.undo(ctx, m.o.Timeout)
		return nil, m.claimError(ctx, err)
	}
	return s, nil
}

// winners reads who has done keys that some insert has met. It must not be in the
// transaction of an insert, whose own rows would pass for a winner's; nor at
// less than READ COMMITTED, where those of one that is still at work would; nor
// at more, where reading what is not there locks the gap.
func (m *mysql) winners(ctx context.Context, b *batch, rows []row) error {
	ctx, cancel := context.WithTimeout(ctx, m.o.Timeout)
	defer cancel()
	tx, err := m.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted, ReadOnly: true})
	if err != nil {
		return fmt.Errorf("sqldedupe: read the records of the keys: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // there is nothing in it
	for some := range chunks(rows, row.size) {
		found, err := collect(ctx, tx, scanMySQLWinner, m.sql.winners+list("?", len(some))+")", idArgs(some)...)
		if err != nil {
			return fmt.Errorf("sqldedupe: read the records of the keys: %w", err)
		}
		b.add(found)
	}
	return nil
}

func scanMySQLWinner(scan func(...any) error) (w winner, err error) {
	var fingerprint []byte
	var doneAt int64
	w.id, err = scanID(func(key ...any) error {
		return scan(key[0], &fingerprint, &w.record.Fields, &w.record.Reply, &doneAt)
	})
	copy(w.record.Fingerprint[:], fingerprint)
	w.record.DoneAt = time.UnixMilli(doneAt)
	return w, err
}

// claimIn implements claimsIn.
func (m *mysql) claimIn(ctx context.Context, tx *sql.Tx, c dedupe.Claim) (owned bool, prior *dedupe.Record, _ error) {
	bounded, cancel := context.WithTimeout(ctx, m.o.LockWait+time.Second+m.o.Timeout)
	defer cancel()
	r := row{c.Key.Stored(), c}
	err := m.insert(bounded, tx, m.o.LockWait, m.sql.claim, m.args(r)...)
	switch {
	case err == nil:
		return true, nil, nil
	case mysqlCode(err) == mysqlDuplicate:
		prior, err := m.winner(ctx, tx, r.id)
		return false, prior, err
	}
	return false, nil, m.claimError(ctx, err)
}

// claimError: a claim that was waiting for another holder says so. A caller's
// context that ended is not the other holder's doing.
func (m *mysql) claimError(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("sqldedupe: %w: %w", ctx.Err(), err)
	case waitedTooLong(mysqlCode(err)):
		return fmt.Errorf("sqldedupe: %w: waited %v: %w", dedupe.ErrInProgress, m.o.LockWait, err)
	}
	return fmt.Errorf("sqldedupe: %w", err)
}

// insert claims, with a bound of its own for the wait.
func (m *mysql) insert(ctx context.Context, tx *sql.Tx, wait time.Duration, statement string, args ...any) error {
	return m.bounded(ctx, tx, wait, statement, func(statement string) error {
		_, err := tx.ExecContext(ctx, statement, args...)
		return err
	})
}

// bounded has a statement done that waits for a lock only so long.
func (m *mysql) bounded(ctx context.Context, tx *sql.Tx, wait time.Duration, statement string, do func(statement string) error) error {
	by, err := m.boundBy(ctx, tx)
	if err != nil {
		return err
	}
	if by == boundByStatement {
		seconds := strconv.FormatFloat(max(wait, time.Millisecond).Seconds(), 'f', 6, 64)
		return do("set statement max_statement_time=" + seconds + " for " + statement)
	}
	whole := int64((wait + time.Second - 1) / time.Second)
	if _, err := tx.ExecContext(ctx, "set @unecho_wait = @@innodb_lock_wait_timeout, innodb_lock_wait_timeout = "+strconv.FormatInt(max(whole, 1), 10)); err != nil {
		return err
	}
	err = do(statement)
	if mysqlCode(err) == mysqlDeadlock {
		return err // the transaction is over, and the wait goes back with the next claim
	}
	if _, back := tx.ExecContext(ctx, "set innodb_lock_wait_timeout = @unecho_wait"); err == nil {
		err = back
	}
	return err
}

// boundBy asks, once, which of the two databases it is.
func (m *mysql) boundBy(ctx context.Context, tx *sql.Tx) (int32, error) {
	if by := m.bound.Load(); by != 0 {
		return by, nil
	}
	var version string
	if err := tx.QueryRowContext(ctx, "select version()").Scan(&version); err != nil {
		return 0, err
	}
	by := boundBySession
	if strings.Contains(version, "MariaDB") {
		by = boundByStatement
	}
	m.bound.Store(by)
	return by, nil
}

// winner reads who has done the key; nil if there is nobody any more.
func (m *mysql) winner(ctx context.Context, tx *sql.Tx, key dedupe.KeyID) (*dedupe.Record, error) {
	ctx, cancel := context.WithTimeout(ctx, m.o.Timeout)
	defer cancel()
	w, err := scanMySQLWinner(tx.QueryRowContext(ctx, m.sql.winner, key[:]).Scan)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("sqldedupe: read the record of the key: %w", err)
	}
	return &w.record, nil
}

// Commit implements dedupe.TxDriver.
func (m *mysql) Commit(ctx context.Context, s *scope, c dedupe.Claim, reply []byte) error {
	return m.CommitBatch(ctx, s, []dedupe.Claim{c}, [][]byte{reply})
}

// CommitBatch implements dedupe.BatchDriver.
func (m *mysql) CommitBatch(ctx context.Context, s *scope, claims []dedupe.Claim, replies [][]byte) error {
	return m.CommitAt(ctx, s, dedupe.Advance{Claims: claims, Replies: replies})
}

// CommitAt implements dedupe.PlaceDriver.
func (m *mysql) CommitAt(ctx context.Context, s *scope, a dedupe.Advance) error {
	err := s.finish(ctx, func(ready func() bool) error {
		if err := m.fit(ctx, s, ready); err != nil {
			return unfit(err, s.tx.Rollback())
		}
		return commit(ctx, m, s, a, func(err error) bool { return refused(mysqlCode(err)) })
	})
	if err != nil {
		return fmt.Errorf("sqldedupe: %w", err)
	}
	return nil
}

// fit says whether the transaction that came back from the handler is the one
// that the claim was made in.
func (m *mysql) fit(ctx context.Context, s *scope, ready func() bool) error {
	_, err := s.tx.ExecContext(ctx, clearMark)
	switch {
	case !ready():
		return errInUse
	case errors.Is(err, sql.ErrTxDone):
		return fmt.Errorf("%w: it ended the transaction", dedupe.ErrScope)
	case mysqlCode(err) == mysqlNoSavepoint:
		return fmt.Errorf("%w: it ended the transaction, by DDL perhaps, or ignored a deadlock: %w", dedupe.ErrScope, err)
	}
	return err
}

// Rollback implements dedupe.TxDriver.
func (m *mysql) Rollback(ctx context.Context, s *scope) error {
	return rolledBack(s.finish(ctx, func(ready func() bool) error { return rollback(s, ready) }))
}

// replyIn implements claimsIn.
func (m *mysql) replyIn(ctx context.Context, tx *sql.Tx, k dedupe.Key, reply []byte) (sql.Result, error) {
	key := k.Stored()
	return tx.ExecContext(ctx, m.sql.reply, reply, key[:])
}

// repliesIn implements claimsIn.
func (m *mysql) repliesIn(ctx context.Context, tx *sql.Tx, replies []kept) error {
	var pairs, keys []any
	for _, k := range replies {
		key := k.key.Stored()
		pairs, keys = append(pairs, key[:], k.reply), append(keys, key[:])
	}
	statement := m.sql.replies + strings.Repeat(" when ? then ?", len(replies)) + m.sql.repliesFor + list("?", len(keys)) + ")"
	_, err := tx.ExecContext(ctx, statement, append(pairs, keys...)...)
	return err
}

// Conflict implements dedupe.TxDriver.
func (m *mysql) Conflict(ctx context.Context, r dedupe.ConflictRecord) error {
	if err := m.conflictIn(ctx, m.db, r); err != nil {
		return fmt.Errorf("sqldedupe: %w", err)
	}
	return nil
}

// conflictIn implements claimsIn.
func (m *mysql) conflictIn(ctx context.Context, on execer, r dedupe.ConflictRecord) error {
	key := r.Key.Stored()
	args := []any{key[:], r.Fingerprint[:], r.First[:], string(r.Reason), m.names(r)}
	_, err := on.ExecContext(ctx, m.sql.conflict, append(args, m.readable(r.Key)...)...)
	return err
}

// Codes of the servers.
const (
	mysqlDuplicate   = 1062
	mysqlLockWait    = 1205
	mysqlDeadlock    = 1213
	mysqlNoSavepoint = 1305
)

// mysqlCode returns the number of the server's error in err, or 0. The error of
// go-sql-driver/mysql has it in a field and in the beginning of its text;
// reading the text spares everybody who uses another database that module.
func mysqlCode(err error) int {
	for ; err != nil; err = errors.Unwrap(err) {
		if several, ok := err.(interface{ Unwrap() []error }); ok { //nolint:errorlint // this walks the chain itself
			for _, e := range several.Unwrap() {
				if code := mysqlCode(e); code != 0 {
					return code
				}
			}
			return 0
		}
		if fmt.Sprintf("%T", err) != "*mysql.MySQLError" {
			continue
		}
		number, _, _ := strings.Cut(strings.TrimPrefix(err.Error(), "Error "), " ")
		code, _ := strconv.Atoi(strings.TrimSuffix(number, ":"))
		return code
	}
	return 0
}

// waitedTooLong: for a lock, or altogether on MariaDB; a statement that was
// killed for it may say so.
func waitedTooLong(code int) bool {
	return code == mysqlLockWait || code == 1969 || code == 3024 || code == 1317
}

// refused reports whether an error with this code, in answer to a commit, says
// that there was no commit.
func refused(code int) bool {
	switch code {
	case mysqlLockWait, mysqlDeadlock, 3101, 1290, 1792, 1836: // group replication, read-only
		return true
	}
	return false
}

// Classify implements dedupe.TxDriver.
func (m *mysql) Classify(err error) dedupe.Class {
	switch mysqlCode(err) {
	case 0:
	case mysqlLockWait, mysqlDeadlock, 1020, 3572: // a row has changed since it was read, or is locked
		return dedupe.ClassRetry
	case 1021, 1040, 1041, 1053, 1129, 1203, 1226, 1290, 1792, 1836, 1927: // full, too many, stopping, read-only, killed
		return dedupe.ClassUnavailable
	default:
		return dedupe.ClassOther
	}
	if isLostConn(err) {
		return dedupe.ClassUnavailable
	}
	return dedupe.ClassOther
}

// validateMySQL looks at what would undo what was acknowledged.
func validateMySQL(ctx context.Context, db *sql.DB, s *migrate.Set) error {
	var flush, engines int
	var readOnly, autocommit bool
	err := db.QueryRowContext(ctx, `select @@innodb_flush_log_at_trx_commit, @@read_only, @@autocommit,
	(select count(*) from information_schema.tables where table_schema = `+s.SchemaSQL()+` and table_name in ('unecho_key', 'unecho_conflict', 'unecho_position') and engine <> 'InnoDB')`).
		Scan(&flush, &readOnly, &autocommit, &engines)
	switch {
	case err != nil:
		return fmt.Errorf("sqldedupe: read the settings of the server: %w", err)
	case engines > 0:
		return errors.New("sqldedupe: the tables are not InnoDB, so key and effect would not be committed together; run: alter table unecho_key engine = InnoDB, and the same for unecho_conflict and unecho_position")
	case flush != 1:
		return fmt.Errorf("sqldedupe: innodb_flush_log_at_trx_commit is %d: a crash may undo what was acknowledged; set it to 1", flush)
	case !autocommit:
		return errors.New("sqldedupe: the connections have autocommit off, so what the store does outside a transaction would not be committed; take autocommit=0 out of the name of the data source")
	case readOnly:
		return errors.New("sqldedupe: the server is read-only, a replica perhaps; connect to the primary")
	}
	return nil
}
