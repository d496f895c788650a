// Command quickstart shows the whole way in one process, with nothing installed:
// orders are written to SQLite and told of through the outbox in the same
// transaction, a relay publishes them to an embedded NATS server, and a
// consumer applies each of them once, although every fifth is published twice
// and the consumer dies between a commit and its acknowledgement.
//
// It prints what it counted, and exits with 1 if a number is not right.
package main

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	_ "modernc.org/sqlite"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/natsbroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe/sqldedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/sqloutbox"
)

const orders = 500

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

func run() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	dir, err := os.MkdirTemp("", "unecho-quickstart-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, err := openDatabase(ctx, filepath.Join(dir, "shop.db"))
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	server, err := startNATS(ctx, filepath.Join(dir, "nats"))
	if err != nil {
		return err
	}
	defer server.stop()

	// The producer: an order and the event that tells of it, in one transaction.
	writer := sqloutbox.NewWriter(&outbox.WriterOptions{Source: "/shop"})
	for n := range orders {
		if err := placeOrder(ctx, db, writer, n); err != nil {
			return err
		}
	}

	// The relay: what is committed is published, and every fifth twice.
	ctx, stop := context.WithCancel(ctx)
	relay := outbox.NewRelay(sqloutbox.NewStore(db), server.publisher(), nil)
	relayed := make(chan error, 1)
	go func() { relayed <- relay.Run(ctx) }()

	// The consumer: dies once, after a commit and before its ack, and is
	// started again.
	count := &counter{crashAt: orders / 2}
	if err := consume(ctx, db, server, count); err != nil {
		stop()
		return err
	}
	stop()
	if err := <-relayed; err != nil {
		return err
	}
	return count.report(context.Background(), db, server.doubled)
}

// placeOrder is a business transaction. The event is published if, and only
// if, the order is there.
func placeOrder(ctx context.Context, db *sql.DB, writer *outbox.Writer[*sql.Tx], n int) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.ExecContext(ctx, "insert into orders (id) values (?)", n); err != nil {
		return err
	}
	event := &envelope.Message{Type: "order.placed", Topic: "shop.orders", Key: fmt.Append(nil, n), Body: fmt.Append(nil, n)}
	if err := writer.Write(ctx, tx, event); err != nil {
		return err
	}
	return tx.Commit()
}

// ship is the handler. tx also holds the key of the event: the shipment is
// there if, and only if, the event counts as done.
func ship(ctx context.Context, tx *sql.Tx, m *envelope.Message) error {
	_, err := tx.ExecContext(ctx, "insert into shipments (order_id) values (?)", string(m.Body))
	return err
}

// consume runs consumers, one after the other, until everything is settled.
func consume(ctx context.Context, db *sql.DB, server *natsServer, count *counter) error {
	handler := consumer.Wrap("shipping", sqldedupe.NewStore(db, sqldedupe.SQLite, nil), ship, nil)
	for ctx.Err() == nil {
		done, err := live(ctx, handler, server, count)
		if done || err != nil {
			return err
		}
	}
	return ctx.Err()
}

// live is the life of one consumer. It reports whether there is nothing left
// to do; otherwise the consumer has died.
func live(ctx context.Context, handler consumer.Handler, server *natsServer, count *counter) (done bool, err error) {
	src, cut, err := server.source()
	if err != nil {
		return false, err
	}
	defer cut()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	dies := func() { cut(); stop() }
	ended := make(chan error, 1)
	go func() {
		ended <- consumer.Run(ctx, &mortal{src, count, dies}, handler, &consumer.RunOptions{
			DeadLetter: func(_ context.Context, f *consumer.Failure) error { return fmt.Errorf("unexpected: %w", f.Err) },
			Observer:   count,
		})
	}()
	done = server.waitSettled(ctx, count)
	stop()
	return done, <-ended
}

// mortal is a source whose consumer dies once, at an acknowledgement: the
// handler's transaction is committed, and the broker does not know.
type mortal struct {
	*natsbroker.Source
	count *counter
	die   func()
}

func (m *mortal) Ack(ctx context.Context, d *brokers.Delivery) error {
	if m.count.dies() {
		m.die()
		return brokers.ErrLost
	}
	return m.Source.Ack(ctx, d)
}

func (c *counter) report(ctx context.Context, db *sql.DB, doubled int) error {
	var effects, distinct int
	if err := db.QueryRowContext(ctx, "select count(*), count(distinct order_id) from shipments").Scan(&effects, &distinct); err != nil {
		return err
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "events\tdeliveries\teffects\tduplicates suppressed\t\n")
	fmt.Fprintf(w, "%d\t%d\t%d\t%d\t\n", orders, c.deliveries, effects, c.duplicates)
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Printf("\n%d events were published twice, and the consumer died once between commit and ack.\n", doubled)
	switch {
	case effects != orders || distinct != orders:
		return fmt.Errorf("%d effects on %d orders, want %d", effects, distinct, orders)
	case c.deliveries != orders+c.duplicates:
		return fmt.Errorf("%d deliveries, want one for each event and one for each duplicate", c.deliveries)
	case doubled != orders/5 || c.duplicates <= doubled || !c.crashed:
		return fmt.Errorf("%d duplicates of %d published twice: the crash left no trace", c.duplicates, doubled)
	}
	return nil
}
