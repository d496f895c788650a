package pgoutbox

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/unecho/unecho/outbox/outboxtest"
)

// Behind a pooler there may be no prepared statements.
func TestConformanceWithoutPreparedStatements(t *testing.T) {
	for _, c := range outboxtest.Cases() {
		if strings.Contains(c.Name, "backlog") { // the long one
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			f := open(t)
			f.pool = f.with(t, func(c *pgx.ConnConfig) { c.DefaultQueryExecMode = pgx.QueryExecModeExec })
			c.Func(t, f)
		})
	}
}
