package pgdedupe

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

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

func (l *leases) Conflicts(tb testing.TB, k dedupe.Key) (n int) {
	tb.Helper()
	if err := l.pool.QueryRow(context.Background(), "select count(*) from unecho_conflict where key = $1", uuid(k)).Scan(&n); err != nil {
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

// Age alone deletes nothing that runs, or that nobody knows about.
func TestPruneSparesWhatIsNotDone(t *testing.T) {
	l := openLeases(t)
	ctx := t.Context()
	claim := func(id string, retain time.Duration) dedupe.Claim {
		return dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: id}, Retain: retain}
	}
	for _, id := range []string{"running", "free", "done", "kept"} {
		c := claim(id, time.Microsecond)
		if id == "kept" {
			c.Retain = time.Hour
		}
		g, _, err := l.driver.Acquire(ctx, c, id, time.Microsecond)
		switch {
		case err != nil:
		case id == "free":
			err = l.driver.Release(ctx, c.Key, id, g.Token, true)
		case id != "running":
			err = l.driver.Complete(ctx, c, id, g.Token, nil)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if n, err := Prune(ctx, l.pool, nil, 0); n != 1 || err != nil {
		t.Errorf("pruned %d rows, %v; only the one that is done and over may go", n, err)
	}
	for _, id := range []string{"running", "free"} {
		if g, _, err := l.driver.Acquire(ctx, claim(id, time.Hour), "next", time.Hour); err != nil || !g.Unknown || g.Attempt != 2 {
			t.Errorf("%s: %+v, %v", id, g, err)
		}
	}
}
