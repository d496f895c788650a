package pgoutbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/internal/rows"
)

// maxChunk is how many places of rows are looked up at once, sorted by id.
// They are pairs of numbers, so this bounds memory at a few megabytes.
const maxChunk = 50_000

// maxBytes bounds the keys, headers and bodies of the held rows of a batch, and
// of the others, each: what goes beyond it waits for the next batch. One row
// is always taken.
//
// The two have bounds of their own, as they have halves of the limit, because
// held rows that cannot go for long (a partition without a leader, a topic
// that does not exist) become due again and again, and would leave the others
// no room.
const maxBytes = 8 << 20

// position is where this relay is, as of its epoch. The database has what
// Settle last wrote of it; the rest is recomputed after a crash.
//
// The window is what became visible between prev and cur. A window is read in
// the order of ids, from lastID on. Why a crash cannot reverse two rows of a
// key: let a and b be written under the same row lock, a first. Whoever sees b
// sees a, so no window has b without a or a window before it having a, and
// a's id is the smaller one, since an id is drawn while the lock is held. If
// this relay publishes a part of a window and dies before Settle, the next one
// computes a window from the same prev to a later cur: a superset, in which a
// comes before b again.
type position struct {
	epoch  int64
	loaded bool
	prev   string // snapshot; all that is visible in it is settled
	cur    string // snapshot; "" when no window is open
	lastID int64

	chunk []place // of the window behind lastID, sorted by id
	full  bool    // whether the window may have more behind chunk
}

// place is where a row is in the primary key.
type place struct {
	xid string
	id  int64
}

// handle is what Settle needs to know of a row: whether it is a held one, and
// the transaction of one that is not.
type handle struct {
	held bool
	xid  string
}

// Read implements [outbox.Store].
func (s *Store) Read(ctx context.Context, l outbox.Lease, limit int) ([]outbox.Row, error) {
	if err := s.load(ctx, l); err != nil {
		return nil, err
	}
	if len(s.pos.chunk) == 0 {
		if err := s.look(ctx); err != nil {
			return nil, err
		}
	}
	held, err := s.readHeld(ctx, limit-min(len(s.pos.chunk), limit/2))
	if err != nil {
		return nil, err
	}
	fresh, err := s.readPage(ctx, limit-len(held), held)
	if err != nil {
		return nil, err
	}
	return append(held, fresh...), nil
}

// load takes the position from the database when the epoch is new to us.
func (s *Store) load(ctx context.Context, l outbox.Lease) error {
	if s.pos.loaded && s.pos.epoch == l.Epoch {
		return nil
	}
	p := position{epoch: l.Epoch, loaded: true}
	var ours, foreign bool
	err := s.pool.QueryRow(ctx, s.sql.load, l.Epoch).Scan(&ours, &p.prev, &p.cur, &p.lastID, &foreign)
	switch {
	case err != nil:
		return fmt.Errorf("pgoutbox: read the position: %w", err)
	case !ours: // it would be published, and could not be settled
		return outbox.ErrFenced
	case foreign:
		return fmt.Errorf("%w: was this database restored from a dump? Stop all relays and writers and call Rebase", ErrRestored)
	}
	s.pos = p
	return nil
}

// look finds the next rows of the window, and opens a new window when there
// is none. It writes nothing: an idle relay costs the database a read.
func (s *Store) look(ctx context.Context) error {
	p := &s.pos
	if p.cur == "" {
		if err := s.pool.QueryRow(ctx, s.sql.snapshot).Scan(&p.cur); err != nil {
			return fmt.Errorf("pgoutbox: take a snapshot: %w", err)
		}
		p.lastID = 0
	}
	rs, err := s.pool.Query(ctx, s.sql.window, p.prev, p.cur, p.lastID, maxChunk)
	if err != nil {
		return fmt.Errorf("pgoutbox: look for rows: %w", err)
	}
	chunk, err := pgx.CollectRows(rs, func(r pgx.CollectableRow) (pl place, err error) {
		return pl, r.Scan(&pl.xid, &pl.id)
	})
	if err != nil {
		return fmt.Errorf("pgoutbox: look for rows: %w", err)
	}
	p.chunk, p.full = chunk, len(chunk) == maxChunk
	if len(chunk) == 0 {
		p.prev, p.cur = p.cur, "" // an empty window; the database learns of it with the next batch
	}
	return nil
}

