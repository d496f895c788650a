package sqldedupe

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/pgkeys"
	"github.com/unecho/unecho/internal/migrate"
)

// NewAdmin returns a view for people of the keys in db, which stays the
// caller's; on PostgreSQL, of the leases of package pgdedupe as well. It
// is a [dedupe.PositionAdmin], too. o may be nil. It panics if db is nil, or with [Options.Check]'s error.
func NewAdmin(db *sql.DB, d Dialect, o *Options) dedupe.Admin {
	if db == nil {
		panic("sqldedupe: NewAdmin: the database is nil")
	}
	n := o.normal(d)
	a := &admin{db: db, o: n, dialect: d, timeout: n.Timeout}
	switch d {
	case MySQL:
		a.look, a.positions = newMySQLLook(n.set(d)), newMySQLPositions(n.set(d))
	case SQLite:
		a.look, a.positions = newSQLiteLook(n.set(d)), newSQLitePositions(n.set(d))
	default:
		a.look = postgresLook{pgkeys.NewAdmin(n.set(d))}
		p := pgkeys.NewPosition(n.set(d))
		a.positions = positionStatements{list: p.List, reset: p.Reset}
	}
	return a
}

type admin struct {
	db      *sql.DB
	o       Options
	dialect Dialect
	timeout time.Duration
	look    look

	positions positionStatements // of which list and reset are used
}

// look is how a dialect is asked.
type look interface {
	// id is an id as the dialect takes it for an argument.
	id(dedupe.KeyID) any
	// find, conflicts and settle are statements with an id as their argument.
	find() string
	conflicts() string
	settle() string
	// list is a statement with an id after which to begin and a limit.
	list(f dedupe.Filter) (statement string, after dedupe.KeyID, err error)
	// release frees an unknown or parked lease; "" if there are none.
	release() string
	// evict are the steps of one transaction that leave nothing of a key.
	evict() []pgkeys.Step
	counts() string
	scanEntry(scan func(...any) error) (dedupe.Entry, error)
	scanConflict(scan func(...any) error) (dedupe.ConflictRecord, error)
}

func (a *admin) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, a.timeout)
}

// Find implements dedupe.Admin.
func (a *admin) Find(ctx context.Context, id dedupe.KeyID) (dedupe.Entry, error) {
	entries, err := query(ctx, a, a.look.scanEntry, a.look.find(), a.look.id(id))
	switch {
	case err != nil:
		return dedupe.Entry{}, fmt.Errorf("sqldedupe: find: %w", err)
	case len(entries) == 0:
		return dedupe.Entry{}, fmt.Errorf("sqldedupe: %w: %v", dedupe.ErrNotFound, id)
	}
	return entries[0], nil
}

// List implements dedupe.Admin.
func (a *admin) List(ctx context.Context, f dedupe.Filter) (page dedupe.Page, err error) {
	statement, after, err := a.look.list(f)
	if err == nil && statement != "" {
		page.Entries, err = query(ctx, a, a.look.scanEntry, statement, a.look.id(after), f.PageSize())
	}
	if err != nil {
		return dedupe.Page{}, fmt.Errorf("sqldedupe: list: %w", err)
	}
	if n := len(page.Entries); n >= f.PageSize() {
		page.Next = page.Entries[n-1].ID.String()
	}
	return page, nil
}

// Conflicts implements dedupe.Admin.
func (a *admin) Conflicts(ctx context.Context, id dedupe.KeyID) ([]dedupe.ConflictRecord, error) {
	found, err := query(ctx, a, a.look.scanConflict, a.look.conflicts(), a.look.id(id))
	if err != nil {
		return nil, fmt.Errorf("sqldedupe: conflicts: %w", err)
	}
	return found, nil
}

// query reads all rows of a statement.
func query[T any](ctx context.Context, a *admin, scan func(func(...any) error) (T, error), statement string, args ...any) ([]T, error) {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	return collect(ctx, a.db, scan, statement, args...)
}

