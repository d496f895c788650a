package orders

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/outbox/pgoutbox"
)

// Topic is where orders are told of: ORDERS_TOPIC, or shop.orders.
func Topic() string { return cmp.Or(os.Getenv("ORDERS_TOPIC"), "shop.orders") }

// Placed is the event "order placed".
type Placed struct {
	Order    string `json:"order"`
	Customer string `json:"customer"`
	Cents    int64  `json:"cents"`
}

// Env returns an environment variable, or an error that says what it is for.
func Env(name, what string) (string, error) {
	v := os.Getenv(name)
	if v == "" {
		return "", fmt.Errorf("set %s: %s", name, what)
	}
	return v, nil
}

// Open connects to the database that DATABASE_URL names and creates what is
// missing in it.
func Open(ctx context.Context) (*pgxpool.Pool, error) {
	url, err := Env("DATABASE_URL", "the PostgreSQL database, postgres://...")
	if err != nil {
		return nil, err
	}
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return nil, errors.New("DATABASE_URL is not a PostgreSQL URL") // the text could hold the password
	}
	_, err = pool.Exec(ctx, `create table if not exists orders (id text primary key, customer text not null, cents bigint not null);
		create table if not exists balances (customer text primary key, cents bigint not null)`)
	if err = errors.Join(err, pgdedupe.Migrate(ctx, pool, nil), pgoutbox.Migrate(ctx, pool, nil)); err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}
