package pgoutbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/outboxtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func (f *fixture) write(t testing.TB, msgs ...*envelope.Message) {
	t.Helper()
	tx := f.Begin(t)
	if err := errors.Join(tx.Write(msgs...), tx.Commit()); err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	if _, err := f.pool.Exec(context.Background(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

func step(t testing.TB, r *outbox.Relay, want int) {
	t.Helper()
	if n, err := r.Step(context.Background()); n != want || err != nil {
		t.Fatalf("step: %d rows, %v, want %d", n, err, want)
	}
}

func published(t testing.TB, b *outboxtest.Broker, want string) {
	t.Helper()
	if got := strings.Join(b.IDs(), " "); got != want {
		t.Errorf("published %q, want %q", got, want)
	}
}

// Rows of a window that was looked at are deleted by hand before they are
// read: one, all of a page, and all there are.
func TestRowsDeletedByHand(t *testing.T) {
	f, b := open(t), &outboxtest.Broker{}
	r := outbox.NewRelay(f.Store(t), b, &outbox.RelayOptions{Batch: 2})
	var msgs []*envelope.Message
	for i := range 10 {
		msgs = append(msgs, outboxtest.Event(fmt.Sprint(i), "k"))
	}
	f.write(t, msgs...)
	step(t, r, 2) // 0 and 1; the places of all ten are known now
	f.exec(t, "delete from unecho_outbox where event_id in ('2', '4', '5', '6')")
	step(t, r, 1) // of 2 and 3
	step(t, r, 2) // 4 and 5 are gone, so it looks again
	published(t, b, "0 1 3 7 8")
	f.exec(t, "delete from unecho_outbox where event_id = '9'")
	step(t, r, 0)
	f.write(t, outboxtest.Event("new", "k"))
	step(t, r, 1)
	published(t, b, "0 1 3 7 8 new")
}

// A row that no program of ours wrote stops its key and nothing else, and can
// be dropped.
func TestUnreadableRow(t *testing.T) {
	f, b := open(t), &outboxtest.Broker{}
	r := outbox.NewRelay(f.Store(t), b, nil)
	f.write(t, outboxtest.Event("a1", "a"), outboxtest.Event("b1", "b"), outboxtest.Event("a2", "a"))
	f.exec(t, "update unecho_outbox set meta = '\\x' where event_id = 'a1'")
	step(t, r, 3)
	published(t, b, "b1")
	s := NewStore(f.pool, nil)
	ps, err := s.Parked(t.Context(), 0, 10)
	if err != nil || len(ps) != 1 || !strings.Contains(ps[0].Reason, "cannot be read") {
		t.Fatalf("parked: %+v, %v", ps, err)
	}
	if ok, err := s.Drop(t.Context(), ps[0].ID); !ok || err != nil {
		t.Fatal(ok, err)
	}
	step(t, r, 1)
	published(t, b, "b1 a2")
}

// Times are those that were written, in UTC, whatever zone the session and the
// server have.
func TestTimesComeBackInUTC(t *testing.T) {
	f, b := open(t), &outboxtest.Broker{}
	f.exec(t, "set time zone 'Asia/Kathmandu'")
	for i, at := range []time.Time{
		time.Date(2026, 3, 29, 2, 30, 0, 123456000, time.FixedZone("", 5*3600)),
		time.Date(1, 1, 1, 0, 0, 1, 0, time.UTC),
		time.Date(9999, 12, 31, 23, 59, 59, 999999000, time.UTC),
	} {
		m := outboxtest.Event(fmt.Sprint(i), "")
		m.Time = at
		f.write(t, m)
	}
	var got []time.Time
	b.Answer = func(m *envelope.Message) error { got = append(got, m.Time); return nil }
	step(t, outbox.NewRelay(f.Store(t), b, nil), 3)
	for i, want := range []string{"2026-03-28T21:30:00.123456Z", "0001-01-01T00:00:01Z", "9999-12-31T23:59:59.999999Z"} {
		if s := got[i].Format(time.RFC3339Nano); s != want {
			t.Errorf("time %d came back as %s, want %s", i, s, want)
		}
	}
}

// A schema of any name is a schema, and never a statement.
func TestSchemaNames(t *testing.T) {
	base := testenv.Postgres(t)
	for _, name := range []string{"x; drop table business", "select", "Ünï cödé", strings.Repeat("l", 57)} {
		schema := testenv.Name("t") + name
		schema = schema[:min(len(schema), 63)]
		t.Run(name, func(t *testing.T) {
			pool := testenv.PoolOf(t, base, 4)
			t.Cleanup(func() {
				_, _ = pool.Exec(context.Background(), "drop schema if exists "+pgx.Identifier{schema}.Sanitize()+" cascade")
			})
			inSchema(t, pool, &Options{Schema: schema})
		})
	}
	for _, name := range []string{`a"b`, "a'b", "a\x00b", strings.Repeat("l", 64), `a\b`} {
		if err := Migrate(t.Context(), testenv.PoolOf(t, base, 1), &Options{Schema: name}); err == nil {
			t.Errorf("migrated a schema %q", name)
		}
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("a store in schema %q", name)
				}
			}()
			NewStore(testenv.PoolOf(t, base, 1), &Options{Schema: name})
		}()
	}
}