// Release implements dedupe.Admin.
func (a *admin) Release(ctx context.Context, id dedupe.KeyID) error {
	if statement := a.look.release(); statement != "" {
		n, err := a.change(ctx, id, only(statement))
		if err != nil {
			return fmt.Errorf("sqldedupe: release: %w", err)
		}
		if n > 0 {
			return nil
		}
	}
	e, err := a.Find(ctx, id)
	if err != nil {
		return err
	}
	return fmt.Errorf("sqldedupe: release: %w: it is %v, only one that is unknown or parked can be released", dedupe.ErrWrongState, e.State)
}

// Evict implements dedupe.Admin.
func (a *admin) Evict(ctx context.Context, id dedupe.KeyID) error {
	switch n, err := a.change(ctx, id, a.look.evict()); {
	case err != nil:
		return fmt.Errorf("sqldedupe: evict: %w", err)
	case n == 0:
		return fmt.Errorf("sqldedupe: %w: %v", dedupe.ErrNotFound, id)
	}
	return nil
}

// Settle implements dedupe.Admin.
func (a *admin) Settle(ctx context.Context, id dedupe.KeyID) error {
	if _, err := a.change(ctx, id, only(a.look.settle())); err != nil {
		return fmt.Errorf("sqldedupe: settle: %w", err)
	}
	return nil
}

// only is a transaction of one statement on a key.
func only(statement string) []pgkeys.Step {
	return []pgkeys.Step{{Text: statement, Key: true, Counts: true}}
}

// change does the steps of one transaction, and returns the rows of those that
// count.
func (a *admin) change(ctx context.Context, id dedupe.KeyID, steps []pgkeys.Step) (total int64, err error) {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	tx, err := a.db.BeginTx(ctx, nil)
	if err != nil {
		return 0, err
	}
	defer func() { _ = tx.Rollback() }() // after the commit it does nothing
	for _, step := range steps {
		var args []any
		if step.Key {
			args = []any{a.look.id(id)}
		}
		res, err := tx.ExecContext(ctx, step.Text, args...)
		if err != nil {
			return 0, err
		}
		if !step.Counts {
			continue
		}
		n, err := res.RowsAffected()
		if err != nil {
			return 0, err
		}
		total += n
	}
	return total, tx.Commit()
}

// Counts implements dedupe.Admin.
func (a *admin) Counts(ctx context.Context) (dedupe.Counts, error) {
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	var done sql.NullInt64
	var c dedupe.Counts
	err := a.db.QueryRowContext(ctx, a.look.counts()).Scan(&done, &c.Running, &c.Free, &c.Unknown, &c.Parked, &c.Conflicts)
	if err != nil {
		return dedupe.Counts{}, fmt.Errorf("sqldedupe: counts: %w", err)
	}
	c.Done = -1
	if done.Valid {
		c.Done = done.Int64
	}
	return c, nil
}

type postgresLook struct{ sql pgkeys.AdminStatements }

func (postgresLook) id(id dedupe.KeyID) any { return id.String() }
func (l postgresLook) find() string         { return l.sql.Find }
func (l postgresLook) conflicts() string    { return l.sql.Conflicts }
func (l postgresLook) settle() string       { return l.sql.Settle }
func (l postgresLook) release() string      { return l.sql.Release }
func (l postgresLook) evict() []pgkeys.Step { return l.sql.Evict }
func (l postgresLook) counts() string       { return l.sql.Counts }

func (l postgresLook) list(f dedupe.Filter) (string, dedupe.KeyID, error) { return l.sql.List(f) }

func (postgresLook) scanEntry(scan func(...any) error) (dedupe.Entry, error) {
	return pgkeys.ScanEntry(scan)
}

func (postgresLook) scanConflict(scan func(...any) error) (dedupe.ConflictRecord, error) {
	return pgkeys.ScanConflict(scan)
}

// keysLook is that of a dialect without leases, whose times are milliseconds.
type keysLook struct {
	findSQL, listSQL, metSQL, conflictsSQL, settleSQL, evictSQL, countsSQL string
}

func newSQLiteLook(s *migrate.Set) keysLook { return newKeysLook(s, `"key"`, "null") }

// newMySQLLook: the estimate of the rows is the server's own.
func newMySQLLook(s *migrate.Set) keysLook {
	return newKeysLook(s, "`key`", `(select table_rows from information_schema.tables where table_schema = `+s.SchemaSQL()+` and table_name = 'unecho_key')`)
}

