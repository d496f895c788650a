package pgoutbox

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/unecho/unecho/internal/planted"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/outboxtest"
)

// Every bug here was shipped by somebody. The suite must see each of them.
func TestPlanted(t *testing.T) {
	replace := func(sql *string, old, new string) {
		if !strings.Contains(*sql, old) {
			panic("the statement to break has changed: " + old)
		}
		*sql = strings.Replace(*sql, old, new, 1)
	}
	const visible = `and pg_visible_in_snapshot(q.xid, (select prev from "unecho_outbox_shard" where shard = 0))`
	statement := map[string]func(*sqlTexts){
		// A cursor on the id: what commits behind it is lost.
		"cursor on the id": func(s *sqlTexts) {
			replace(&s.window, "select x, id from (", "select x, id from (select 1) one, lateral (")
			replace(&s.window, ") w order by", ") w where id > coalesce((select max(o.id) from unecho_outbox o where pg_visible_in_snapshot(o.xid, $1::text::pg_snapshot)), 0) order by")
		},
		// Below the oldest running transaction: any open writer stalls everything.
		"below the oldest transaction": func(s *sqlTexts) {
			replace(&s.window, ") w order by", ") w where x::xid8 < pg_snapshot_xmin($2::text::pg_snapshot) order by")
		},
		// The order of transaction ids is not that of writing.
		"order by transaction id": func(s *sqlTexts) {
			replace(&s.window, "order by id", "order by x::xid8, id")
			replace(&s.page, "order by b.id", "order by b.xid, b.id")
		},
		"mark without the epoch": func(s *sqlTexts) {
			replace(&s.advance, "and epoch = $1", "and $1::bigint is not null")
		},
		"renew without the epoch": func(s *sqlTexts) {
			replace(&s.renew, "and epoch = $1", "and $1::bigint is not null")
		},
		"lease without an end": func(s *sqlTexts) {
			replace(&s.acquire, "and lease_until < clock_timestamp()", "")
		},
		"failed head passed": func(s *sqlTexts) {
			replace(&s.page, "and h.blocks and (h.lane", "and false and (h.lane")
			replace(&s.move, "c.blocks, c.blocks", "c.blocks, false")
		},
		"nobody follows a head": func(s *sqlTexts) {
			replace(&s.promote, "and h.waits", "and false")
		},
		// The rows in front are then all in hand, it seems.
		"any row of a key is its first": func(s *sqlTexts) {
			replace(&s.due, "and (h.lane is null or", "and (true or")
			replace(&s.move, "c.blocks, c.blocks", "c.blocks, false")
		},
		"prune by age": func(s *sqlTexts) {
			replace(&s.prune, visible, "")
			replace(&s.prune, `and q.xid < (select pg_snapshot_xmax(prev) from "unecho_outbox_shard" where shard = 0)`, "")
		},
		// What is below the position may have committed after it was passed.
		"prune by id": func(s *sqlTexts) {
			replace(&s.prune, visible, "and q.id <= (select max(l.id) from unecho_outbox l, unecho_outbox_shard p where pg_visible_in_snapshot(l.xid, p.prev))")
		},
	}
	for name, breaks := range statement {
		t.Run(name, func(t *testing.T) {
			intact := statements((*Options)(nil).names())
			breaks(&intact) // here a statement that has changed is no bug caught
			suite(t, name, func(t testing.TB) outboxtest.Fixture {
				f := open(t)
				f.break_ = breaks
				return f
			})
		})
	}
	for name, wrap := range map[string]func(*Store) outbox.Store{
		"marked before the ack": func(s *Store) outbox.Store { return &settlesEarly{Store: s} },
		"an outage counted":     func(s *Store) outbox.Store { return &countsReads{Store: s, n: map[int64]int{}} },
		// Rows that are due again and again take the whole batch.
		"held rows before all others": func(s *Store) outbox.Store { return &heldFirst{s} },
		"a lost answer marked sent":   func(s *Store) outbox.Store { return &allSent{s} },
	} {
		t.Run(name, func(t *testing.T) {
			suite(t, name, func(t testing.TB) outboxtest.Fixture { return wrapped{open(t), wrap} })
		})
	}
}

func suite(t *testing.T, name string, open func(t testing.TB) outboxtest.Fixture) {
	var runs []func(testing.TB)
	// From the end: what sees most of these bugs is there, and is quick.
	for _, c := range slices.Backward(outboxtest.Cases()) {
		if !strings.Contains(c.Name, "backlog") && !strings.Contains(c.Name, "bytes") { // the long ones
			runs = append(runs, func(t testing.TB) { c.Func(t, open(t)) })
		}
	}
	planted.Caught(t, "outboxtest/"+name, runs...)
}

type wrapped struct {
	*fixture
	wrap func(*Store) outbox.Store
}

func (w wrapped) Store(t testing.TB) outbox.Store { return w.wrap(w.fixture.Store(t).(*Store)) }

// settlesEarly marks what it hands out.
type settlesEarly struct{ *Store }

