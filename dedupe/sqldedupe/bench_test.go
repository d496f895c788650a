package sqldedupe_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/sqldedupe"
	"github.com/unecho/unecho/dedupe/storetest"
	"github.com/unecho/unecho/internal/testenv"
)

// Two ways to handle an event by one insert, by one worker, in one run: what
// counts is their ratio. `go test -run xxx -bench Event ./dedupe/sqldedupe`
func BenchmarkEvent(b *testing.B) {
	for _, d := range []sqldedupe.Dialect{sqldedupe.SQLite, sqldedupe.MySQL, sqldedupe.Postgres} {
		h := openers[d](b, storetest.Settings{}).(interface{ itself() *harness }).itself()
		for _, size := range []int{1, 100} {
			b.Run(fmt.Sprintf("%v/%d in a transaction", d, size), func(b *testing.B) { groupedEvents(b, h, size) })
		}
	}
}

// groupedEvents counts events, each by a statement of its own.
func groupedEvents(b *testing.B, h *harness, size int) {
	store, run := h.store.(dedupe.Batcher[*sql.Tx]), testenv.Name("b")
	var claims []dedupe.Claim
	for n := 0; b.Loop(); n++ {
		if claims = append(claims, claim(fmt.Sprint(run, n))); len(claims) < size {
			continue
		}
		if size == 1 {
			if _, err := h.store.Once(b.Context(), claims[0], func(ctx context.Context, tx *sql.Tx) ([]byte, error) {
				return nil, h.Add(ctx, tx, "e")
			}); err != nil {
				b.Fatal(err)
			}
			claims = claims[:0]
			continue
		}
		if _, err := store.OnceEach(b.Context(), claims, func(ctx context.Context, tx *sql.Tx, fresh []int) ([][]byte, error) {
			for range fresh {
				if err := h.Add(ctx, tx, "e"); err != nil {
					return nil, err
				}
			}
			return nil, nil
		}); err != nil {
			b.Fatal(err)
		}
		claims = claims[:0]
	}
}
