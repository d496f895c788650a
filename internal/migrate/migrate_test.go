package migrate_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	_ "modernc.org/sqlite"

	"github.com/unecho/unecho/internal/migrate"
)

// steps is a line whose files fail when they run twice.
func steps(n int) fs.FS {
	files := fstest.MapFS{}
	for i := 1; i <= n; i++ {
		text := fmt.Sprintf("create table {{t%d}} (n integer);\ninsert into {{t%d}} (n) values (%d);\n", i, i, i)
		files[fmt.Sprintf("%04d_t%d.sql", i, i)] = &fstest.MapFile{Data: []byte(text)}
	}
	return files
}

func set(t *testing.T, n int, schema string) *migrate.Set {
	t.Helper()
	s, err := migrate.New("test", steps(n), schema)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// sqliteDB has no busy_timeout, so that waiting is the migrator's own.
func sqliteDB(t *testing.T) migrate.DB {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "test.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return migrate.SQLite(db)
}

// exercise is what every front end must do. open returns an empty database,
// and the schema that its names are to be put in.
func exercise(t *testing.T, open func(t *testing.T) (migrate.DB, string)) {
	t.Run("ten at once", func(t *testing.T) {
		db, schema := open(t)
		s := set(t, 3, schema)
		errs := make([]error, 10)
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() { errs[i] = s.Up(t.Context(), db) })
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		wantVersion(t, s, db, 3)
		for i := 1; i <= 3; i++ {
			table := s.Table(fmt.Sprintf("t%d", i))
			if n := count(t, db, "select count(*) from "+table); n != 1 {
				t.Errorf("%s has %d rows, want 1", table, n)
			}
		}
	})
	t.Run("step by step", func(t *testing.T) {
		db, schema := open(t)
		for n := 1; n <= 3; n++ {
			s := set(t, n, schema)
			if err := s.Validate(t.Context(), db); !errors.Is(err, migrate.ErrOld) {
				t.Errorf("Validate before Up to %d: %v, want ErrOld", n, err)
			}
			if err := s.Up(t.Context(), db); err != nil {
				t.Fatal(err)
			}
			wantVersion(t, s, db, n)
			if err := s.Validate(t.Context(), db); err != nil {
				t.Error(err)
			}
		}
		old := set(t, 2, schema)
		if err := old.Validate(t.Context(), db); !errors.Is(err, migrate.ErrNew) {
			t.Errorf("Validate of an older program: %v, want ErrNew", err)
		}
		if err := old.Up(t.Context(), db); !errors.Is(err, migrate.ErrNew) {
			t.Errorf("Up of an older program: %v, want ErrNew", err)
		}
	})
	t.Run("a file that fails leaves nothing", func(t *testing.T) {
		db, schema := open(t)
		files := steps(1).(fstest.MapFS)
		files["0002_bad.sql"] = &fstest.MapFile{Data: []byte("create table {{t2}} (n integer);\ninsert into {{t2}} (nothing) values (1);")}
		s, err := migrate.New("test", files, schema)
		if err != nil {
			t.Fatal(err)
		}
		err = s.Up(t.Context(), db)
		if err == nil || !strings.Contains(err.Error(), "0002_bad.sql") {
			t.Fatalf("Up: %v, want an error that names the file", err)
		}
		wantVersion(t, s, db, 0)
		if err := set(t, 2, schema).Up(t.Context(), db); err != nil {
			t.Errorf("Up with the file mended: %v", err)
		}
	})
	t.Run("two lines share a schema", func(t *testing.T) {
		db, schema := open(t)
		if err := set(t, 2, schema).Up(t.Context(), db); err != nil {
			t.Fatal(err)
		}
		other, err := migrate.New("other", fstest.MapFS{"0001_x.sql": {Data: []byte("create table {{x}} (n integer);")}}, schema)
		if err != nil {
			t.Fatal(err)
		}
		if err := other.Up(t.Context(), db); err != nil {
			t.Fatal(err)
		}
		wantVersion(t, other, db, 1)
		wantVersion(t, set(t, 2, schema), db, 2)
	})
	t.Run("exported text", func(t *testing.T) {
		db, schema := open(t)
		s := set(t, 2, schema)
		err := db.InTx(t.Context(), func(ctx context.Context, tx migrate.Tx) error {
			return tx.Exec(ctx, s.SQL(db.Dialect()))
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Validate(t.Context(), db); err != nil {
			t.Error(err)
		}
		if err := s.Up(t.Context(), db); err != nil {
			t.Errorf("Up after the exported text: %v", err)
		}
	})
}

func count(t *testing.T, db migrate.DB, q string) int {
	t.Helper()
	n, err := db.Int(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func wantVersion(t *testing.T, s *migrate.Set, db migrate.DB, want int) {
	t.Helper()
	v, err := s.Version(t.Context(), db)
	if err != nil || v != want {
		t.Fatalf("Version = %d, %v; want %d", v, err, want)
	}
}

func TestSQLite(t *testing.T) {
	t.Run("main", func(t *testing.T) {
		exercise(t, func(t *testing.T) (migrate.DB, string) { return sqliteDB(t), "" })
	})
	t.Run("named", func(t *testing.T) {
		exercise(t, func(t *testing.T) (migrate.DB, string) { return sqliteDB(t), "main" })
	})
}

// TestSQLiteCancelled: a failed Up must not leave a transaction open
// on a connection that goes back to the pool.
func TestSQLiteCancelled(t *testing.T) {
	db := sqliteDB(t)
	ctx, cancel := context.WithCancel(t.Context())
	err := db.InTx(ctx, func(ctx context.Context, tx migrate.Tx) error {
		if err := tx.Exec(ctx, "create table x (n integer)"); err != nil {
			return err
		}
		cancel()
		return ctx.Err()
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("InTx = %v", err)
	}
	if err := set(t, 1, "").Up(t.Context(), db); err != nil {
		t.Errorf("Up after a cancelled transaction: %v", err)
	}
	if n := count(t, db, "select count(*) from sqlite_master where name = 'x'"); n != 0 {
		t.Error("the cancelled transaction left its table")
	}
}

func TestNewRefuses(t *testing.T) {
	ok := &fstest.MapFile{Data: []byte("select 1;")}
	for name, tc := range map[string]struct {
		line, schema string
		files        fstest.MapFS
	}{
		"a line with a quote":       {line: "a'b", files: fstest.MapFS{"0001_a.sql": ok}},
		"no files":                  {line: "a", files: fstest.MapFS{}},
		"a gap":                     {line: "a", files: fstest.MapFS{"0001_a.sql": ok, "0003_b.sql": ok}},
		"a number twice":            {line: "a", files: fstest.MapFS{"0001_a.sql": ok, "0001_b.sql": ok}},
		"a stray file":              {line: "a", files: fstest.MapFS{"0001_a.sql": ok, "readme": ok}},
		"a hole that is no name":    {line: "a", files: fstest.MapFS{"0001_a.sql": {Data: []byte(`{{a"; drop}}`)}}},
		"a hole with a blank":       {line: "a", files: fstest.MapFS{"0001_a.sql": {Data: []byte(`{{ a }}`)}}},
		"a schema with a quote":     {line: "a", schema: `a"; drop schema b; --`, files: fstest.MapFS{"0001_a.sql": ok}},
		"a schema with a literal":   {line: "a", schema: `a'||'`, files: fstest.MapFS{"0001_a.sql": ok}},
		"a schema that is too long": {line: "a", schema: strings.Repeat("s", 64), files: fstest.MapFS{"0001_a.sql": ok}},
		"a schema with a NUL":       {line: "a", schema: "a\x00", files: fstest.MapFS{"0001_a.sql": ok}},
		"a schema not in UTF-8":     {line: "a", schema: "a\xff", files: fstest.MapFS{"0001_a.sql": ok}},
	} {
		_, err := migrate.New(tc.line, tc.files, tc.schema)
		if err == nil {
			t.Errorf("%s: no error", name)
		}
		if isName := errors.Is(err, migrate.ErrName); isName != (tc.schema != "") {
			t.Errorf("%s: %v: matches ErrName: %v", name, err, isName)
		}
	}
}
