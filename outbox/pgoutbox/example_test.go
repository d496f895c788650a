package pgoutbox_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/brokers/kafkabroker"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/pgoutbox"
)

// An order and its event, in one transaction.
func ExampleNewWriter() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	w := pgoutbox.NewWriter(nil, &outbox.WriterOptions{Source: "/shop"})

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "insert into orders (id) values ($1)", "o-1"); err != nil {
			return err
		}
		return w.Write(ctx, tx, &envelope.Message{Type: "order.placed", Topic: "orders", Key: []byte("customer-7")})
	})
	if err != nil {
		log.Fatal(err)
	}
}

// A relay of one's own; `relay run` is the same with settings. Of any number of
// them one works.
func ExampleNewStore() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	if err := pgoutbox.Validate(ctx, pool, nil); err != nil {
		log.Fatal(err) // says that Migrate is to be called first
	}
	pub, err := kafkabroker.NewPublisher(kafkabroker.PublisherConfig{Brokers: []string{"127.0.0.1:9092"}})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = pub.Close() }()
	if err := outbox.NewRelay(pgoutbox.NewStore(pool, nil), pub, nil).Run(ctx); err != nil {
		log.Fatal(err)
	}
}

// The tables in a schema of their own.
func ExampleMigrate() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	if err := pgoutbox.Migrate(ctx, pool, &pgoutbox.Options{Schema: "messaging"}); err != nil {
		log.Fatal(err)
	}
}

// For those who migrate with a tool of their own.
func ExampleSQL() {
	text, err := pgoutbox.SQL(&pgoutbox.Options{Schema: "messaging"})
	if err != nil {
		log.Fatal(err)
	}
	for line := range strings.SplitSeq(text, "\n") {
		if strings.HasPrefix(line, "create table") {
			fmt.Println(line)
		}
	}
	// Output:
	// create table if not exists "messaging"."unecho_migration" (
	// create table "messaging"."unecho_outbox" (
	// create table "messaging"."unecho_outbox_shard" (
	// create table "messaging"."unecho_outbox_held" (
}
