package pgparking_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/parkingtest"
	"github.com/unecho/unecho/consumer/pgparking"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fixture is a lot in a schema of the test's own.
type fixture struct {
	t    testing.TB
	url  string
	pool *pgxpool.Pool
	lot  *pgparking.Lot
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	url := testenv.SchemaURL(t)
	f := &fixture{t: t, url: url, pool: testenv.PoolOf(t, url, 8)}
	f.lot = pgparking.NewLot(f.pool, nil)
	if err := pgparking.Migrate(t.Context(), f.pool, nil); err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *fixture) exec(sql string, args ...any) {
	f.t.Helper()
	if _, err := f.pool.Exec(f.t.Context(), sql, args...); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) wantInt(want int, sql string) {
	f.t.Helper()
	var n int
	if err := f.pool.QueryRow(context.Background(), sql).Scan(&n); err != nil || n != want {
		f.t.Errorf("%s: %d, %v; want %d", sql, n, err, want)
	}
}

// wire is an event as Kafka hands it over.
func wire(t testing.TB, id, body string) *envelope.Message {
	t.Helper()
	m, err := envelope.Kafka.Encode(&envelope.Message{ID: id, Source: "/shop", Type: "placed", Topic: "orders", Key: []byte("c"), Body: []byte(body),
		Time: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)}, envelope.Binary)
	if err != nil {
		t.Fatal(err)
	}
	m.Position = "orders/0/" + id
	return m
}

var errBoom = errors.New("boom")

func failure(m *envelope.Message, attempts int, err error) *consumer.Failure {
	return &consumer.Failure{Message: m, Class: consumer.ClassFailed, Reason: "failed", Attempts: attempts, Err: err}
}

// park parks a message for billing and returns its record.
func (f *fixture) park(m *envelope.Message) *consumer.Parked {
	f.t.Helper()
	if err := consumer.ParkIn(f.lot, "billing")(f.t.Context(), failure(m, 10, errBoom)); err != nil {
		f.t.Fatal(err)
	}
	return f.find(f.waiting()[len(f.waiting())-1])
}

func (f *fixture) waiting() (ids []string) {
	f.t.Helper()
	page, err := f.lot.List(f.t.Context(), consumer.ParkedFilter{})
	if err != nil {
		f.t.Fatal(err)
	}
	for _, p := range page.Records {
		ids = append(ids, p.ID)
	}
	return ids
}

func (f *fixture) find(id string) *consumer.Parked {
	f.t.Helper()
	p, err := f.lot.Find(f.t.Context(), id)
	if err != nil {
		f.t.Fatal(err)
	}
	return p
}

func TestConformance(t *testing.T) {
	parkingtest.RunLot(t, func(t testing.TB) consumer.ParkingLot { return newFixture(t).lot })
}

func TestCounts(t *testing.T) {
	f := newFixture(t)
	oldest := f.park(wire(t, "1", "x"))
	discarded := f.park(wire(t, "2", "x"))
	f.park(wire(t, "3", "x"))
	f.discard(discarded.ID)
	c, err := f.lot.Counts(t.Context())
	if err != nil || c.States[consumer.ParkedWaiting] != 2 || c.States[consumer.ParkedDiscarded] != 1 || len(c.States) != 5 || !c.Oldest.Equal(oldest.ParkedAt) {
		t.Errorf("counts %+v, %v", c, err)
	}
}

// What waits stays, however old; what is settled goes by age.
func TestPruneSparesWhatWaits(t *testing.T) {
	f := newFixture(t)
	for i := range 6 {
		f.park(wire(t, fmt.Sprint(i), "x"))
	}
	ids := f.waiting()
	if err := consumer.DiscardParked(t.Context(), f.lot, ids[:4]...); err != nil {
		t.Fatal(err)
	}
	f.exec("update unecho_parked set parked_at = now() - interval '9 years', last_at = now() - interval '9 years', settled_at = settled_at - interval '31 days'")
	f.exec("update unecho_parked set settled_at = now() - interval '29 days' where id = $1", ids[0])
	f.exec("update unecho_parked set last_at = now() where id = $1", ids[1]) // it came again
	counter := pgparking.NewStartCounter(f.pool, nil)
	if _, err := counter.Start(t.Context(), []string{"old", "new"}, 1000); err != nil {
		t.Fatal(err)
	}
	f.exec("update unecho_start set started_at = now() - interval '8 days' where readable = 'old'")
	if n, err := pgparking.Prune(t.Context(), f.pool, nil, 1); n != 1 || err != nil {
		t.Errorf("pruned %d with a limit of 1, %v", n, err)
	}
	if n, err := pgparking.Prune(t.Context(), f.pool, nil, 0); n != 2 || err != nil {
		t.Errorf("pruned %d, %v; want 2", n, err)
	}
	f.wantInt(4, "select count(*) from unecho_parked")
	f.wantInt(2, "select count(*) from unecho_parked where state = 'parked'")
	f.wantInt(1, "select count(*) from unecho_start")
}