// readHeld returns the held rows that may go: those that are due and have
// nothing in front of them in their key that is not.
func (s *Store) readHeld(ctx context.Context, limit int) ([]outbox.Row, error) {
	rs, err := s.pool.Query(ctx, s.sql.due, limit, maxBytes)
	if err != nil {
		return nil, fmt.Errorf("pgoutbox: read held rows: %w", err)
	}
	held, err := pgx.CollectRows(rs, func(r pgx.CollectableRow) (outbox.Row, error) {
		row := outbox.Row{Handle: handle{held: true}}
		err := scan(r, &row, &row.Attempts)
		return row, err
	})
	if err != nil {
		return nil, fmt.Errorf("pgoutbox: read held rows: %w", err)
	}
	return held, nil
}

// readPage returns the next rows of the window. When rows have been deleted by
// hand since they were found, it looks again: the position must advance over
// them, and an operator may well delete what is not to be published.
func (s *Store) readPage(ctx context.Context, limit int, held []outbox.Row) ([]outbox.Row, error) {
	for range 3 {
		page := s.pos.chunk[:min(len(s.pos.chunk), limit)]
		if len(page) == 0 {
			return nil, nil
		}
		fresh, err := s.readRows(ctx, page, held)
		if err != nil || len(fresh) > 0 {
			return fresh, err
		}
		if err := s.look(ctx); err != nil {
			return nil, err
		}
	}
	return nil, nil // until the next call
}

// readRows returns the rows at the places of page. A row is blocked whose key
// has held rows that are not all in front of it in this batch. What is in hand
// of a key are its first held rows, so they are all if the last is among them.
func (s *Store) readRows(ctx context.Context, page []place, held []outbox.Row) ([]outbox.Row, error) {
	inHand := make(map[orderKey]int64)
	for _, h := range held {
		if h.Message.Key != nil { // or it would count as one of the empty key
			inHand[orderOf(h.Message)] = h.ID
		}
	}
	xids, ids := make([]string, len(page)), make([]int64, len(page))
	for i, pl := range page {
		xids[i], ids[i] = pl.xid, pl.id
	}
	rs, err := s.pool.Query(ctx, s.sql.page, xids, ids, maxBytes)
	if err != nil {
		return nil, fmt.Errorf("pgoutbox: read rows: %w", err)
	}
	fresh, err := pgx.CollectRows(rs, func(r pgx.CollectableRow) (row outbox.Row, err error) {
		var h handle
		var last int64
		if err := scan(r, &row, &h.xid, &last); err != nil {
			return row, err
		}
		row.Handle, row.Blocked = h, last > 0 && last != inHand[orderOf(row.Message)]
		return row, nil
	})
	if err != nil {
		return nil, fmt.Errorf("pgoutbox: read rows: %w", err)
	}
	return fresh, nil
}

// orderKey is what keeps its order: a topic and a key that is not nil.
type orderKey struct{ topic, key string }

func orderOf(m *envelope.Message) orderKey {
	return orderKey{m.Topic, string(m.Key)}
}

// scan reads the columns of a message, and more.
func scan(r pgx.CollectableRow, row *outbox.Row, more ...any) error {
	m := &envelope.Message{}
	var meta []byte
	err := r.Scan(append([]any{&row.ID, &m.Topic, &m.Key, &m.ID, &m.Source, &m.Type, &m.Subject, &m.ContentType, &m.DataSchema,
		&m.Time, &meta, &m.Body}, more...)...)
	if err != nil {
		return err
	}
	m.Time = m.Time.UTC()
	row.Message = m
	row.Err = rows.DecodeMeta(meta, m)
	return nil
}