// newKeysLook writes the statements with the dialect's name of the column, and
// its estimate of the number of rows.
func newKeysLook(s *migrate.Set, column, estimate string) keysLook {
	fill := strings.NewReplacer("{{key}}", s.Table("unecho_key"), "{{conflict}}", s.Table("unecho_conflict"), "{{k}}", column, "{{estimate}}", estimate).Replace
	const entry = `select {{k}}, done_at, expires_at, fingerprint, coalesce(length(reply), -1), tenant, consumer, source, id,
	(select count(*) from {{conflict}} c where c.{{k}} = e.{{k}}) from {{key}} e `
	return keysLook{
		findSQL: fill(entry + `where {{k}} = ?`),
		listSQL: fill(entry + `where {{k}} > ? order by {{k}} limit ?`),
		metSQL:  fill(entry + `where {{k}} > ? and {{k}} in (select {{k}} from {{conflict}}) order by {{k}} limit ?`),
		conflictsSQL: fill(`select tenant, consumer, source, id, fingerprint, first_fingerprint, reason, fields, seen_at
from {{conflict}} where {{k}} = ? order by seen_at, fingerprint`),
		settleSQL: fill(`delete from {{conflict}} where {{k}} = ?`),
		evictSQL:  fill(`delete from {{key}} where {{k}} = ?`),
		countsSQL: fill(`select {{estimate}}, 0, 0, 0, 0, (select count(*) from (select 1 from {{conflict}} limit ` + strconv.Itoa(dedupe.CountCap) + `) as n)`),
	}
}

func (keysLook) id(id dedupe.KeyID) any { return id[:] }
func (l keysLook) find() string         { return l.findSQL }
func (l keysLook) conflicts() string    { return l.conflictsSQL }
func (l keysLook) settle() string       { return l.settleSQL }
func (keysLook) release() string        { return "" }

func (l keysLook) evict() []pgkeys.Step {
	return []pgkeys.Step{{Text: l.evictSQL, Key: true, Counts: true}, {Text: l.settleSQL, Key: true}}
}

func (l keysLook) counts() string { return l.countsSQL }

func (l keysLook) list(f dedupe.Filter) (statement string, after dedupe.KeyID, err error) {
	after, err = pgkeys.After(f)
	switch {
	case err != nil:
		return "", after, err
	case f.InConflict:
		return l.metSQL, after, nil
	case f.State == dedupe.StateDone:
		return l.listSQL, after, nil
	}
	return "", after, nil // a key of a transaction is done, or not there
}

func (keysLook) scanEntry(scan func(...any) error) (dedupe.Entry, error) {
	e := dedupe.Entry{State: dedupe.StateDone}
	var id, fingerprint []byte
	var done, expires int64
	var tenant, consumer, source, of sql.NullString
	err := scan(&id, &done, &expires, &fingerprint, &e.ReplySize, &tenant, &consumer, &source, &of, &e.Conflicts)
	copy(e.ID[:], id)
	copy(e.Fingerprint[:], fingerprint)
	e.DoneAt, e.ExpiresAt = time.UnixMilli(done), time.UnixMilli(expires)
	e.Key = dedupe.Key{Tenant: tenant.String, Consumer: consumer.String, Source: source.String, ID: of.String}
	return e, err
}

func (keysLook) scanConflict(scan func(...any) error) (dedupe.ConflictRecord, error) {
	var r dedupe.ConflictRecord
	var fingerprint, first []byte
	var seen int64
	var fields *string
	var tenant, consumer, source, of sql.NullString
	err := scan(&tenant, &consumer, &source, &of, &fingerprint, &first, &r.Reason, &fields, &seen)
	copy(r.Fingerprint[:], fingerprint)
	copy(r.First[:], first)
	r.Fields, r.SeenAt = pgkeys.ParseFields(fields), time.UnixMilli(seen)
	r.Key = dedupe.Key{Tenant: tenant.String, Consumer: consumer.String, Source: source.String, ID: of.String}
	return r, err
}
