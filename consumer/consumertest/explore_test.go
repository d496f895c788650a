package consumertest_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "modernc.org/sqlite"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/consumertest"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/dedupe/sqldedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/planted"
	"github.com/unecho/unecho/internal/testenv"
	"github.com/unecho/unecho/outbox/pgoutbox"
)

func orders(tb testing.TB, n int) (ms []*envelope.Message) {
	tb.Helper()
	for i := range n {
		m, err := envelope.Kafka.Encode(&envelope.Message{ID: fmt.Sprint(i), Source: "/shop", Type: "order.placed", Topic: "orders", Body: fmt.Appendf(nil, "%d", 100*(i+1))}, envelope.Binary)
		if err != nil {
			tb.Fatal(err)
		}
		ms = append(ms, m)
	}
	return ms
}

// ledger is what a handler changes outside any transaction.
type ledger struct {
	mu    sync.Mutex
	lines []string
}

func (l *ledger) add(line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, line)
}

func (l *ledger) state(testing.TB) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}

// staged has its effect in the scope: right.
func staged(testing.TB) consumertest.World[*memdedupe.Tx] {
	l := &ledger{}
	return consumertest.World[*memdedupe.Tx]{Store: memdedupe.NewStore(nil), State: l.state,
		Handler: func(_ context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
			return tx.OnCommit(func() { l.add(m.ID + " " + string(m.Body)) })
		}}
}

// balance adds up in a database: right, and any repetition would show.
func balance(tb testing.TB) consumertest.World[*sql.Tx] {
	db, err := sql.Open("sqlite", "file:"+filepath.Join(tb.TempDir(), "b.db")+"?_pragma=journal_mode(WAL)")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = db.Close() })
	if err := sqldedupe.Migrate(tb.Context(), db, sqldedupe.SQLite, nil); err != nil {
		tb.Fatal(err)
	}
	if _, err := db.ExecContext(tb.Context(), "create table account (cents integer not null); insert into account values (0)"); err != nil {
		tb.Fatal(err)
	}
	return consumertest.World[*sql.Tx]{Store: sqldedupe.NewStore(db, sqldedupe.SQLite, nil),
		Handler: func(ctx context.Context, tx *sql.Tx, m *envelope.Message) error {
			_, err := tx.ExecContext(ctx, "update account set cents = cents + cast(? as integer)", string(m.Body))
			return err
		},
		State: func(tb testing.TB) string {
			var cents int
			if err := db.QueryRowContext(tb.Context(), "select cents from account").Scan(&cents); err != nil {
				tb.Fatal(err)
			}
			return fmt.Sprint(cents)
		}}
}

// careless tells another system, without a key that this would recognise: wrong,
// and an undisturbed run does not show it.
func careless(testing.TB) consumertest.World[*memdedupe.Tx] {
	l := &ledger{}
	return consumertest.World[*memdedupe.Tx]{Store: memdedupe.NewStore(nil), State: l.state,
		Handler: func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
			l.add("mail about " + m.ID)
			return nil
		}}
}

// invoicing has its effect in PostgreSQL and tells of it through an outbox, both
// in the handler's transaction: right. Caused gives what it writes the same id at
// every run.
func invoicing(tb testing.TB) consumertest.World[pgx.Tx] {
	pool := testenv.Pool(tb, 4)
	if err := errors.Join(pgdedupe.Migrate(tb.Context(), pool, nil), pgoutbox.Migrate(tb.Context(), pool, nil)); err != nil {
		tb.Fatal(err)
	}
	if _, err := pool.Exec(tb.Context(), "create table invoice (n int generated always as identity, cents int not null)"); err != nil {
		tb.Fatal(err)
	}
	out := pgoutbox.NewWriter(nil, nil)
	return consumertest.World[pgx.Tx]{Name: "billing", Store: pgdedupe.NewStore(pool, nil),
		Handler: func(ctx context.Context, tx pgx.Tx, m *envelope.Message) error {
			if _, err := tx.Exec(ctx, "insert into invoice (cents) values ($1::text::int)", string(m.Body)); err != nil {
				return err
			}
			made, err := consumer.Caused(ctx, m, &envelope.Message{Source: "/billing", Type: "invoice.made", Topic: "invoices", Body: m.Body}, 0)
			if err != nil {
				return err
			}
			return out.Write(ctx, tx, made)
		},
		State: func(tb testing.TB) string {
			return column(tb, pool, "select cents::text from invoice order by n") + "\n" +
				column(tb, pool, "select event_id || ' ' || convert_from(body, 'UTF8') from unecho_outbox order by id")
		}}
}

