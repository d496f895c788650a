package migrate_test

import (
	"database/sql"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	_ "modernc.org/sqlite"

	"github.com/unecho/unecho/internal/migrate"
)

// FuzzSchemaName: a name is refused with an error that says so, or it is one
// identifier wherever it stands: what it is written into has no other statement,
// and a real parser finds the table under exactly that name.
func FuzzSchemaName(f *testing.F) {
	for _, name := range []string{
		"app", "", "a b", `a"b`, "a'b", `a\b`, "a;b", "a--b", "a/*b", "a.b", "drop table x", "é", "日本", "a\x00b", "a\nb", "\xff", "$1", "{{t}}",
		"x]; drop table y; --", "`", strings.Repeat("x", 63), strings.Repeat("x", 64), strings.Repeat("é", 32), "main", "temp", "sqlite_master",
	} {
		f.Add(name)
	}
	files := fstest.MapFS{"0001_t.sql": {Data: []byte("create table {{unecho_t}} (n integer);\n")}}
	db, err := sql.Open("sqlite", "file:"+filepath.Join(f.TempDir(), "fuzz.db"))
	if err != nil {
		f.Fatal(err)
	}
	db.SetMaxOpenConns(1)
	f.Cleanup(func() { _ = db.Close() })
	f.Fuzz(func(t *testing.T, name string) {
		s, err := migrate.New("fuzz", files, name)
		if err != nil {
			if !errors.Is(err, migrate.ErrName) {
				t.Fatalf("New with %q: %v, want an error that matches ErrName", name, err)
			}
			return
		}
		if name == "" || strings.EqualFold(name, "main") || strings.EqualFold(name, "temp") {
			return // databases of their own
		}
		table := s.Table("unecho_t")
		if !strings.HasPrefix(table, `"`) || !strings.HasSuffix(table, `"."unecho_t"`) || strings.Count(table, `"`) != 4 {
			t.Fatalf("%q is written as %s, which is not two identifiers", name, table)
		}
		if _, err := db.ExecContext(t.Context(), "attach ':memory:' as "+strings.TrimSuffix(table, `."unecho_t"`)); err != nil {
			t.Fatalf("attach as %q: %v", name, err)
		}
		defer func() {
			if _, err := db.ExecContext(t.Context(), "detach "+strings.TrimSuffix(table, `."unecho_t"`)); err != nil {
				t.Errorf("detach %q: %v", name, err)
			}
		}()
		if err := s.Up(t.Context(), migrate.SQLite(db)); err != nil {
			t.Fatalf("migrate in %q: %v", name, err)
		}
		var schemas, tables int
		if err := db.QueryRowContext(t.Context(), "select count(*) from pragma_database_list where name = ?", name).Scan(&schemas); err != nil || schemas != 1 {
			t.Errorf("%d databases are called %q, %v", schemas, name, err)
		}
		if err := db.QueryRowContext(t.Context(), "select count(*) from "+strings.TrimSuffix(table, `"unecho_t"`)+`"sqlite_master" where type = 'table'`).Scan(&tables); err != nil || tables != 2 {
			t.Errorf("in %q there are %d tables, %v; want the one and that of the versions", name, tables, err)
		}
	})
}
