package sqldedupe

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/pgkeys"
	"github.com/unecho/unecho/internal/migrate"
)

// placesIn is what a dialect does about positions.
type placesIn interface {
	BeginAt(ctx context.Context, p dedupe.Partition) (*scope, dedupe.Position, error)
	CommitAt(ctx context.Context, s *scope, a dedupe.Advance) error
	// moveIn changes the row of a partition, which tx has locked.
	moveIn(ctx context.Context, tx *sql.Tx, to dedupe.Position) error
}

// placer makes a dedupe.PlaceDriver of a dialect.
type placer struct{ dialect }

// ClaimAt implements dedupe.PlaceDriver, by a claim of its own for each key.
func (p placer) ClaimAt(ctx context.Context, s *scope, claims []dedupe.Claim) ([]*dedupe.Record, error) {
	order := make([]int, len(claims))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(i, j int) int {
		a, b := claims[i].Key.Stored(), claims[j].Key.Stored()
		return bytes.Compare(a[:], b[:])
	})
	priors := make([]*dedupe.Record, len(claims))
	for _, i := range order {
		owned, prior, err := p.claimIn(ctx, s.tx, claims[i])
		switch {
		case err != nil:
			return nil, err
		case !owned && prior == nil:
			return nil, errVanishing
		}
		priors[i] = prior
	}
	return priors, nil
}

// storeAdvance stores what is committed with the effect.
func storeAdvance(ctx context.Context, in dialect, tx *sql.Tx, a dedupe.Advance) error {
	if err := storeReplies(ctx, in, tx, a.Claims, a.Replies); err != nil {
		return err
	}
	for _, r := range a.Conflicts {
		if err := in.conflictIn(ctx, tx, r); err != nil {
			return err
		}
	}
	if a.To.Partition == (dedupe.Partition{}) {
		return nil // keys alone
	}
	return in.moveIn(ctx, tx, a.To)
}

// moved reports what is wrong with the answer to a move.
func moved(res sql.Result, err error) error {
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		return errors.Join(fmt.Errorf("%w: the row of the position is gone", dedupe.ErrScope), err)
	}
	return nil
}

// readablePartition is a partition for people.
func (b *base) readablePartition(p dedupe.Partition) []any {
	if b.o.Anonymous {
		return []any{nil, nil, nil, nil}
	}
	return []any{p.Tenant, p.Consumer, p.Topic, p.Number}
}

// positionStatements are those of MySQL and SQLite; for their arguments see
// pgkeys.PositionStatements.
type positionStatements struct {
	lock, create, move, list, reset string
}

func newMySQLPositions(s *migrate.Set) positionStatements {
	p := newPositions(s, "`key`", mysqlNow, " on duplicate key update ", func(column string) string { return "values(" + column + ")" })
	p.lock += " for update"
	p.create += "next_offset = next_offset" // which locks the row, whatever it answers
	return p
}

func newSQLitePositions(s *migrate.Set) positionStatements {
	p := newPositions(s, "key", "cast(unixepoch('subsec') * 1000 as integer)", " on conflict (key) do ", func(column string) string { return "excluded." + column })
	p.create += "nothing"
	p.reset = strings.Replace(p.reset, "do next_offset", "do update set next_offset", 1)
	return p
}

func newPositions(s *migrate.Set, key, now, met string, proposed func(column string) string) positionStatements {
	fill := strings.NewReplacer("{{position}}", s.Table("unecho_position"), "{{k}}", key, "{{now}}", now).Replace
	insert := fill("insert into {{position}} ({{k}}, next_offset, tenant, consumer, topic, number, moved_at) values (?, ?, ?, ?, ?, ?, {{now}})") + met
	return positionStatements{
		lock:   fill("select next_offset, max_time, fingerprint from {{position}} where {{k}} = ?"),
		create: insert,
		move:   fill("update {{position}} set next_offset = ?, max_time = ?, fingerprint = ?, moved_at = {{now}} where {{k}} = ?"),
		list: fill("select next_offset, max_time, fingerprint, tenant, consumer, topic, number, moved_at from {{position}} " +
			"order by consumer, topic, number, tenant limit ?"),
		reset: insert + fill("next_offset = "+proposed("next_offset")+", max_time = null, fingerprint = null, moved_at = {{now}}"),
	}
}

func moveArgs(to dedupe.Position) []any {
	key := to.Partition.Stored()
	return []any{to.Next, pgkeys.Time(to.MaxTime), digest(to.Last), key[:]}
}

// digest is a fingerprint as an argument; a nil slice is not null everywhere.
func digest(fp [32]byte) any {
	if b := pgkeys.Digest(fp); b != nil {
		return b
	}
	return nil
}

// BeginAt implements dedupe.PlaceDriver.
func (p *postgres) BeginAt(ctx context.Context, at dedupe.Partition) (*scope, dedupe.Position, error) {
	s, err := p.begin(ctx)
	if err != nil {
		return nil, dedupe.Position{}, err
	}
	bounded, cancel := context.WithTimeout(ctx, p.o.LockWait+p.o.Timeout)
	defer cancel()
	from, err := p.lockIn(bounded, s, at)
	if err != nil {
		s.undo(ctx, p.o.Timeout)
		return nil, from, p.claimError(ctx, err)
	}
	return s, from, nil
}

