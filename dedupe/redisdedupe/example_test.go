package redisdedupe_test

import (
	"context"
	"log/slog"

	"github.com/redis/go-redis/v9"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/redisdedupe"
	"github.com/unecho/unecho/envelope"
)

// The effect is a call to another service, so there is no transaction to share.
// The derived key lets the other side recognise a repetition.
func ExampleNewStore() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", ContextTimeoutEnabled: true})
	defer func() { _ = rdb.Close() }()
	store, err := redisdedupe.NewStore(rdb, nil)
	if err != nil {
		slog.Error("configuration", "error", err)
		return
	}
	charge := func(ctx context.Context, l *dedupe.Lease, m *envelope.Message) error {
		return callPaymentProvider(ctx, l.Derive("charge", 0), m.Body)
	}
	_ = consumer.Wrap("payments", store, charge, nil)
}

func callPaymentProvider(context.Context, string, []byte) error { return nil }

// At start, ask the server for what endangers keys.
func ExampleDriver_Check() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", ContextTimeoutEnabled: true})
	defer func() { _ = rdb.Close() }()
	d, err := redisdedupe.NewDriver(rdb, nil)
	if err != nil {
		return
	}
	if err := d.Check(context.Background()); err != nil {
		slog.Error("the keys are in danger", "error", err)
	}
}

// What people ask a store: which payments wait for somebody to find out what
// came of them?
func ExampleDriver_Admin() {
	ctx := context.Background()
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", ContextTimeoutEnabled: true})
	defer func() { _ = rdb.Close() }()
	d, err := redisdedupe.NewDriver(rdb, nil)
	if err != nil {
		return
	}
	for f := (dedupe.Filter{State: dedupe.StateParked}); ; {
		page, err := d.Admin().List(ctx, f)
		if err != nil {
			return
		}
		for _, e := range page.Entries {
			slog.Info("parked", "key", e.ID, "attempts", e.Attempt, "holder", e.Holder)
		}
		if f.After = page.Next; f.After == "" {
			return
		}
	}
}
