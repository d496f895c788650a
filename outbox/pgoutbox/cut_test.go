package pgoutbox

import (
	"context"
	"testing"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/dbcut"
	"github.com/unecho/unecho/internal/testenv"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/outboxtest"
)

// throughProxy is an outbox whose relay reaches the database by a proxy.
func throughProxy(t *testing.T, b *outboxtest.Broker) (*fixture, *dbcut.Proxy, *outbox.Relay) {
	t.Helper()
	url := testenv.SchemaURL(t)
	proxy, cut := dbcut.Start(t, url)
	f := &fixture{pool: testenv.PoolOf(t, url, 4), writer: NewWriter(nil, nil)}
	if err := Migrate(t.Context(), f.pool, nil); err != nil {
		t.Fatal(err)
	}
	o := &outbox.RelayOptions{Backoff: time.Millisecond, MaxBackoff: time.Millisecond, StoreTimeout: 5 * time.Second}
	return f, proxy, outbox.NewRelay(NewStore(testenv.PoolOf(t, cut, 4), nil), b, o)
}

// R6: the answer to the commit of a settlement is lost. If it was applied, all
// is done; if not, the batch comes again. The relay finds out, and goes on
// under the same lease.
func TestR6TheAnswerToASettlementIsLost(t *testing.T) {
	for name, c := range map[string]struct {
		applied bool
		want    string
	}{
		"applied":     {true, "b1 b2 a1 a2"},
		"not applied": {false, "b1 b2 b1 b2 a1 a2"},
	} {
		t.Run(name, func(t *testing.T) {
			b := &outboxtest.Broker{}
			f, proxy, r := throughProxy(t, b)
			b.Answer = func(m *envelope.Message) error {
				if m.ID == "a1" {
					return brokers.ErrNoRoute // it moves aside, a2 behind it
				}
				return nil
			}
			f.write(t, outboxtest.Event("a1", "a"), outboxtest.Event("b1", "b"), outboxtest.Event("a2", "a"), outboxtest.Event("b2", "b"))
			proxy.CutCommit(c.applied)
			if n, err := r.Step(t.Context()); err == nil {
				t.Fatalf("the answer was lost, and the step says %d settled", n)
			}
			if !c.applied {
				step(t, r, 4)
			}
			b.SetAnswer(nil)
			testenv.Within(t, 10*time.Second, "the rows that moved aside", func() bool {
				n, err := r.Step(context.Background())
				if err != nil {
					t.Fatal(err)
				}
				return n == 2
			})
			published(t, b, c.want)
			step(t, r, 0)
			if n := f.count(t, "select epoch from unecho_outbox_shard"); n != 1 {
				t.Errorf("epoch %d: the lease was taken again", n)
			}
		})
	}
}

func (f *fixture) count(t testing.TB, sql string) (n int) {
	t.Helper()
	if err := f.pool.QueryRow(context.Background(), sql).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// The database is out of reach while rows are published. They cannot be
// settled, so they are published again; nothing is lost and nothing moves.
func TestDatabaseGoneDuringAPublish(t *testing.T) {
	b := &outboxtest.Broker{}
	f, proxy, r := throughProxy(t, b)
	b.Answer = func(m *envelope.Message) error {
		if m.ID == "a1" {
			proxy.Break()
		}
		return nil
	}
	f.write(t, outboxtest.Event("a1", "a"), outboxtest.Event("a2", "a"))
	if n, err := r.Step(t.Context()); err == nil {
		t.Fatalf("%d rows settled in a database that is gone", n)
	}
	if n, err := r.Step(t.Context()); err == nil {
		t.Fatalf("%d rows read from a database that is gone", n)
	}
	proxy.Mend()
	b.SetAnswer(nil)
	step(t, r, 2)
	step(t, r, 0)
	published(t, b, "a1 a2 a1 a2")
}
