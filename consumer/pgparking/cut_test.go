package pgparking_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/pgparking"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/dbcut"
	"github.com/unecho/unecho/internal/testenv"
)

// cutLot is a lot behind a proxy whose commits can be cut.
func cutLot(t *testing.T, f *fixture) (*dbcut.Proxy, *pgparking.Lot) {
	t.Helper()
	proxy, url := dbcut.Start(t, f.url)
	proxy.Implicit()
	pool := testenv.PoolOf(t, url, 1)
	lot := pgparking.NewLot(pool, nil)
	if _, err := lot.Counts(t.Context()); err != nil { // and a connection is there
		t.Fatal(err)
	}
	return proxy, lot
}

// T14: the answer to the commit of a park is lost. It is no success whatever came
// of it, and the next one settles it.
func TestT14TheAnswerToAParkIsLost(t *testing.T) {
	for name, applied := range map[string]bool{"applied": true, "not applied": false} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			proxy, lot := cutLot(t, f)
			park, m := consumer.ParkIn(lot, "billing"), wire(t, "1", "x")
			// The statement is prepared on the connection that the next one uses.
			if err := park(t.Context(), failure(wire(t, "0", "x"), 1, errBoom)); err != nil {
				t.Fatal(err)
			}
			proxy.CutCommit(applied)
			err := park(t.Context(), failure(m, 1, errBoom))
			if !errors.Is(err, dedupe.ErrUnknownOutcome) || consumer.Classify(err) != consumer.ClassUnknown {
				t.Fatalf("park: %v, want ErrUnknownOutcome", err)
			}
			want := 1
			if applied {
				want = 2
			}
			f.wantInt(want, "select count(*) from unecho_parked")
			if err := park(t.Context(), failure(m, 1, errBoom)); err != nil {
				t.Fatal(err)
			}
			f.wantInt(2, "select count(*) from unecho_parked")
		})
	}
}

func TestOutages(t *testing.T) {
	f := newFixture(t)
	proxy, lot := cutLot(t, f)
	proxy.Break()
	park := consumer.ParkIn(lot, "billing")
	testenv.Within(t, 10*time.Second, "the pool has noticed", func() bool {
		_, err := lot.Find(t.Context(), "x")
		return consumer.Classify(err) == consumer.ClassUnavailable
	})
	if err := park(t.Context(), failure(wire(t, "1", "x"), 1, errBoom)); !errors.Is(err, dedupe.ErrUnavailable) {
		t.Errorf("park in an outage: %v, want ErrUnavailable", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := park(ctx, failure(wire(t, "1", "x"), 1, errBoom)); !errors.Is(err, context.Canceled) || errors.Is(err, dedupe.ErrUnavailable) {
		t.Errorf("park with a context that is done: %v", err)
	}
	proxy.Mend()
	testenv.Within(t, 10*time.Second, "it is back", func() bool { return park(t.Context(), failure(wire(t, "1", "x"), 1, errBoom)) == nil })
	f.wantInt(1, "select count(*) from unecho_parked")
}

// A full pool is an outage of bounded length, and nothing was sent.
func TestWaitsAreBounded(t *testing.T) {
	f := newFixture(t)
	pool := testenv.PoolOf(t, f.url, 1)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	lot := pgparking.NewLot(pool, &pgparking.Options{Timeout: 20 * time.Millisecond})
	if err := consumer.ParkIn(lot, "billing")(t.Context(), failure(wire(t, "1", "x"), 1, errBoom)); !errors.Is(err, dedupe.ErrUnavailable) {
		t.Errorf("park: %v, want ErrUnavailable", err)
	}
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), "lock table unecho_parked"); err != nil {
		t.Fatal(err)
	}
	stuck := pgparking.NewLot(f.pool, &pgparking.Options{Timeout: 20 * time.Millisecond})
	if err := consumer.ParkIn(stuck, "billing")(t.Context(), failure(wire(t, "1", "x"), 1, errBoom)); !errors.Is(err, dedupe.ErrUnknownOutcome) {
		t.Errorf("park behind a lock: %v, want ErrUnknownOutcome", err)
	}
	if _, err := stuck.Find(t.Context(), "x"); !errors.Is(err, dedupe.ErrUnavailable) {
		t.Errorf("find behind a lock: %v, want ErrUnavailable", err)
	}
}