// A program needs to read and write two tables, and no privilege to create any.
func TestRuntimeRoleNeedsNoDDL(t *testing.T) {
	f := newFixture(t)
	role := strings.ToLower(testenv.Name("role"))
	name := pgx.Identifier{role}.Sanitize()
	u, err := url.Parse(f.url)
	if err != nil {
		t.Fatal(err)
	}
	f.exec("create role " + name + " login")
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, _ = f.pool.Exec(ctx, "drop owned by "+name)
		_, _ = f.pool.Exec(ctx, "drop role "+name)
	})
	f.exec("grant usage on schema " + pgx.Identifier{u.Query().Get("search_path")}.Sanitize() + " to " + name)
	f.exec("grant select, insert, update, delete on unecho_parked, unecho_start to " + name)
	f.exec("grant select on unecho_migration to " + name)
	u.User = url.User(role)
	pool := testenv.PoolOf(t, u.String(), 2)
	if _, err := pool.Exec(t.Context(), "create table mine (n int)"); err == nil {
		t.Fatal("the role may create tables, so this test shows nothing")
	}
	ctx := t.Context()
	if err := errors.Join(pgparking.Migrate(ctx, pool, nil), pgparking.Validate(ctx, pool, nil)); err != nil {
		t.Error(err)
	}
	lot, counter := pgparking.NewLot(pool, nil), pgparking.NewStartCounter(pool, nil)
	err = consumer.ParkIn(lot, "billing")(ctx, failure(wire(t, "1", "x"), 1, errBoom))
	id := f.waiting()[0]
	_, e1 := consumer.Edit(ctx, lot, id, func(m *envelope.Message) error { m.Body = []byte("y"); return nil }, nil)
	_, e2 := lot.List(ctx, consumer.ParkedFilter{})
	_, e3 := lot.Counts(ctx)
	_, e4 := counter.Start(ctx, []string{"a"}, 1000)
	_, e5 := pgparking.Prune(ctx, pool, nil, 0)
	if err := errors.Join(err, e1, e2, e3, e4, counter.End(ctx, []string{"a"}), e5, consumer.DiscardParked(ctx, lot, f.waiting()[0])); err != nil {
		t.Error(err)
	}
}

func TestSchemas(t *testing.T) {
	pool := testenv.Pool(t, 2)
	lot := pgparking.NewLot(pool, nil)
	if _, err := lot.Find(t.Context(), "x"); !errors.Is(err, dedupe.ErrUnavailable) || !strings.Contains(err.Error(), "Migrate") {
		t.Errorf("without tables: %v, want ErrUnavailable, and what to do", err)
	}
	if err := pgparking.Validate(t.Context(), pool, nil); err == nil {
		t.Error("Validate without tables is no error")
	}
	if _, err := pool.Exec(t.Context(), pgparking.SQL(nil)); err != nil {
		t.Fatal(err)
	}
	if err := pgparking.Validate(t.Context(), pool, nil); err != nil {
		t.Error(err)
	}
	if _, err := lot.Find(t.Context(), "x"); !errors.Is(err, consumer.ErrNotParked) {
		t.Errorf("Find: %v, want ErrNotParked", err)
	}
	for _, o := range []*pgparking.Options{{Schema: "a\x00b"}, {Timeout: -1}, {Keep: -1}, {KeepStarts: -1}} {
		_, prune := pgparking.Prune(t.Context(), pool, o, 0)
		for _, err := range []error{o.Check(), pgparking.Migrate(t.Context(), pool, o), pgparking.Validate(t.Context(), pool, o), prune} {
			if err == nil {
				t.Errorf("%+v is no error", o)
			}
		}
	}
}

// The statements work in every mode of pgx, so also through a pooler.
func TestQueryModes(t *testing.T) {
	f := newFixture(t)
	for i, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			pool := testenv.PoolOf(t, f.url+"&default_query_exec_mode="+mode, 2)
			lot, counter, ctx := pgparking.NewLot(pool, nil), pgparking.NewStartCounter(pool, nil), t.Context()
			m := wire(t, fmt.Sprint(i), "x")
			m.Header.Add("binary", []byte{0, 0xff, '\\', '\''})
			if err := consumer.ParkIn(lot, "it's")(ctx, failure(m, 1, errBoom)); err != nil {
				t.Fatal(err)
			}
			page, err := lot.List(ctx, consumer.ParkedFilter{})
			if err != nil || len(page.Records) != 1 {
				t.Fatalf("listed %d, %v", len(page.Records), err)
			}
			if p, err := lot.Find(ctx, page.Records[0].ID); err != nil || !reflect.DeepEqual(p.Message, m) {
				t.Errorf("found %+v, %v", p, err)
			}
			id, err := consumer.Edit(ctx, lot, page.Records[0].ID, func(m *envelope.Message) error { m.Body = nil; return nil }, nil)
			_, e1 := lot.Counts(ctx)
			n, e2 := counter.Start(ctx, []string{"a", "b\x00'"}, 1000)
			_, e3 := pgparking.Prune(ctx, pool, nil, 0)
			if err := errors.Join(err, e1, e2, e3, counter.End(ctx, []string{"b\x00'", "a"}), consumer.DiscardParked(ctx, lot, id)); err != nil || fmt.Sprint(n) != "[1 1]" {
				t.Errorf("%v, %v", n, err)
			}
		})
	}
	f.wantInt(0, "select count(*) from unecho_start")
}