// column reads a column of texts.
func column(tb testing.TB, pool *pgxpool.Pool, query string) string {
	tb.Helper()
	rows, err := pool.Query(tb.Context(), query)
	if err != nil {
		tb.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		tb.Fatal(err)
	}
	return strings.Join(lines, "\n")
}

// paying has its effect at another service, which knows a repetition by the
// derived key: right. Its handler runs again after an end behind the payment.
func paying(tb testing.TB) consumertest.World[*dedupe.Lease] {
	return payingBy(tb, func(l *dedupe.Lease) string { return l.Derive("pay", 0) }, &consumertest.TransportOptions{Operations: []string{"pay"}})
}

func payingBy(tb testing.TB, key func(*dedupe.Lease) string, o *consumertest.TransportOptions) consumertest.World[*dedupe.Lease] {
	p, pool := openPayments(tb), testenv.Pool(tb, 2)
	if err := pgdedupe.Migrate(tb.Context(), pool, nil); err != nil {
		tb.Fatal(err)
	}
	c := &http.Client{Transport: &http.Transport{}}
	if o != nil {
		o.Next = c.Transport
		c.Transport = consumertest.NewTransport(tb, o)
	}
	tb.Cleanup(c.CloseIdleConnections)
	return consumertest.World[*dedupe.Lease]{Name: "billing", Store: pgdedupe.NewLeaseStore(pool, nil), State: p.state,
		Handler: func(ctx context.Context, l *dedupe.Lease, m *envelope.Message) error {
			return pay(ctx, c, p.URL, m.ID, key(l))
		}}
}

// fresh draws a new key at every run: wrong, and nothing shows it but an end
// between the payment and the completion.
func fresh(tb testing.TB) consumertest.World[*dedupe.Lease] {
	return payingBy(tb, func(*dedupe.Lease) string { return envelope.NewID() }, nil)
}

// freshWatched is fresh, whose first call the transport refuses.
func freshWatched(tb testing.TB) consumertest.World[*dedupe.Lease] {
	return payingBy(tb, func(*dedupe.Lease) string { return envelope.NewID() }, &consumertest.TransportOptions{})
}

// onlyKnown takes an attempt for its own first one, unless it is told that an
// earlier one has vanished: it would pay again after a crash that Explore passed
// off as a failure.
func onlyKnown(tb testing.TB) consumertest.World[*dedupe.Lease] {
	l := &ledger{}
	return consumertest.World[*dedupe.Lease]{Store: memdedupe.NewLeaseStore(nil), State: l.state,
		Handler: func(_ context.Context, lease *dedupe.Lease, m *envelope.Message) error {
			if lease.Unknown && strings.Contains(l.state(tb), "paid "+m.ID) { // asks the other side
				return nil
			}
			l.add("paid " + m.ID)
			return nil
		}}
}

func TestExploreAcceptsWhatIsRight(t *testing.T) {
	consumertest.Explore(t, staged, orders(t, 3)...)
	consumertest.Explore(t, balance, orders(t, 3)...)
	consumertest.Explore(t, invoicing, orders(t, 2)...)
	consumertest.Explore(t, paying, orders(t, 2)...)
	consumertest.Explore(t, onlyKnown, orders(t, 3)...)
}

// An end behind the effect and before the completion is the one that counts for
// a lease. It is named, and no other.
func TestExploreNamesThePlace(t *testing.T) {
	r := &recording{TB: t}
	defer r.clean()
	consumertest.Explore(r, fresh, orders(t, 2)...)
	if len(r.errors) != 2 {
		t.Fatalf("told %q", r.errors)
	}
	for i, told := range r.errors {
		if want := fmt.Sprintf("ended at event %d, %s", i, consumertest.AfterHandler); !strings.Contains(told, want) {
			t.Errorf("told %q, want %q", told, want)
		}
	}
}

