package consumertest_test

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	_ "modernc.org/sqlite"

	"github.com/unecho/unecho/consumer/consumertest"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/dedupe/sqldedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/planted"
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

func TestExploreAcceptsWhatIsRight(t *testing.T) {
	consumertest.Explore(t, staged, orders(t, 3)...)
	consumertest.Explore(t, balance, orders(t, 3)...)
}

func TestPlanted(t *testing.T) {
	for name, run := range map[string]func(tb testing.TB){
		"effect outside the scope": func(tb testing.TB) { consumertest.Explore(tb, careless, orders(tb, 2)...) },
		"handler that fails":       func(tb testing.TB) { consumertest.Explore(tb, failing, orders(tb, 2)...) },
		"only the first time":      func(tb testing.TB) { consumertest.Explore(tb, firstTime, orders(tb, 2)...) },
	} {
		t.Run(name, func(t *testing.T) { planted.Caught(t, "consumertest/"+name, run) })
	}
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
