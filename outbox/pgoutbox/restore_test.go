package pgoutbox

import (
	"errors"
	"net/url"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/outboxtest"
)

// An outbox with a row that was sent, one that is parked with one behind it,
// and one that is new, goes by pg_dump into a cluster that has just begun to
// count transactions. The relay refuses to work with it until it was rebased,
// and then all that was not sent is, with what is written there.
func TestB36DumpAndRestore(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a PostgreSQL server")
	}
	f, b := open(t), &outboxtest.Broker{}
	b.Answer = func(m *envelope.Message) error {
		if m.ID == "a1" {
			return brokers.ErrRejected
		}
		return nil
	}
	old := outbox.NewRelay(f.Store(t), b, &outbox.RelayOptions{Lease: 300 * time.Millisecond})
	f.write(t, outboxtest.Event("sent", "s"), outboxtest.Event("a1", "a"), outboxtest.Event("a2", "a"))
	step(t, old, 3)
	f.write(t, outboxtest.Event("open", "o"))
	restored := f.restore(t)

	b = &outboxtest.Broker{}
	s := NewStore(restored.pool, nil)
	r := outbox.NewRelay(s, b, nil)
	if n, err := r.Step(t.Context()); !errors.Is(err, ErrRestored) {
		t.Fatalf("step on a restored outbox: %d rows, %v", n, err)
	}
	if err := s.Rebase(t.Context()); err != nil {
		t.Fatal(err)
	}
	restored.write(t, outboxtest.Event("new", "n"))
	ps, err := s.Parked(t.Context(), 0, 10)
	if err != nil || len(ps) != 1 {
		t.Fatalf("parked: %+v, %v", ps, err)
	}
	if ok, err := s.Requeue(t.Context(), ps[0].ID); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if n, err := r.Step(t.Context()); !errors.Is(err, outbox.ErrFenced) || len(b.IDs()) > 0 {
		t.Errorf("step under the lease from before: %d rows, %v, and %q published", n, err, b.IDs())
	}
	step(t, r, 4)
	step(t, r, 0)
	published(t, b, "a1 a2 open new")
}

// restore is a copy of f in a cluster of its own.
func (f *fixture) restore(t *testing.T) *fixture {
	t.Helper()
	server, bin := proc.StartPostgres(t), testenv.Get(t, "UNECHO_PG_BIN")
	var schema string
	if err := f.pool.QueryRow(t.Context(), "select current_schema()").Scan(&schema); err != nil {
		t.Fatal(err)
	}
	dump := filepath.Join(t.TempDir(), "dump.sql")
	for _, args := range [][]string{
		{"pg_dump", "--schema=" + schema, "--no-owner", "--file=" + dump, "--dbname=" + testenv.Postgres(t)},
		{"psql", "--quiet", "--set=ON_ERROR_STOP=1", "--output=/dev/null", "--file=" + dump, "--dbname=" + server.URL},
	} {
		cmd := exec.CommandContext(t.Context(), filepath.Join(bin, args[0]), args[1:]...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", args[0], err, out)
		}
	}
	u, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	q.Set("search_path", schema)
	u.RawQuery = q.Encode()
	return &fixture{pool: testenv.PoolOf(t, u.String(), 4), writer: NewWriter(nil, nil)}
}