func TestPlanted(t *testing.T) {
	for name, run := range map[string]func(tb testing.TB){
		"effect outside the scope":   func(tb testing.TB) { consumertest.Explore(tb, careless, orders(tb, 2)...) },
		"handler that fails":         func(tb testing.TB) { consumertest.Explore(tb, failing, orders(tb, 2)...) },
		"a key drawn at every run":   func(tb testing.TB) { consumertest.Explore(tb, fresh, orders(tb, 2)...) },
		"a key that is not derived":  func(tb testing.TB) { consumertest.Explore(tb, freshWatched, orders(tb, 2)...) },
		"an outbox beside the scope": func(tb testing.TB) { consumertest.Explore(tb, beside, orders(tb, 2)...) },
		"only the first time":        func(tb testing.TB) { consumertest.Explore(tb, firstTime, orders(tb, 2)...) },
	} {
		t.Run(name, func(t *testing.T) { planted.Caught(t, "consumertest/"+name, run) })
	}
}

// beside writes to an outbox in a transaction of its own: wrong.
func beside(tb testing.TB) consumertest.World[pgx.Tx] {
	w := invoicing(tb)
	inner := w.Handler
	pool := testenv.Pool(tb, 1)
	if err := pgoutbox.Migrate(tb.Context(), pool, nil); err != nil {
		tb.Fatal(err)
	}
	out, state := pgoutbox.NewWriter(nil, nil), w.State
	w.Handler = func(ctx context.Context, tx pgx.Tx, m *envelope.Message) error {
		if err := inner(ctx, tx, m); err != nil {
			return err
		}
		return pgx.BeginFunc(ctx, pool, func(own pgx.Tx) error {
			return out.Write(ctx, own, &envelope.Message{Source: "/billing", Type: "mail.wanted", Topic: "mails", Body: m.Body})
		})
	}
	w.State = func(tb testing.TB) string {
		return state(tb) + "\n" + column(tb, pool, "select convert_from(body, 'UTF8') from unecho_outbox order by id")
	}
	return w
}

func failing(testing.TB) consumertest.World[*memdedupe.Tx] {
	w := staged(nil)
	w.Handler = func(context.Context, *memdedupe.Tx, *envelope.Message) error { return fmt.Errorf("always") }
	return w
}

// firstTime remembers in the process which events it has seen, as a cache does
// that forgets that a run may be rolled back.
func firstTime(testing.TB) consumertest.World[*memdedupe.Tx] {
	l, seen := &ledger{}, []string{}
	return consumertest.World[*memdedupe.Tx]{Store: memdedupe.NewStore(nil), State: l.state,
		Handler: func(_ context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
			if slices.Contains(seen, m.ID) {
				return nil
			}
			seen = append(seen, m.ID)
			return tx.OnCommit(func() { l.add(m.ID) })
		}}
}

// Every boundary is met, for every event.
func TestExploreMeetsEveryBoundary(t *testing.T) {
	setups, runs := 0, 0
	consumertest.Explore(t, func(tb testing.TB) consumertest.World[*memdedupe.Tx] {
		setups++
		w := staged(tb)
		inner := w.Handler
		w.Handler = func(ctx context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
			runs++
			return inner(ctx, tx, m)
		}
		return w
	}, orders(t, 3)...)
	if want := 2 + 3*len(consumertest.Boundaries()); setups != want {
		t.Errorf("%d worlds, want %d", setups, want)
	}
	// Once without a fault and once with every event twice; then each run
	// handles every event once, and one event more where the handler was undone.
	if want := 3 + 3 + 3*(3+3+4+3); runs != want {
		t.Errorf("%d handler runs, want %d", runs, want)
	}
}

// A handler is right if it does not matter where its process ends.
func ExampleExplore() {
	var t testing.TB // of your test
	setup := func(testing.TB) consumertest.World[*memdedupe.Tx] {
		total := 0
		return consumertest.World[*memdedupe.Tx]{
			Store: memdedupe.NewStore(nil),
			Handler: func(_ context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
				return tx.OnCommit(func() { total += len(m.Body) })
			},
			State: func(testing.TB) string { return fmt.Sprint(total) },
		}
	}
	if t != nil {
		consumertest.Explore(t, setup, orders(t, 10)...)
	}
	fmt.Println(len(consumertest.Boundaries()))
	// Output: 4
}