// deliver runs a consumer whose handler always fails until ended reports true.
func deliver(t *testing.T, b *membroker.Broker, dead consumer.DeadLetter, ended func() bool) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	end := make(chan error, 1)
	h := consumer.HandlerFunc(func(context.Context, *envelope.Message) error { return consumer.Permanent(errBoom) })
	go func() {
		end <- consumer.Run(ctx, b.Source("orders", "billing"), h, &consumer.RunOptions{DeadLetter: dead, Backoff: consumer.Backoff{Min: time.Millisecond, Max: time.Millisecond}})
	}()
	testenv.Within(t, 20*time.Second, "the run has come to its point", ended)
	cancel()
	if err := <-end; err != nil {
		t.Error(err)
	}
}

// T14: the process ends between the park and the acknowledgement. One record, and
// nothing that was not stored is acknowledged.
func TestT14CrashBetweenParkAndAck(t *testing.T) {
	f := newFixture(t)
	b := membroker.New()
	b.CreateTopic("orders", 1)
	if err := b.Publisher().Publish(t.Context(), []*envelope.Message{{ID: "1", Source: "/shop", Type: "placed", Topic: "orders", Body: []byte("x")}}).Err(); err != nil {
		t.Fatal(err)
	}
	committed := func() bool { return b.Committed("orders", "billing")[0] > 0 }
	proxy, lot := cutLot(t, f)
	park := consumer.ParkIn(lot, "billing")

	var down atomic.Int64
	proxy.Break()
	deliver(t, b, func(ctx context.Context, f *consumer.Failure) error { down.Add(1); return park(ctx, f) }, func() bool { return down.Load() > 2 })
	if committed() {
		t.Fatal("it was acknowledged although it is stored nowhere")
	}
	proxy.Mend()

	var crashed atomic.Int64
	deliver(t, b, func(ctx context.Context, f *consumer.Failure) error {
		if err := park(ctx, f); err != nil {
			return err
		}
		crashed.Add(1)
		return errors.New("the process ends before the acknowledgement")
	}, func() bool { return crashed.Load() > 0 })
	if committed() {
		t.Fatal("it was acknowledged although the hook had not returned nil")
	}
	deliver(t, b, park, committed)
	f.wantInt(1, "select count(*) from unecho_parked")
	if p := f.find(f.waiting()[0]); p.Class != consumer.ClassPermanent || !strings.HasPrefix(p.Message.Position, "orders/0/") {
		t.Errorf("parked is %+v at %q", p, p.Message.Position)
	}
}

// The answer to the note of a redrive is lost: what is true in the end is true in
// the table.
func TestTheAnswerToANoteIsLost(t *testing.T) {
	for name, applied := range map[string]bool{"applied": true, "not applied": false} {
		t.Run(name, func(t *testing.T) {
			f := withEffects(t)
			done, failed := f.park(wire(t, "1", "x")), f.park(wire(t, "2", "x"))
			proxy, lot := cutLot(t, f)
			cutNext := func(h handle) consumer.Handler {
				return consumer.Chain(f.wrap(h), func(h consumer.Handler) consumer.Handler {
					return consumer.HandlerFunc(func(ctx context.Context, m *envelope.Message) error {
						defer proxy.CutCommit(applied)
						return h.Handle(ctx, m)
					})
				})
			}
			for _, c := range []struct {
				h    handle
				p    *consumer.Parked
				want consumer.RedriveOutcome
			}{{effect, done, consumer.RedriveDone}, {fails, failed, consumer.RedriveFailed}} {
				answers, err := consumer.Redrive(t.Context(), lot, cutNext(c.h), nil, c.p.ID)
				if err != nil || answers[0].Outcome != c.want {
					t.Errorf("%v, %v; want %s", answers, err, c.want)
				}
			}
			f.wantState(done.ID, consumer.ParkedRedriven, 10)
			f.wantState(failed.ID, consumer.ParkedWaiting, 11)
		})
	}
}