// lockIn locks the row of a partition, and makes it where there is none: of two
// transactions that make it, the second waits, finds it there, and waits for its
// lock.
func (p *postgres) lockIn(ctx context.Context, s *scope, at dedupe.Partition) (from dedupe.Position, err error) {
	if _, err = s.tx.ExecContext(ctx, p.positions.Bound, strconv.FormatInt(pgkeys.Milliseconds(p.o.LockWait), 10)); err != nil {
		return from, err
	}
	id := hexID(at.Stored())
	lock := func() (dedupe.Position, error) {
		return pgkeys.ScanPosition(s.tx.QueryRowContext(ctx, p.positions.Lock, id).Scan, &s.xid)
	}
	if from, err = lock(); errors.Is(err, sql.ErrNoRows) {
		if _, err = s.tx.ExecContext(ctx, p.positions.Create, append([]any{id, 0}, p.readablePartition(at)...)...); err == nil {
			from, err = lock()
		}
	}
	if err == nil {
		_, err = s.tx.ExecContext(ctx, pgkeys.LockBack)
	}
	return from, err
}

// moveIn implements placesIn.
func (p *postgres) moveIn(ctx context.Context, tx *sql.Tx, to dedupe.Position) error {
	_, err := tx.ExecContext(ctx, p.positions.Move, hexID(to.Partition.Stored()), to.Next, pgkeys.Time(to.MaxTime), digest(to.Last))
	return err
}

// BeginAt implements dedupe.PlaceDriver.
func (m *mysql) BeginAt(ctx context.Context, at dedupe.Partition) (*scope, dedupe.Position, error) {
	s, err := m.begin(ctx)
	if err != nil {
		return nil, dedupe.Position{}, err
	}
	bounded, cancel := context.WithTimeout(ctx, 2*(m.o.LockWait+time.Second)+m.o.Timeout)
	defer cancel()
	from, err := m.lockIn(bounded, s.tx, at)
	if err == nil {
		_, err = s.tx.ExecContext(ctx, mark)
	}
	if err != nil {
		s.undo(ctx, m.o.Timeout)
		return nil, from, m.claimError(ctx, err)
	}
	return s, from, nil
}

// lockIn locks the row of a partition, and makes it where there is none. Reading
// with a lock shows what was committed last, at every level.
func (m *mysql) lockIn(ctx context.Context, tx *sql.Tx, at dedupe.Partition) (from dedupe.Position, err error) {
	key := at.Stored()
	lock := func(statement string) (err error) {
		from, err = pgkeys.ScanPosition(tx.QueryRowContext(ctx, statement, key[:]).Scan)
		return err
	}
	err = m.bounded(ctx, tx, m.o.LockWait, m.positions.lock, lock)
	if !errors.Is(err, sql.ErrNoRows) {
		return from, err
	}
	if err = m.insert(ctx, tx, m.o.LockWait, m.positions.create, append([]any{key[:], 0}, m.readablePartition(at)...)...); err != nil {
		return from, err
	}
	return from, m.bounded(ctx, tx, m.o.LockWait, m.positions.lock, lock)
}

// moveIn implements placesIn.
func (m *mysql) moveIn(ctx context.Context, tx *sql.Tx, to dedupe.Position) error {
	return moved(tx.ExecContext(ctx, m.positions.move, moveArgs(to)...))
}

// BeginAt implements dedupe.PlaceDriver. The insert takes the write lock, also
// where the row is there.
func (l *sqlite) BeginAt(ctx context.Context, at dedupe.Partition) (s *scope, from dedupe.Position, err error) {
	key := at.Stored()
	s, err = l.write(ctx, l.o.LockWait, func(ctx context.Context, tx *sql.Tx) (bool, error) {
		_, err := tx.ExecContext(ctx, l.positions.create, append([]any{key[:], 0}, l.readablePartition(at)...)...)
		if err == nil {
			from, err = pgkeys.ScanPosition(tx.QueryRowContext(ctx, l.positions.lock, key[:]).Scan)
		}
		return err == nil, err
	})
	return s, from, err
}

// moveIn implements placesIn.
func (l *sqlite) moveIn(ctx context.Context, tx *sql.Tx, to dedupe.Position) error {
	return moved(tx.ExecContext(ctx, l.positions.move, moveArgs(to)...))
}

// Positions implements dedupe.PositionAdmin.
func (a *admin) Positions(ctx context.Context) ([]dedupe.Position, error) {
	all, err := query(ctx, a, a.scanListed, a.positions.list, dedupe.CountCap)
	if err != nil {
		return nil, fmt.Errorf("sqldedupe: positions: %w", err)
	}
	return all, nil
}

// scanListed reads a row of a list. PostgreSQL has a time, the others have
// milliseconds.
func (a *admin) scanListed(scan func(...any) error) (p dedupe.Position, err error) {
	if a.dialect == Postgres {
		var at time.Time
		p, err = pgkeys.ScanListed(scan, &at)
		p.MovedAt = at
		return p, err
	}
	var ms int64
	p, err = pgkeys.ScanListed(scan, &ms)
	p.MovedAt = time.UnixMilli(ms)
	return p, err
}

// ResetPosition implements dedupe.PositionAdmin.
func (a *admin) ResetPosition(ctx context.Context, p dedupe.Partition, next int64) error {
	if err := dedupe.CheckReset(p, next); err != nil {
		return fmt.Errorf("sqldedupe: reset a position: %w", err)
	}
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	args := append([]any{a.look.id(p.Stored()), next}, (&base{o: a.o}).readablePartition(p)...)
	for {
		_, err := a.db.ExecContext(ctx, a.positions.reset, args...)
		switch {
		case err == nil:
			return nil
		case !isBusy(err) || !pause(ctx):
			return fmt.Errorf("sqldedupe: reset a position: %w", err)
		}
	}
}

var _ dedupe.PositionAdmin = (*admin)(nil)
