package sqloutbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/internal/rows"
)

// NewStore returns the relay's side of the outbox in a SQLite database, which
// stays the caller's. It panics if db is nil.
func NewStore(db *sql.DB) *Store {
	if db == nil {
		panic("sqloutbox: NewStore: the database is nil")
	}
	return &Store{db: db}
}

// Store implements [outbox.Store], [outbox.Pruner] and [outbox.Parker].
type Store struct{ db *sql.DB }

// handle is what Settle needs to know of a row.
type handle struct{ held bool }

// Acquire implements [outbox.Store].
func (s *Store) Acquire(ctx context.Context, owner string, d time.Duration) (outbox.Lease, error) {
	l := outbox.Lease{Owner: owner, For: d}
	err := s.db.QueryRowContext(ctx, `update unecho_outbox_shard set owner = ?, epoch = epoch + 1, lease_until = `+now+` + ?
		where shard = 0 and lease_until < `+now+` returning epoch`, owner, d.Milliseconds()).Scan(&l.Epoch)
	if errors.Is(err, sql.ErrNoRows) {
		return outbox.Lease{}, outbox.ErrHeld
	}
	if err != nil {
		return outbox.Lease{}, fmt.Errorf("sqloutbox: acquire: %w", err)
	}
	return l, nil
}

// Renew implements [outbox.Store].
func (s *Store) Renew(ctx context.Context, l outbox.Lease) error {
	n, err := affected(s.db.ExecContext(ctx, `update unecho_outbox_shard set lease_until = `+now+` + ? where shard = 0 and epoch = ?`,
		l.For.Milliseconds(), l.Epoch))
	switch {
	case err != nil:
		return fmt.Errorf("sqloutbox: renew: %w", err)
	case n == 0:
		return outbox.ErrFenced
	}
	return nil
}

// Release implements [outbox.Store].
func (s *Store) Release(ctx context.Context, l outbox.Lease) error {
	if _, err := s.db.ExecContext(ctx, `update unecho_outbox_shard set lease_until = 0 where shard = 0 and epoch = ?`, l.Epoch); err != nil {
		return fmt.Errorf("sqloutbox: release: %w", err)
	}
	return nil
}

func affected(r sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return r.RowsAffected()
}

// maxBytes bounds the keys, headers and bodies of the held rows of a batch, and
// of the others, each: what goes beyond it waits for the next batch. One row
// is always taken. The two have bounds of their own, as they have halves of
// the limit, because held rows that cannot go for long become due again and
// again, and would leave the others no room.
const maxBytes = 8 << 20

const position = "(select last_id from unecho_outbox_shard where shard = 0)"

// Read implements [outbox.Store].
func (s *Store) Read(ctx context.Context, _ outbox.Lease, limit int) ([]outbox.Row, error) {
	var waiting int
	err := s.db.QueryRowContext(ctx, `select count(*) from (select 1 from unecho_outbox where id > `+position+` limit ?)`, limit/2).Scan(&waiting)
	if err != nil {
		return nil, fmt.Errorf("sqloutbox: read: %w", err)
	}
	held, err := s.read(ctx, `select h.id, `+prefixed("h")+`, h.attempts, 0 from unecho_outbox_held h, (select `+now+` as now) c
		where not h.parked and h.due_at <= c.now
			and (h.key is null or not exists (select 1 from unecho_outbox_held e
				where e.topic = h.topic and e.key = h.key and e.id < h.id and e.blocks and (e.parked or e.due_at > c.now)))
		order by h.id limit ?`, limit-waiting)
	if err != nil {
		return nil, err
	}
	fresh, err := s.read(ctx, `select o.id, `+prefixed("o")+`, 0,
			case when o.key is null then 0 else (select count(*) from (select 1 from unecho_outbox_held h
				where h.topic = o.topic and h.key = o.key and h.blocks limit ? + 1)) end
		from unecho_outbox o where o.id > `+position+` order by o.id limit ?`, len(held), limit-len(held))
	if err != nil {
		return nil, err
	}
	return join(held, fresh), nil
}