func inSchema(t *testing.T, pool *pgxpool.Pool, o *Options) {
	t.Helper()
	if err := errors.Join(Migrate(t.Context(), pool, o), Validate(t.Context(), pool, o)); err != nil {
		t.Fatal(err)
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(NewWriter(o, nil).Write(t.Context(), tx, outboxtest.Event("a", "k")), tx.Commit(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	b, s := &outboxtest.Broker{}, NewStore(pool, o)
	step(t, outbox.NewRelay(s, b, nil), 1)
	published(t, b, "a")
	if n, err := s.Prune(t.Context(), 0, 10); n != 1 || err != nil {
		t.Errorf("prune: %d, %v", n, err)
	}
}

// The writer of many rows keeps their order in one statement.
func TestOrderWithinACall(t *testing.T) {
	f, b := open(t), &outboxtest.Broker{}
	var msgs []*envelope.Message
	for i := range 3000 {
		msgs = append(msgs, outboxtest.Event(fmt.Sprint(i), "k"))
	}
	f.write(t, msgs...)
	step(t, outbox.NewRelay(f.Store(t), b, &outbox.RelayOptions{Batch: 5000}), 3000)
	for i, id := range b.IDs() {
		if id != fmt.Sprint(i) {
			t.Fatalf("at place %d is %s", i, id)
		}
	}
}

// Settle of a batch that was read under another epoch, or after an error, does
// nothing.
func TestStaleSettle(t *testing.T) {
	f, ctx := open(t), context.Background()
	f.write(t, outboxtest.Event("a", "k"))
	s := NewStore(f.pool, nil)
	l, err := s.Acquire(ctx, "me", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	rows, err := s.Read(ctx, l, 10)
	if err != nil {
		t.Fatal(err)
	}
	ss := []outbox.Settlement{{Row: rows[0], Action: outbox.Sent}}
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if err := s.Settle(cancelled, l, ss); !errors.Is(err, context.Canceled) {
		t.Fatalf("settle: %v", err)
	}
	if err := s.Settle(ctx, l, ss); !errors.Is(err, outbox.ErrFenced) {
		t.Errorf("settle of a batch whose position is not known any more: %v", err)
	}
	if rows, err = s.Read(ctx, l, 10); err != nil || len(rows) != 1 {
		t.Fatalf("read: %d rows, %v", len(rows), err)
	}
	if err := s.Settle(ctx, outbox.Lease{Epoch: l.Epoch + 1, For: time.Minute}, ss); !errors.Is(err, outbox.ErrFenced) {
		t.Errorf("settle under another epoch: %v", err)
	}
	if err := s.Settle(ctx, l, ss); err != nil {
		t.Error(err)
	}
	if rows, err = s.Read(ctx, l, 10); err != nil || len(rows) != 0 {
		t.Errorf("read: %d rows, %v", len(rows), err)
	}
}
