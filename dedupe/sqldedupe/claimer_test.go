package sqldedupe_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe/sqldedupe"
	"github.com/unecho/unecho/dedupe/storetest"
)

// claims implements storetest.ClaimHarness.
type claims struct {
	*harness
	*sqldedupe.Claimer
	level sql.IsolationLevel
}

func (h claims) Begin(ctx context.Context) (*sql.Tx, error) {
	return h.db.BeginTx(ctx, &sql.TxOptions{Isolation: h.level})
}
func (h claims) Commit(_ context.Context, tx *sql.Tx) error   { return tx.Commit() }
func (h claims) Rollback(_ context.Context, tx *sql.Tx) error { return tx.Rollback() }

// oneWriter implements storetest.OneWriter.
type oneWriter struct{ claims }

func (oneWriter) OneWriter() {}

func newClaims(h *harness, level sql.IsolationLevel) claims {
	h.o.LockWait = 100 * time.Millisecond
	return claims{h, sqldedupe.NewClaimer(h.dialect, &h.o), level}
}

func TestClaimConformance(t *testing.T) {
	for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		t.Run("PostgreSQL "+level.String(), func(t *testing.T) {
			storetest.RunClaim(t, func(tb testing.TB) storetest.ClaimHarness[*sql.Tx] {
				return newClaims(openPostgres(sqldedupe.Options{})(tb, storetest.Settings{}).(postgres).harness, level)
			})
		})
	}
	t.Run("SQLite", func(t *testing.T) {
		storetest.RunClaim(t, func(tb testing.TB) storetest.ClaimHarness[*sql.Tx] {
			const params = "_pragma=journal_mode(WAL)&_txlock=immediate&_pragma=busy_timeout(10000)"
			return oneWriter{newClaims(openSQLite(sqldedupe.Options{}, params)(tb, storetest.Settings{}).(sqlite).harness, sql.LevelDefault)}
		})
	})
}
