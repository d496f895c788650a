package pgdedupe_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/dedupe/storetest"
)

var allModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec,
	pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeDescribeExec,
}

func TestPipelinedConformance(t *testing.T) {
	for _, mode := range allModes {
		t.Run(mode.String(), func(t *testing.T) { storetest.Run(t, openPipelined(pgdedupe.Options{}, mode)) })
	}
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run("isolation="+string(level), func(t *testing.T) {
			storetest.Run(t, openPipelined(pgdedupe.Options{Isolation: level}, pgx.QueryExecModeCacheStatement))
		})
	}
}

// pipelined implements storetest.Harness and all of its powers but Aborter: a
// statement fails when the handler is gone.
type pipelined struct {
	base
	store dedupe.Store[*pgx.Batch]
}

func openPipelined(o pgdedupe.Options, mode pgx.QueryExecMode) storetest.Open[*pgx.Batch] {
	return func(tb testing.TB, s storetest.Settings) storetest.Harness[*pgx.Batch] {
		tb.Helper()
		h := &pipelined{base: openBase(tb, &o, mode, s)}
		h.Implicit()
		if _, err := h.direct.Exec(tb.Context(), `create procedure ends() language plpgsql as 'begin commit; end'`); err != nil {
			tb.Fatal(err)
		}
		h.store = pgdedupe.NewPipelinedStore(h.pool, &o)
		return h
	}
}

func (h *pipelined) Store() dedupe.Store[*pgx.Batch] { return h.store }

func (h *pipelined) Eager() {}

func (h *pipelined) Add(_ context.Context, b *pgx.Batch, name string) error {
	b.Queue("insert into effect (name) values ($1)", name)
	return nil
}

func (h *pipelined) Ends() []storetest.End[*pgx.Batch] {
	queue := func(sql string) storetest.End[*pgx.Batch] {
		return storetest.End[*pgx.Batch]{Name: sql, Do: func(_ context.Context, b *pgx.Batch) error {
			b.Queue(sql)
			return nil
		}}
	}
	return []storetest.End[*pgx.Batch]{
		queue("commit"), queue("/* */ rollback"), queue("end"), queue("begin"), queue("commit and chain"), queue("prepare transaction 'x'"),
		{Name: "callback", Do: func(_ context.Context, b *pgx.Batch) error {
			b.Queue("select 1").Exec(func(pgconn.CommandTag) error { return errors.New("it is too late to say so") })
			return nil
		}},
	}
}

// A batch goes out in one round trip, whatever it holds, and nothing goes out
// before the handler has returned.
func TestPipelinedIsOneRoundTrip(t *testing.T) {
	h := openPipelined(pgdedupe.Options{}, pgx.QueryExecModeCacheStatement)(t, storetest.Settings{Conns: 1}).(*pipelined)
	handler := func(_ context.Context, b *pgx.Batch) ([]byte, error) {
		for range 10 {
			b.Queue("insert into effect (name) values ($1)", "e")
		}
		return []byte("reply"), nil
	}
	for i, want := range []int{-1, 1, 1} { // the first one prepares
		before := h.Turns()
		if res, err := h.store.Once(t.Context(), claim(string(rune('a'+i))), handler); err != nil || res.Outcome != dedupe.Processed {
			t.Fatalf("Once: %v, %v", res.Outcome, err)
		}
		if turns := h.Turns() - before; want > 0 && turns != want {
			t.Errorf("claim %d took %d round trips, want %d", i, turns, want)
		}
	}
	if n := h.Count(t, "e"); n != 30 {
		t.Errorf("%d effects, want 30", n)
	}
}

// What fails undoes everything, the claim included, whoever finds it out.
func TestPipelinedFailures(t *testing.T) {
	for _, mode := range allModes {
		t.Run(mode.String(), func(t *testing.T) {
			h := openPipelined(pgdedupe.Options{}, mode)(t, storetest.Settings{Conns: 1}).(*pipelined)
			if _, err := h.direct.Exec(t.Context(), `create table one (n int primary key);
				create table parent (n int primary key);
				create table child (n int references parent deferrable initially deferred);
				insert into one values (1)`); err != nil {
				t.Fatal(err)
			}
			for name, tc := range map[string]struct {
				sql  string
				args []any
				code string // of the server; empty is an error of the client
			}{
				"unique":   {"insert into one values (1)", nil, "23505"},
				"missing":  {"insert into nowhere values (1)", nil, "42P01"},
				"deferred": {"insert into child values (7)", nil, "23503"},
				"argument": {"insert into one values ($1)", []any{struct{}{}}, ""},
				"the key":  {"insert into unecho_key (key, done_at, expires_at, fingerprint) values (gen_random_uuid(), now(), now(), null)", nil, "23502"},
			} {
				c := claim(name)
				_, err := h.store.Once(t.Context(), c, func(_ context.Context, b *pgx.Batch) ([]byte, error) {
					b.Queue("insert into effect (name) values ($1)", name)
					b.Queue(tc.sql, tc.args...)
					b.Queue("insert into effect (name) values ($1)", name)
					return []byte("reply"), nil
				})
				var pg *pgconn.PgError
				code := ""
				if errors.As(err, &pg) {
					code = pg.Code
				}
				if err == nil || code != tc.code && tc.code != "" {
					t.Errorf("%s: %v, want the code %q", name, err, tc.code)
				}
				for _, class := range []error{dedupe.ErrUnavailable, dedupe.ErrUnknownOutcome, dedupe.ErrInProgress, dedupe.ErrScope} {
					if errors.Is(err, class) {
						t.Errorf("%s: %v, it is the handler's own error and nothing else", name, err)
					}
				}
				if n := h.Count(t, name); n != 0 {
					t.Errorf("%s: %d effects are committed", name, n)
				}
				res, err := h.store.Once(t.Context(), c, func(_ context.Context, b *pgx.Batch) ([]byte, error) { return nil, h.Add(t.Context(), b, name) })
				if err != nil || res.Outcome != dedupe.Processed {
					t.Errorf("%s: the redelivery: %v, %v", name, res.Outcome, err)
				}
			}
			_, err := h.store.Once(t.Context(), claim("procedure"), func(_ context.Context, b *pgx.Batch) ([]byte, error) {
				b.Queue("call ends()")
				return nil, nil
			})
			if err == nil || errors.Is(err, dedupe.ErrUnknownOutcome) {
				t.Errorf("a procedure that commits: %v", err)
			}
		})
	}
}

// A duplicate's statements are not executed, even if they would fail.
func TestPipelinedDuplicateExecutesNothing(t *testing.T) {
	h := openPipelined(pgdedupe.Options{}, pgx.QueryExecModeExec)(t, storetest.Settings{}).(*pipelined)
	if _, err := h.direct.Exec(t.Context(), "create sequence calls"); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		res, err := h.store.Once(t.Context(), claim("1"), func(_ context.Context, b *pgx.Batch) ([]byte, error) {
			b.Queue("select nextval('calls')") // not even what no rollback undoes
			return []byte("reply"), nil
		})
		if want := []dedupe.Outcome{dedupe.Processed, dedupe.Duplicate}[min(i, 1)]; err != nil || res.Outcome != want || string(res.Reply) != "reply" {
			t.Errorf("claim %d: %v, %q, %v; want %v", i, res.Outcome, res.Reply, err, want)
		}
	}
	var calls int
	if err := h.direct.QueryRow(t.Context(), "select last_value from calls").Scan(&calls); err != nil || calls != 1 {
		t.Errorf("the statement ran %d times, %v; want once", calls, err)
	}
}
