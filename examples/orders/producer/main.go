// Command producer places orders until SIGTERM, or as many as its argument
// says. An order and the event that tells of it are one transaction; the relay
// publishes the event.
//
//	DATABASE_URL=postgres://... go run ./examples/orders/producer 100
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/examples/orders"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/pgoutbox"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "producer:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	limit := -1
	if len(args) > 0 {
		var err error
		if limit, err = strconv.Atoi(args[0]); err != nil {
			return fmt.Errorf("%q is not a number of orders", args[0])
		}
	}
	pool, err := orders.Open(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	shop := &shop{pool, pgoutbox.NewWriter(nil, &outbox.WriterOptions{Source: "/shop"})}
	placed := 0
	for ; placed != limit && ctx.Err() == nil; placed++ {
		// The transaction is finished although a signal comes in the middle.
		if err := shop.place(context.WithoutCancel(ctx), fmt.Sprint("customer-", rand.N(10)), int64(rand.N(10_000))); err != nil {
			return err
		}
		if limit < 0 {
			time.Sleep(10 * time.Millisecond)
		}
	}
	fmt.Println(placed, "orders placed")
	return nil
}

type shop struct {
	pool   *pgxpool.Pool
	outbox *outbox.Writer[pgx.Tx]
}

// place is the business transaction. Events of one customer keep the order in
// which their transactions held the customer's row.
func (s *shop) place(ctx context.Context, customer string, cents int64) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	id := envelope.NewID()
	body, err := json.Marshal(orders.Placed{Order: id, Customer: customer, Cents: cents})
	if err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "insert into orders (id, customer, cents) values ($1, $2, $3)", id, customer, cents); err != nil {
			return err
		}
		return s.outbox.Write(ctx, tx, &envelope.Message{
			Type: "order.placed", Topic: orders.Topic(), Key: []byte(customer), ContentType: "application/json", Body: body,
		})
	})
}