func (s *settlesEarly) Read(ctx context.Context, l outbox.Lease, limit int) ([]outbox.Row, error) {
	rows, err := s.Store.Read(ctx, l, limit)
	if err != nil || len(rows) == 0 {
		return rows, err
	}
	ss := make([]outbox.Settlement, len(rows))
	for i := range rows {
		ss[i] = outbox.Settlement{Row: rows[i], Action: outbox.Sent}
	}
	return rows, s.Store.Settle(ctx, l, ss)
}

func (s *settlesEarly) Settle(context.Context, outbox.Lease, []outbox.Settlement) error { return nil }

// countsReads spends an attempt on every look at a row.
type countsReads struct {
	*Store
	n map[int64]int
}

func (s *countsReads) Read(ctx context.Context, l outbox.Lease, limit int) ([]outbox.Row, error) {
	rows, err := s.Store.Read(ctx, l, limit)
	spent := false
	ss := make([]outbox.Settlement, len(rows))
	for i, row := range rows {
		s.n[row.ID]++
		spent = spent || s.n[row.ID] > 5
		ss[i] = outbox.Settlement{Row: row, Action: outbox.Park, Reason: "attempts"}
	}
	if err != nil || !spent {
		return rows, err
	}
	return nil, s.Store.Settle(ctx, l, ss)
}

// heldFirst has no room for other rows while there are enough held ones.
type heldFirst struct{ *Store }

func (s *heldFirst) Read(ctx context.Context, l outbox.Lease, limit int) ([]outbox.Row, error) {
	if err := s.load(ctx, l); err != nil {
		return nil, err
	}
	if held, err := s.readHeld(ctx, limit); err != nil || len(held) == limit {
		return held, err
	}
	return s.Store.Read(ctx, l, limit)
}

// allSent takes every answer for an acknowledgement.
type allSent struct{ *Store }

func (s *allSent) Settle(ctx context.Context, l outbox.Lease, ss []outbox.Settlement) error {
	for i := range ss {
		ss[i].Action = outbox.Sent
	}
	return s.Store.Settle(ctx, l, ss)
}

// A dump restored into a younger cluster has a position and rows from its
// future: that is said, and can be mended.
func TestRestoredFromADump(t *testing.T) {
	f := open(t)
	ctx, b := context.Background(), &outboxtest.Broker{}
	exec := func(sql string) {
		t.Helper()
		if _, err := f.pool.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	write := func(id string) {
		t.Helper()
		tx := f.Begin(t)
		if err := tx.Write(outboxtest.Event(id, "k")); err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	write("settled")
	r := outbox.NewRelay(f.Store(t), b, &outbox.RelayOptions{Lease: 300 * time.Millisecond})
	if n, err := r.Step(ctx); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	write("open")
	exec("update unecho_outbox set xid = (xid::text::bigint + 1000000000)::text::xid8")
	exec("update unecho_outbox_shard set lease_until = '-infinity', prev = (pg_snapshot_xmin(prev)::text::bigint + 1000000000 || ':' || pg_snapshot_xmax(prev)::text::bigint + 1000000000 || ':')::pg_snapshot")
	s := NewStore(f.pool, nil)
	r = outbox.NewRelay(s, b, nil)
	if _, err := r.Step(ctx); err == nil || !strings.Contains(err.Error(), "Rebase") {
		t.Fatalf("step on a restored outbox: %v, want an error that names Rebase", err)
	}
	if err := s.Rebase(ctx); err != nil {
		t.Fatal(err)
	}
	write("new")
	r = outbox.NewRelay(s, b, nil)
	for range 3 {
		if _, err := r.Step(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if got := strings.Join(b.IDs(), " "); got != "settled open new" {
		t.Errorf("published %q", got)
	}
}

// A prepared transaction is open for as long as nobody ends it, and must hold
// up nothing but its own row.
func TestB38PreparedTransaction(t *testing.T) {
	f := open(t)
	ctx, b := context.Background(), &outboxtest.Broker{}
	conn, err := f.pool.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	if _, err := conn.Exec(ctx, "begin; insert into business values (2); insert into unecho_outbox (topic, event_id, source, type, subject, content_type, data_schema, time, meta) values ('t', 'late', 's', 't', '', '', '', now(), '\\x010000'); prepare transaction 'unecho_"+t.Name()+"'"); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = conn.Exec(ctx, "rollback prepared 'unecho_"+t.Name()+"'") }()
	tx := f.Begin(t)
	if err := tx.Write(outboxtest.Event("a", "k")); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	r := outbox.NewRelay(f.Store(t), b, nil)
	if n, err := r.Step(ctx); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	if _, err := conn.Exec(ctx, "commit prepared 'unecho_"+t.Name()+"'"); err != nil {
		t.Fatal(err)
	}
	if n, err := r.Step(ctx); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	if got := strings.Join(b.IDs(), " "); got != "a late" {
		t.Errorf("published %q", got)
	}
}
