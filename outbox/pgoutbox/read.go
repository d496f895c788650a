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

// handle is what Settle needs to know of a row.
type handle struct{ held bool }

// Read implements [outbox.Store].
func (s *Store) Read(ctx context.Context, l outbox.Lease, limit int) ([]outbox.Row, error) {
	if err := s.load(ctx, l); err != nil {
		return nil, err
	}
	held, err := s.readHeld(ctx, limit)
	if err != nil || len(held) >= limit {
		return held, err
	}
	if len(s.pos.chunk) == 0 {
		if err := s.look(ctx); err != nil {
			return nil, err
		}
	}
	page := s.pos.chunk[:min(len(s.pos.chunk), limit-len(held))]
	fresh, err := s.readPage(ctx, page, held)
	return append(held, fresh...), err
}

// load takes the position from the database when the epoch is new to us.
func (s *Store) load(ctx context.Context, l outbox.Lease) error {
	if s.pos.loaded && s.pos.epoch == l.Epoch {
		return nil
	}
	p := position{epoch: l.Epoch, loaded: true}
	var foreign bool
	err := s.pool.QueryRow(ctx, s.sql.load).Scan(&p.prev, &p.cur, &p.lastID, &foreign)
	if err != nil {
		return fmt.Errorf("pgoutbox: read the position: %w", err)
	}
	if foreign {
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
	rs, err := s.pool.Query(ctx, s.sql.due, limit)
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

// readPage returns the rows at the places of page. A row whose key has held
// rows that are not all in front of it in this batch is blocked.
func (s *Store) readPage(ctx context.Context, page []place, held []outbox.Row) ([]outbox.Row, error) {
	if len(page) == 0 {
		return nil, nil
	}
	inHand := make(map[orderKey]int64)
	for _, h := range held {
		inHand[orderOf(h.Message)]++
	}
	xids, ids := make([]string, len(page)), make([]int64, len(page))
	for i, pl := range page {
		xids[i], ids[i] = pl.xid, pl.id
	}
	rs, err := s.pool.Query(ctx, s.sql.page, xids, ids)
	if err != nil {
		return nil, fmt.Errorf("pgoutbox: read rows: %w", err)
	}
	fresh, err := pgx.CollectRows(rs, func(r pgx.CollectableRow) (outbox.Row, error) {
		row := outbox.Row{Handle: handle{}}
		var inFront int64
		if err := scan(r, &row, &inFront); err != nil {
			return row, err
		}
		row.Blocked = inFront > inHand[orderOf(row.Message)]
		return row, nil
	})
	if err != nil {
		return nil, fmt.Errorf("pgoutbox: read rows: %w", err)
	}
	return s.checkPage(page, fresh)
}

// checkPage drops places whose rows somebody has deleted by hand: if all of a
// page is gone the position must still advance.
func (s *Store) checkPage(page []place, fresh []outbox.Row) ([]outbox.Row, error) {
	if len(fresh) > 0 {
		return fresh, nil
	}
	return nil, fmt.Errorf("pgoutbox: %d rows from id %d on have vanished; rows that are not settled must not be deleted", len(page), page[0].id)
}

// orderKey is what keeps its order: a topic and a key.
type orderKey struct{ topic, key string }

func orderOf(m *envelope.Message) orderKey {
	return orderKey{m.Topic, string(m.Key)}
}

// scan reads the columns of a message, and one more.
func scan(r pgx.CollectableRow, row *outbox.Row, more any) error {
	m := &envelope.Message{}
	var meta []byte
	err := r.Scan(&row.ID, &m.Topic, &m.Key, &m.ID, &m.Source, &m.Type, &m.Subject, &m.ContentType, &m.DataSchema,
		&m.Time, &meta, &m.Body, more)
	if err != nil {
		return err
	}
	row.Message = m
	return rows.DecodeMeta(meta, m)
}
