package pgdedupe

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/storetest"
	"github.com/unecho/unecho/internal/testenv"
)

type leases struct {
	pool   *pgxpool.Pool
	driver dedupe.LeaseDriver
}

func openLeases(tb testing.TB) *leases {
	tb.Helper()
	pool := testenv.Pool(tb, 8)
	if err := Migrate(tb.Context(), pool, nil); err != nil {
		tb.Fatal(err)
	}
	return &leases{pool, newLeaseDriver(pool, nil)}
}

func (l *leases) Driver() dedupe.LeaseDriver { return l.driver }

func (l *leases) Admin() dedupe.Admin { return NewAdmin(l.pool, nil) }

func (l *leases) Prune(tb testing.TB) int {
	tb.Helper()
	n, err := Prune(context.Background(), l.pool, nil, 0)
	if err != nil {
		tb.Fatal(err)
	}
	return n
}

// Forget deletes the rows, as somebody does who thinks that they are old.
func (l *leases) Forget(tb testing.TB) {
	tb.Helper()
	if _, err := l.pool.Exec(context.Background(), "delete from unecho_lease"); err != nil {
		tb.Fatal(err)
	}
}

func TestLeaseConformance(t *testing.T) {
	storetest.RunLease(t, func(tb testing.TB) storetest.LeaseHarness { return openLeases(tb) })
}

// Age alone deletes nothing that runs, that is parked or that nobody knows about.
func TestPruneSparesWhatIsNotDone(t *testing.T) {
	l := openLeases(t)
	ctx := t.Context()
	claim := func(id string, retain time.Duration) dedupe.Claim {
		return dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: id}, Retain: retain}
	}
	for _, id := range []string{"running", "unknown", "parked", "done", "kept"} {
		c := claim(id, time.Millisecond)
		if id == "kept" {
			c.Retain = time.Hour
		}
		g, _, err := l.driver.Acquire(ctx, c, id, time.Millisecond)
		switch {
		case err != nil || id == "running":
		case id == "unknown":
			err = l.driver.Release(ctx, c.Key, id, g.Token, dedupe.StateUnknown)
		case id == "parked":
			err = l.driver.Release(ctx, c.Key, id, g.Token, dedupe.StateParked)
		default:
			err = l.driver.Complete(ctx, c, id, g.Token, nil)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	total := 0
	testenv.Within(t, 10*time.Second, "what is done and over is pruned", func() bool {
		total += l.Prune(t)
		return total > 0
	})
	if _, err := l.pool.Exec(ctx, "update unecho_lease set lease_until = now() - interval '1 year'"); err != nil {
		t.Fatal(err)
	}
	if total += l.Prune(t); total != 1 {
		t.Errorf("pruned %d rows; only the one that is done and over may go", total)
	}
	for _, id := range []string{"running", "unknown"} {
		if g, _, err := l.driver.Acquire(ctx, claim(id, time.Hour), "next", time.Hour); err != nil || !g.Unknown || g.Attempt != 2 {
			t.Errorf("%s: %+v, %v", id, g, err)
		}
	}
	if _, _, err := l.driver.Acquire(ctx, claim("parked", time.Hour), "next", time.Hour); !errors.Is(err, dedupe.ErrParked) {
		t.Errorf("parked: %v", err)
	}
	if _, r, err := l.driver.Acquire(ctx, claim("kept", time.Hour), "next", time.Hour); err != nil || r == nil {
		t.Errorf("kept: %v, %v", r, err)
	}
}

// stall stops the insert of owner in the server, after its values were
// computed and before it has looked for the key, until go on is called.
func (l *leases) stall(tb testing.TB, owner string) (goOn func()) {
	tb.Helper()
	ctx := context.Background()
	held, err := l.pool.Acquire(ctx)
	if err != nil {
		tb.Fatal(err)
	}
	// Advisory locks are of the database, which other tests use too: the
	// number is the schema's.
	const number = `hashtext(current_schema())`
	for _, statement := range []string{
		`create function stall() returns trigger language plpgsql as $$ begin
	perform pg_advisory_xact_lock(` + number + `);
	return new;
end $$`,
		`create trigger stall before insert on unecho_lease for each row when (new.owner = '` + owner + `') execute function stall()`,
		`select pg_advisory_lock(` + number + `)`,
	} {
		if _, err := held.Exec(ctx, statement); err != nil {
			tb.Fatal(err)
		}
	}
	return sync.OnceFunc(func() {
		defer held.Release()
		if _, err := held.Exec(ctx, `select pg_advisory_unlock(`+number+`)`); err != nil {
			tb.Error(err)
		}
	})
}

// waiting waits until a session is at a lock of a kind in this schema.
func (l *leases) waiting(tb testing.TB, kind string, or func() bool) {
	tb.Helper()
	testenv.Within(tb, 10*time.Second, "a session waits at a lock: "+kind, func() bool {
		var n int
		err := l.pool.QueryRow(context.Background(), `select count(*) from pg_locks where not granted and locktype = $1
	and (relation = 'unecho_lease'::regclass or objid = hashtext(current_schema())::bit(32)::bigint::oid)`, kind).Scan(&n)
		if err != nil {
			tb.Fatal(err)
		}
		return n > 0 || or != nil && or()
	})
}

// A claim draws its token, and its server process is not scheduled then: A has
// drawn 5. B claims with 6 and gives up; or it gives up and a person evicts the
// key. A goes on, and has the key as the later one: with 5 the resource behind
// the lease, which has seen 6, would refuse A and obey B.
func TestTokenRisesOverAStall(t *testing.T) {
	for _, evicted := range []bool{false, true} {
		t.Run(map[bool]string{false: "given up", true: "evicted"}[evicted], func(t *testing.T) {
			l := openLeases(t)
			ctx := t.Context()
			goOn := l.stall(t, "A")
			defer goOn()
			c := dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: "1"}, Retain: time.Hour}
			var work errgroup.Group
			var a dedupe.Grant
			work.Go(func() (err error) {
				a, _, err = l.driver.Acquire(ctx, c, "A", time.Minute)
				return err
			})
			l.waiting(t, "advisory", nil)
			b, _, err := l.driver.Acquire(ctx, c, "B", time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			if err := l.driver.Release(ctx, c.Key, "B", b.Token, dedupe.StateFree); err != nil {
				t.Fatal(err)
			}
			if evicted {
				var done atomic.Bool
				work.Go(func() error {
					defer done.Store(true)
					return l.Admin().Evict(ctx, c.Key.Stored())
				})
				l.waiting(t, "relation", done.Load)
			}
			goOn()
			if err := work.Wait(); err != nil {
				t.Fatal(err)
			}
			if a.Token <= b.Token {
				t.Errorf("B had the key with token %d, A after it with %d", b.Token, a.Token)
			}
		})
	}
}
