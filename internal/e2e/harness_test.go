package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/pgoutbox"
)

const customers = 40

// shop is the business: customers with orders, and the table of effects that
// the consumer writes.
type shop struct {
	t      testing.TB
	url    string
	pool   *pgxpool.Pool
	writer *outbox.Writer[pgx.Tx]
	topic  string

	orders     atomic.Int64
	duplicates atomic.Int64
}

func openShop(t testing.TB, topic string) *shop {
	t.Helper()
	return openShopAt(t, testenv.SchemaURL(t), topic)
}

// openShopAt opens it in an empty database.
func openShopAt(t testing.TB, url, topic string) *shop {
	t.Helper()
	s := &shop{t: t, url: url, pool: testenv.PoolOf(t, url, 8), topic: topic,
		writer: pgoutbox.NewWriter(nil, &outbox.WriterOptions{Source: "/shop"})}
	for _, migrate := range []func() error{
		func() error { return pgoutbox.Migrate(t.Context(), s.pool, nil) },
		func() error { return pgdedupe.Migrate(t.Context(), s.pool, nil) },
	} {
		if err := migrate(); err != nil {
			t.Fatal(err)
		}
	}
	// No unique constraint on effects: it would hide a second one.
	s.exec(`create table customers (id int primary key, seq int not null default 0, balance int not null default 0);
		create table effects (n bigserial, order_id text not null, customer int not null, seq int not null);
		insert into customers (id) select generate_series(0, ` + fmt.Sprint(customers-1) + `)`)
	return s
}

func (s *shop) exec(sql string, args ...any) {
	s.t.Helper()
	if _, err := s.pool.Exec(context.Background(), sql, args...); err != nil {
		s.t.Fatal(err)
	}
}

func (s *shop) count(sql string, args ...any) int {
	s.t.Helper()
	var n int
	if err := s.pool.QueryRow(context.Background(), sql, args...).Scan(&n); err != nil {
		s.t.Fatal(err)
	}
	return n
}

func (s *shop) effects() int { return s.count("select count(*) from effects") }

// order places one order: the customer's row is locked, so the orders of a
// customer are serial, and every tenth transaction is rolled back on purpose.
func (s *shop) order(ctx context.Context) error {
	for {
		m, err := s.transaction(ctx, rand.N(10) == 0)
		if err != nil || m != nil {
			if err == nil && rand.N(5) == 0 {
				err = s.again(ctx, m)
			}
			return err
		}
	}
}

// transaction returns the event, or nil if it was rolled back.
func (s *shop) transaction(ctx context.Context, rollback bool) (*envelope.Message, error) {
	tx, err := s.pool.Begin(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	customer, seq := rand.N(customers), 0
	if err := tx.QueryRow(ctx, "update customers set seq = seq + 1 where id = $1 returning seq", customer).Scan(&seq); err != nil {
		return nil, err
	}
	id := fmt.Sprintf("%d-%d", customer, seq)
	body, _ := json.Marshal(map[string]any{"id": id, "customer": customer, "seq": seq})
	m := &envelope.Message{Type: "order.placed", Topic: s.topic, Key: fmt.Append(nil, customer), ContentType: "application/json", Body: body}
	if err := s.writer.Write(ctx, tx, m); err != nil || rollback {
		return nil, err
	}
	if err := tx.Commit(ctx); err != nil {
		return nil, err
	}
	s.orders.Add(1)
	return m, nil
}

// again writes an event a second time, as a producer does that did not hear
// the answer to its commit.
func (s *shop) again(ctx context.Context, m *envelope.Message) error {
	s.duplicates.Add(1)
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error { return s.writer.Write(ctx, tx, m) })
}

// check demands exactly one effect for each order, in the order of each customer.
func (s *shop) check(orders int) {
	s.t.Helper()
	for what, sql := range map[string]string{
		"effects more than once":    "select count(*) from (select 1 from effects group by order_id having count(*) > 1) d",
		"orders without effect":     "select (select sum(seq) from customers) - (select count(distinct order_id) from effects)",
		"effects out of order":      "select count(*) from (select seq - lag(seq, 1, 0) over (partition by customer order by n) as step from effects) d where step <> 1",
		"balances that are wrong":   "select count(*) from customers c where balance <> seq",
		"conflicts":                 "select count(*) from unecho_conflict",
		"rows of the outbox parked": "select count(*) from unecho_outbox_held where parked",
		"rows of the outbox held":   "select count(*) from unecho_outbox_held",
	} {
		if n := s.count(sql); n != 0 {
			s.t.Errorf("%s: %d", what, n)
		}
	}
	if n := s.effects(); n != orders {
		s.t.Errorf("%d effects, want %d", n, orders)
	}
}

// produce places n orders by several writers at once.
func (s *shop) produce(ctx context.Context, n int) error {
	const writers = 4
	errs := make(chan error, writers)
	var left atomic.Int64
	left.Store(int64(n))
	for range writers {
		go func() {
			for left.Add(-1) >= 0 {
				if err := s.order(ctx); err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	var failed error
	for range writers {
		if err := <-errs; err != nil {
			failed = err
		}
	}
	return failed
}

// pause waits for a random time up to d.
func pause(d time.Duration) { time.Sleep(rand.N(d)) }

// full chooses how much a run does: some in `make test`, which has other things to
// do, and all of it where UNECHO_FULL is set, as `make brokers` does.
func full[T any](t testing.TB, some, all T) T {
	t.Helper()
	if os.Getenv("UNECHO_FULL") != "" {
		return all
	}
	return some
}
