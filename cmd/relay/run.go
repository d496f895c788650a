package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/internal/migrate"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/pgoutbox"
)

// run publishes until ctx is done.
func run(ctx context.Context, c *config, stderr io.Writer) error {
	if err := c.checkBroker(); err != nil {
		return err
	}
	pub, done, err := publisher(c) // which waits for no broker, and reads files
	if err != nil {
		return &usageError{fmt.Errorf("configuration: %w", err)}
	}
	defer done()
	log := logger(c, stderr)
	pool, err := connect(ctx, c)
	if err != nil {
		return err
	}
	defer pool.Close()
	o := &pgoutbox.Options{Schema: c.Database.Schema}
	if err := ready(ctx, log, pool, o); err != nil {
		if ctx.Err() != nil {
			return nil // it was told to stop before the database was there
		}
		return err
	}
	log.Info("relay starts", "broker", c.Broker, "version", version())
	err = outbox.NewRelay(pgoutbox.NewStore(pool, o), pub, c.relayOptions(log)).Run(ctx)
	log.Info("relay stops")
	return err
}

// ready waits for the database, and returns an error if its tables are not
// what this program needs: waiting does not mend that.
func ready(ctx context.Context, log *slog.Logger, pool *pgxpool.Pool, o *pgoutbox.Options) error {
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		err := pgoutbox.Validate(ctx, pool, o)
		if errors.Is(err, migrate.ErrOld) || errors.Is(err, migrate.ErrNew) {
			return struct{}{}, backoff.Permanent(hint(err, "relay migrate"))
		}
		if err != nil {
			log.Warn("the database is not ready", "error", err)
		}
		return struct{}{}, err
	}, backoff.WithMaxElapsedTime(0))
	return err
}

func (c *config) relayOptions(log *slog.Logger) *outbox.RelayOptions {
	r := c.Relay
	return &outbox.RelayOptions{Batch: r.Batch, Lease: r.Lease, MaxAttempts: r.MaxAttempts, Backoff: r.Backoff, MaxBackoff: r.MaxBackoff,
		SkipParked: r.OnParked == "skip", Poll: r.Poll, MaxPoll: r.MaxPoll, PublishTimeout: r.PublishTimeout, StoreTimeout: r.StoreTimeout, Grace: r.Grace, Retain: r.Retain,
		Observer: observer{log}}
}

func logger(c *config, w io.Writer) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.Log.Level)) // checked with the configuration
	o := &slog.HandlerOptions{Level: level}
	if c.Log.Format == "text" {
		return slog.New(slog.NewTextHandler(w, o))
	}
	return slog.New(slog.NewJSONHandler(w, o))
}

// observer logs what a person on call wants to see: who leads, what fails,
// what was given up. Rows are named by their ids, which say nothing.
type observer struct{ log *slog.Logger }

// Observe implements outbox.Observer.
func (o observer) Observe(ctx context.Context, e outbox.Event) {
	switch e.Step {
	case outbox.StepLease:
		o.log.InfoContext(ctx, "lease taken", "epoch", e.Epoch)
	case outbox.StepFenced:
		o.log.WarnContext(ctx, "lease lost", "epoch", e.Epoch, "error", e.Err)
	case outbox.StepFailed:
		o.log.ErrorContext(ctx, "step failed", "error", e.Err)
	case outbox.StepDown:
		o.log.WarnContext(ctx, "destination down: its rows wait, others go on", "destination", e.Destination, "error", e.Err)
	case outbox.StepUp:
		o.log.InfoContext(ctx, "destination serves again", "destination", e.Destination, "after", e.Took.Round(time.Millisecond))
	case outbox.StepSettle:
		o.settled(ctx, e)
	case outbox.StepRead, outbox.StepPublish:
		o.log.DebugContext(ctx, string(e.Step), "rows", len(e.Rows), "first", e.Rows[0].ID, "took", e.Took.Round(time.Microsecond), "error", e.Err)
	}
}

func (o observer) settled(ctx context.Context, e outbox.Event) {
	o.log.DebugContext(ctx, "settle", "rows", len(e.Settled), "first", e.Settled[0].Row.ID, "took", e.Took.Round(time.Microsecond))
	for _, s := range e.Settled {
		if s.Action == outbox.Park || s.Action == outbox.Skip {
			o.log.ErrorContext(ctx, "row parked", "row", s.Row.ID, "topic", s.Row.Message.Topic, "attempts", s.Row.Attempts+1, "reason", s.Reason)
		}
	}
}
