package pgoutbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox"
)

// Settle implements [outbox.Store]: the position, which checks the epoch and
// renews the lease, and what moves to, in and from the held rows, in one
// transaction, whose statements are one round trip.
func (s *Store) Settle(ctx context.Context, l outbox.Lease, ss []outbox.Settlement) error {
	if !s.pos.loaded || s.pos.epoch != l.Epoch {
		return outbox.ErrFenced
	}
	next, moved, changed, gone, touched := s.plan(ss)
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		var b pgx.Batch
		fenced := false
		var cur *string
		if next.cur != "" {
			cur = &next.cur
		}
		b.Queue(s.sql.advance, l.Epoch, l.For, next.prev, cur, next.lastID).Exec(func(t pgxTag) error {
			fenced = t.RowsAffected() == 0
			return nil
		})
		if len(gone) > 0 {
			b.Queue(s.sql.remove, gone)
		}
		if len(changed.ids) > 0 {
			b.Queue(s.sql.change, changed.args()...)
		}
		if len(moved.ids) > 0 {
			b.Queue(s.sql.move, append(moved.args(), moved.xids)...)
		}
		if len(touched.keys) > 0 {
			b.Queue(s.sql.promote, touched.topics, touched.keys)
		}
		if err := tx.SendBatch(ctx, &b).Close(); err != nil {
			return err
		}
		if fenced {
			return outbox.ErrFenced // and roll back what the others did
		}
		return nil
	})
	if err != nil {
		// The answer may be lost: what the database has is read anew.
		s.pos = position{}
		return fmt.Errorf("pgoutbox: settle: %w", err)
	}
	s.pos = next
	return nil
}

// plan says where the position goes, which fresh rows move aside, which held
// rows change, which are gone, and in which lanes another row is the first
// that blocks, or the first at all, after that.
func (s *Store) plan(ss []outbox.Settlement) (next position, moved, changed sideRows, gone []int64, touched lanes) {
	next = s.pos
	for _, st := range ss {
		h := st.Row.Handle.(handle)
		if h.held == (st.Action == outbox.Sent || st.Action == outbox.Skip) {
			touched.add(st.Row.Message)
		}
		switch {
		case h.held && st.Action == outbox.Sent:
			gone = append(gone, st.Row.ID)
		case h.held:
			changed.add("", st)
		default:
			if st.Action != outbox.Sent {
				moved.add(h.xid, st)
			}
			next.lastID = st.Row.ID
		}
	}
	for len(next.chunk) > 0 && next.chunk[0].id <= next.lastID {
		next.chunk = next.chunk[1:]
	}
	if len(next.chunk) == 0 && !next.full && next.cur != "" {
		next.prev, next.cur, next.lastID = next.cur, "", 0
	}
	return next, moved, changed, gone, touched
}

// lanes are topics and keys.
type lanes struct {
	topics []string
	keys   [][]byte
	seen   map[orderKey]bool
}

func (l *lanes) add(m *envelope.Message) {
	if m.Key == nil || l.seen[orderOf(m)] {
		return
	}
	if l.seen == nil {
		l.seen = make(map[orderKey]bool)
	}
	l.seen[orderOf(m)] = true
	l.topics = append(l.topics, m.Topic)
	l.keys = append(l.keys, m.Key)
}

// sideRows are rows of the table of held rows, turned on their side.
type sideRows struct {
	ids            []int64
	xids           []string
	counted        []bool
	after          []time.Duration
	parked, blocks []bool
	reasons        []string
}

func (r *sideRows) add(xid string, st outbox.Settlement) {
	r.ids = append(r.ids, st.Row.ID)
	r.xids = append(r.xids, xid)
	r.counted = append(r.counted, st.Counted)
	r.after = append(r.after, st.After)
	r.parked = append(r.parked, st.Action == outbox.Park || st.Action == outbox.Skip)
	r.blocks = append(r.blocks, st.Action != outbox.Skip && st.Row.Message.Key != nil)
	r.reasons = append(r.reasons, cleanText(st.Reason))
}

func (r *sideRows) args() []any {
	return []any{r.ids, r.counted, r.after, r.parked, r.blocks, r.reasons}
}

// cleanText makes an error's text storable and bounds it.
func cleanText(s string) string {
	b := []byte(s[:min(len(s), 1024)])
	for i, c := range b {
		if c < 0x20 || c > 0x7e {
			b[i] = ' '
		}
	}
	return string(b)
}