// join makes the rows that the relay sees. A row whose key has held rows that
// are not all in front of it in this batch is blocked.
func join(held, fresh []stored) []outbox.Row {
	out := make([]outbox.Row, 0, len(held)+len(fresh))
	inHand := make(map[orderKey]int)
	for _, h := range held {
		if h.Message.Key != nil { // or it would count as one of the empty key
			inHand[orderOf(h.Message)]++
		}
		h.Handle = handle{held: true}
		out = append(out, h.Row)
	}
	for _, f := range fresh {
		f.Handle, f.Blocked = handle{}, f.inFront > inHand[orderOf(f.Message)]
		out = append(out, f.Row)
	}
	return out
}

// stored is a row as it is read, with the number of held rows of its key.
type stored struct {
	outbox.Row
	inFront int
	size    int
}

type orderKey struct{ topic, key string }

func orderOf(m *envelope.Message) orderKey { return orderKey{m.Topic, string(m.Key)} }

func prefixed(alias string) string {
	return alias + ".topic, " + alias + ".key, " + alias + ".key is null, " + alias + ".event_id, " + alias + ".source, " + alias + ".type, " +
		alias + ".subject, " + alias + ".content_type, " + alias + ".data_schema, " + alias + ".time, " + alias + ".meta, " + alias + ".body, " + alias + ".body is null"
}

func (s *Store) read(ctx context.Context, query string, args ...any) ([]stored, error) {
	rs, err := s.db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, fmt.Errorf("sqloutbox: read: %w", err)
	}
	defer func() { _ = rs.Close() }()
	var out []stored
	for size := 0; size < maxBytes && rs.Next(); {
		row, err := scan(rs)
		if err != nil {
			return nil, fmt.Errorf("sqloutbox: read: %w", err)
		}
		out = append(out, row)
		size += row.size
	}
	if err := rs.Err(); err != nil {
		return nil, fmt.Errorf("sqloutbox: read: %w", err)
	}
	return out, nil
}

func scan(rs *sql.Rows) (row stored, err error) {
	m := &envelope.Message{}
	var micros int64
	var meta []byte
	var noKey, noBody bool
	err = rs.Scan(&row.ID, &m.Topic, &m.Key, &noKey, &m.ID, &m.Source, &m.Type, &m.Subject, &m.ContentType, &m.DataSchema,
		&micros, &meta, &m.Body, &noBody, &row.Attempts, &row.inFront)
	if err != nil {
		return row, err
	}
	m.Key, m.Body = nullOr(m.Key, noKey), nullOr(m.Body, noBody)
	m.Time = time.UnixMicro(micros).UTC()
	row.Message, row.size = m, len(m.Key)+len(meta)+len(m.Body)
	row.Err = rows.DecodeMeta(meta, m)
	return row, nil
}

// nullOr tells null from empty, which not every driver does.
func nullOr(b []byte, null bool) []byte {
	switch {
	case null:
		return nil
	case b == nil:
		return []byte{}
	}
	return b
}

// Settle implements [outbox.Store].
func (s *Store) Settle(ctx context.Context, l outbox.Lease, ss []outbox.Settlement) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("sqloutbox: settle: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // does nothing after the commit
	if err := settle(ctx, tx, l, ss); err != nil {
		return fmt.Errorf("sqloutbox: settle: %w", err)
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("sqloutbox: settle: %w", err)
	}
	return nil
}

func settle(ctx context.Context, tx *sql.Tx, l outbox.Lease, ss []outbox.Settlement) error {
	n, err := affected(tx.ExecContext(ctx, `update unecho_outbox_shard set lease_until = `+now+` + ?, last_id = max(last_id, ?) where shard = 0 and epoch = ?`,
		l.For.Milliseconds(), lastFresh(ss), l.Epoch))
	switch {
	case err != nil:
		return err
	case n == 0:
		return outbox.ErrFenced
	}
	for _, st := range ss {
		if err := settleRow(ctx, tx, st); err != nil {
			return err
		}
	}
	return nil
}

