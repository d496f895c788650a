package pgdedupe

import (
	"context"
	"errors"
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
