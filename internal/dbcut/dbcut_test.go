package dbcut_test

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/unecho/unecho/internal/dbcut"
	"github.com/unecho/unecho/internal/testenv"
)

// TestCutCommit: a suite that relies on the proxy would pass on one that does
// nothing.
func TestCutCommit(t *testing.T) {
	direct := testenv.SchemaURL(t)
	proxy, through := dbcut.Start(t, direct)
	pool := testenv.PoolOf(t, direct, 1)
	if _, err := pool.Exec(t.Context(), "create table e (n integer)"); err != nil {
		t.Fatal(err)
	}
	for name, commit := range map[string]func(conn *pgx.Conn) error{
		"query": func(conn *pgx.Conn) error {
			_, err := conn.Exec(t.Context(), "commit")
			return err
		},
		"batch": func(conn *pgx.Conn) error {
			b := &pgx.Batch{}
			b.Queue("select $1::int", 1)
			b.Queue("commit")
			return conn.SendBatch(t.Context(), b).Close()
		},
	} {
		for _, applied := range []bool{true, false} {
			conn, err := pgx.Connect(t.Context(), through)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Exec(t.Context(), "begin; delete from e; commit; begin; insert into e values (1)"); err != nil {
				t.Fatal(err)
			}
			proxy.CutCommit(applied)
			if err := commit(conn); err == nil {
				t.Errorf("%s, applied %v: the commit was answered", name, applied)
			}
			_ = conn.Close(t.Context())
			want := 0
			if applied {
				want = 1
			}
			var n int
			if err := pool.QueryRow(t.Context(), "select count(*) from e").Scan(&n); err != nil || n != want {
				t.Errorf("%s, applied %v: %d rows, %v; want %d", name, applied, n, err, want)
			}
		}
	}
}
