package pgdedupe_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/dedupe/storetest"
)

// claims implements storetest.ClaimHarness.
type claims struct {
	base
	*pgdedupe.Claimer
	level pgx.TxIsoLevel
}

func openClaims(level pgx.TxIsoLevel, mode pgx.QueryExecMode) func(tb testing.TB) storetest.ClaimHarness[pgx.Tx] {
	return func(tb testing.TB) storetest.ClaimHarness[pgx.Tx] {
		tb.Helper()
		var o pgdedupe.Options
		h := &claims{base: openBase(tb, &o, mode, storetest.Settings{Wait: 100 * time.Millisecond}), level: level}
		h.Claimer = pgdedupe.NewClaimer(&o)
		return h
	}
}

func (h *claims) Begin(ctx context.Context) (pgx.Tx, error) {
	return h.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: h.level})
}
func (h *claims) Commit(ctx context.Context, tx pgx.Tx) error   { return tx.Commit(ctx) }
func (h *claims) Rollback(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) }
func (h *claims) Add(ctx context.Context, tx pgx.Tx, name string) error {
	_, err := tx.Exec(ctx, "insert into effect (name) values ($1)", name)
	return err
}

func TestClaimConformance(t *testing.T) {
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) { storetest.RunClaim(t, openClaims(level, pgx.QueryExecModeCacheStatement)) })
	}
	t.Run("exec", func(t *testing.T) { storetest.RunClaim(t, openClaims("", pgx.QueryExecModeExec)) })
}

// A claim bounds its own wait, and leaves the transaction's settings alone,
// whatever becomes of it.
func TestClaimLeavesLockTimeoutAlone(t *testing.T) {
	h := openClaims("", pgx.QueryExecModeCacheStatement)(t).(*claims)
	ctx := t.Context()
	owner, err := h.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = owner.Rollback(ctx) }()
	for _, id := range []string{"done", "held"} {
		tx := owner
		if id == "done" {
			if tx, err = h.Begin(ctx); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := h.Claim(ctx, tx, claim(id)); err != nil {
			t.Fatal(err)
		}
		if id == "done" {
			if err := tx.Commit(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}
	tx, err := h.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(ctx) }()
	if _, err := tx.Exec(ctx, "set local lock_timeout = '7s'"); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]error{"new": nil, "done": nil, "held": dedupe.ErrInProgress} {
		if _, err := h.Claim(ctx, tx, claim(id)); !errors.Is(err, want) {
			t.Errorf("%s: %v", id, err)
		}
		var timeout string
		if err := tx.QueryRow(ctx, "show lock_timeout").Scan(&timeout); err != nil || timeout != "7s" {
			t.Errorf("%s: lock_timeout is %q, %v; want the transaction's own", id, timeout, err)
		}
	}
}
