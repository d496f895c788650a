package pgoutbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/outboxtest"
)

// parkedKey is an outbox in which the head of a key is parked, with n rows
// behind it.
func parkedKey(t testing.TB, n int) (*fixture, *outboxtest.Broker, *outbox.Relay) {
	t.Helper()
	f, b := open(t), &outboxtest.Broker{}
	b.Answer = func(m *envelope.Message) error {
		if string(m.Key) == "parked" {
			return brokers.ErrRejected
		}
		return nil
	}
	r := outbox.NewRelay(f.Store(t), b, &outbox.RelayOptions{Lease: time.Minute})
	for done := 0; done <= n; {
		var msgs []*envelope.Message
		for ; done <= n && len(msgs) < 500; done++ {
			msgs = append(msgs, outboxtest.Event(fmt.Sprint(done), "parked"))
		}
		f.write(t, msgs...)
		step(t, r, len(msgs))
	}
	return f, b, r
}

// blocks is how many pages of the database a statement looks at.
func (f *fixture) blocks(t testing.TB, sql string, args ...any) int {
	t.Helper()
	var text []byte
	if err := f.pool.QueryRow(context.Background(), "explain (analyze, buffers, format json) "+sql, args...).Scan(&text); err != nil {
		t.Fatal(err)
	}
	var plans []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	if err := json.Unmarshal(text, &plans); err != nil || len(plans) != 1 {
		t.Fatalf("%v in %s", err, text)
	}
	return plans[0].Plan.Hit + plans[0].Plan.Read
}

// However many rows stand behind a parked one, and whether the planner knows
// of them or not, nobody else pays for them.
func TestRowsBehindAParkedOneCostNothing(t *testing.T) {
	f, b, r := parkedKey(t, 4000)
	s := NewStore(f.pool, nil)
	for _, when := range []string{"before", "after"} {
		f.write(t, outboxtest.Event(when, "other"))
		var at place
		if err := f.pool.QueryRow(t.Context(), "select xid::text, id from unecho_outbox order by id desc limit 1").Scan(&at.xid, &at.id); err != nil {
			t.Fatal(err)
		}
		if n := f.blocks(t, s.sql.due, 500, maxBytes); n > 20 {
			t.Errorf("%s an analyze, to find the held rows that are due takes %d pages", when, n)
		}
		if n := f.blocks(t, s.sql.page, []string{at.xid}, []int64{at.id}, maxBytes); n > 20 {
			t.Errorf("%s an analyze, to read a row takes %d pages", when, n)
		}
		step(t, r, 1)
		f.exec(t, "analyze unecho_outbox, unecho_outbox_held")
	}
	published(t, b, "before after")
}

// Rows that are settled and kept cost an idle relay nothing, if they came in
// one transaction, too, and while writers are open.
func TestKeptRowsCostNothing(t *testing.T) {
	f := open(t)
	late := f.Begin(t)
	if err := late.Write(outboxtest.Event("late", "")); err != nil {
		t.Fatal(err)
	}
	f.exec(t, `insert into unecho_outbox (topic, event_id, source, type, subject, content_type, data_schema, time, meta)
		select 't', i::text, 's', 't', '', '', '', now(), '\x010000' from generate_series(1, 20000) i`)
	var now string
	if err := f.pool.QueryRow(t.Context(), "select pg_current_snapshot()::text").Scan(&now); err != nil {
		t.Fatal(err)
	}
	for _, when := range []string{"before", "after"} {
		if n := f.blocks(t, NewStore(f.pool, nil).sql.window, now, now, 0, maxChunk); n > 30 {
			t.Errorf("%s an analyze, a look for new rows takes %d pages", when, n)
		}
		f.exec(t, "analyze unecho_outbox")
	}
}

// All rows behind a head follow it when it is let go.
func TestManyRowsFollowTheirHead(t *testing.T) {
	f, b, r := parkedKey(t, 1200)
	b.SetAnswer(nil)
	ps, err := NewStore(f.pool, nil).Parked(t.Context(), 0, 10)
	if err != nil || len(ps) != 1 {
		t.Fatalf("parked: %+v, %v", ps, err)
	}
	if ok, err := NewStore(f.pool, nil).Requeue(t.Context(), ps[0].ID); !ok || err != nil {
		t.Fatal(ok, err)
	}
	step(t, r, 500)
	step(t, r, 500)
	step(t, r, 201)
	for i, id := range b.IDs() {
		if id != fmt.Sprint(i) {
			t.Fatalf("at place %d is %s", i, id)
		}
	}
}

// While a settlement puts a row behind a parked one, an operator drops that:
// neither sees what the other does. Afterwards the row must be free to go.
func TestDropWhileARowGoesBehind(t *testing.T) {
	f, b, _ := parkedKey(t, 0)
	b.SetAnswer(nil)
	f.write(t, outboxtest.Event("behind", "parked"))
	f.exec(t, "update unecho_outbox_shard set lease_until = '-infinity'")
	ctx, name := t.Context(), testenv.Name("drop")
	s := NewStore(f.with(t, func(c *pgx.ConnConfig) { c.RuntimeParams["application_name"] = name }), nil)
	ps, err := s.Parked(ctx, 0, 10)
	if err != nil || len(ps) != 1 {
		t.Fatalf("parked: %+v, %v", ps, err)
	}
	dropped := make(chan error, 1)
	drop := sync.OnceFunc(func() {
		go func() {
			ok, err := s.Drop(ctx, ps[0].ID)
			if err == nil && !ok {
				err = errors.New("the parked row was not found")
			}
			dropped <- err
		}()
		testenv.Within(t, 10*time.Second, "the drop has ended, or waits", func() bool {
			var waits bool
			err := f.pool.QueryRow(ctx, "select exists (select 1 from pg_stat_activity where application_name = $1 and wait_event_type = 'Lock')", name).Scan(&waits)
			return err == nil && (waits || len(dropped) == 1)
		})
	})
	r := outbox.NewRelay(NewStore(f.with(t, func(c *pgx.ConnConfig) { c.Tracer = beforeCommit(drop) }), nil), b, nil)
	step(t, r, 1) // it goes behind, and is still blocked
	if err := <-dropped; err != nil {
		t.Fatal(err)
	}
	step(t, r, 1)
	published(t, b, "behind")
}

// with is a pool on the same tables whose connections are changed.
func (f *fixture) with(t testing.TB, change func(c *pgx.ConnConfig)) *pgxpool.Pool {
	t.Helper()
	c := f.pool.Config()
	change(c.ConnConfig)
	pool, err := pgxpool.NewWithConfig(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// beforeCommit is called when a commit is about to be sent.
type beforeCommit func()

func (f beforeCommit) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	if strings.EqualFold(d.SQL, "commit") {
		f()
	}
	return ctx
}

func (beforeCommit) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