func lastFresh(ss []outbox.Settlement) int64 {
	var last int64
	for _, st := range ss {
		if !st.Row.Handle.(handle).held {
			last = st.Row.ID
		}
	}
	return last
}

func settleRow(ctx context.Context, tx *sql.Tx, st outbox.Settlement) (err error) {
	held := st.Row.Handle.(handle).held
	parked := st.Action == outbox.Park || st.Action == outbox.Skip
	blocks := st.Action != outbox.Skip && st.Row.Message.Key != nil
	switch {
	case st.Action == outbox.Sent && held:
		_, err = tx.ExecContext(ctx, `delete from unecho_outbox_held where id = ?`, st.Row.ID)
	case st.Action == outbox.Sent:
	case held:
		_, err = tx.ExecContext(ctx, `update unecho_outbox_held set attempts = attempts + ?, due_at = `+now+` + ?, parked = ?, blocks = ?, reason = ? where id = ?`,
			counted(st), st.After.Milliseconds(), parked, blocks, st.Reason, st.Row.ID)
	default:
		_, err = tx.ExecContext(ctx, `insert into unecho_outbox_held (id, `+columns+`, created_at, attempts, due_at, parked, blocks, reason)
			select id, `+columns+`, created_at, ?, `+now+` + ?, ?, ?, ? from unecho_outbox where id = ?`,
			counted(st), st.After.Milliseconds(), parked, blocks, st.Reason, st.Row.ID)
	}
	return err
}

func counted(st outbox.Settlement) int {
	if st.Counted {
		return 1
	}
	return 0
}

// Prune implements [outbox.Pruner].
func (s *Store) Prune(ctx context.Context, age time.Duration, limit int) (int, error) {
	n, err := affected(s.db.ExecContext(ctx, `delete from unecho_outbox where id in (
		select id from unecho_outbox where id <= (select last_id from unecho_outbox_shard where shard = 0) and created_at <= `+now+` - ?
		order by id limit ?)`, age.Milliseconds(), limit))
	if err != nil {
		return 0, fmt.Errorf("sqloutbox: prune: %w", err)
	}
	return int(n), nil
}

// Parked implements [outbox.Parker].
func (s *Store) Parked(ctx context.Context, after int64, limit int) ([]outbox.Parked, error) {
	rs, err := s.db.QueryContext(ctx, `select id, topic, type, attempts, reason, coalesce(length(body), 0) from unecho_outbox_held
		where parked and id > ? order by id limit ?`, after, limit)
	if err != nil {
		return nil, fmt.Errorf("sqloutbox: list parked rows: %w", err)
	}
	defer func() { _ = rs.Close() }()
	var out []outbox.Parked
	for rs.Next() {
		var p outbox.Parked
		if err := rs.Scan(&p.ID, &p.Topic, &p.Type, &p.Attempts, &p.Reason, &p.Size); err != nil {
			return nil, fmt.Errorf("sqloutbox: list parked rows: %w", err)
		}
		out = append(out, p)
	}
	return out, rs.Err()
}

// Requeue implements [outbox.Parker].
func (s *Store) Requeue(ctx context.Context, id int64) (bool, error) {
	return s.one(ctx, "requeue", `update unecho_outbox_held set parked = false, blocks = key is not null, attempts = 0, due_at = `+now+` where id = ? and parked`, id)
}

// Drop implements [outbox.Parker].
func (s *Store) Drop(ctx context.Context, id int64) (bool, error) {
	return s.one(ctx, "drop", `delete from unecho_outbox_held where id = ? and parked`, id)
}

func (s *Store) one(ctx context.Context, what, query string, id int64) (bool, error) {
	n, err := affected(s.db.ExecContext(ctx, query, id))
	if err != nil {
		return false, fmt.Errorf("sqloutbox: %s: %w", what, err)
	}
	return n > 0, nil
}
