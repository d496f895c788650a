package sqloutbox

import (
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/unecho/unecho/internal/sqlitetest"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/outboxtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func openSQLite(t testing.TB) *fixture {
	t.Helper()
	db := sqlitetest.Open(t)
	if err := Migrate(t.Context(), db); err != nil {
		t.Fatal(err)
	}
	return &fixture{db: db, writer: NewWriter(nil), store: func() outbox.Store { return NewStore(db) }}
}

// A row that no program of ours wrote stops its key and nothing else.
func TestUnreadableRow(t *testing.T) {
	f, b := openSQLite(t), &outboxtest.Broker{}
	tx := f.Begin(t)
	if err := tx.Write(outboxtest.Event("a1", "a"), outboxtest.Event("b1", "b"), outboxtest.Event("a2", "a")); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	exec(t, f.db, "update unecho_outbox set meta = x'' where event_id = 'a1'")
	if n, err := outbox.NewRelay(f.Store(t), b, nil).Step(t.Context()); n != 3 || err != nil {
		t.Fatal(n, err)
	}
	if got := strings.Join(b.IDs(), " "); got != "b1" {
		t.Errorf("published %q", got)
	}
}

// Times outside of the years that nanoseconds reach.
func TestFarTimes(t *testing.T) {
	f, ctx := openSQLite(t), t.Context()
	want := []time.Time{time.Date(1, 1, 1, 0, 0, 1, 0, time.UTC), time.Date(9999, 12, 31, 23, 59, 59, 999999000, time.UTC)}
	for _, at := range want {
		m, tx := outboxtest.Event("a", ""), f.Begin(t)
		m.Time = at
		if err := tx.Write(m); err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	s := f.Store(t)
	l, err := s.Acquire(ctx, "me", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	rows, err := s.Read(ctx, l, 10)
	if err != nil || len(rows) != 2 {
		t.Fatalf("read: %d rows, %v", len(rows), err)
	}
	for i, row := range rows {
		if !row.Message.Time.Equal(want[i]) {
			t.Errorf("%v came back as %v", want[i], row.Message.Time)
		}
	}
}

func TestPostgresWriterRefusesNames(t *testing.T) {
	for _, schema := range []string{`a"b`, "a'; drop table x; --", strings.Repeat("l", 64), "a\x00"} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("a writer for schema %q", schema)
				}
			}()
			NewPostgresWriter(schema, nil)
		}()
	}
}
