package sqldedupe_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/dedupe/sqldedupe"
	"github.com/unecho/unecho/internal/testenv"
)

// database is a migrated database of one of the dialects.
type database struct {
	t *testing.T
	*sql.DB
	dialect sqldedupe.Dialect
	// sleep is a statement that takes a minute, or as good as that.
	sleep string
}

func openSQL(t *testing.T, name, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(name, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// each runs a test on every dialect.
func each(t *testing.T, test func(t *testing.T, db database)) {
	for _, d := range []sqldedupe.Dialect{sqldedupe.Postgres, sqldedupe.SQLite} {
		t.Run(d.String(), func(t *testing.T) {
			db := database{t: t, dialect: d}
			if d == sqldedupe.Postgres {
				db.DB = openSQL(t, "pgx", testenv.SchemaURL(t))
				db.sleep = "select pg_sleep(60)"
			} else {
				db.DB = openSQL(t, "sqlite", sqliteFile(t, "_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)"))
				db.sleep = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"
			}
			if err := sqldedupe.Migrate(t.Context(), db.DB, d, nil); err != nil {
				t.Fatal(err)
			}
			test(t, db)
		})
	}
}

func sqliteFile(t *testing.T, params string) string {
	return "file:" + filepath.Join(t.TempDir(), "test.db") + "?" + params
}

func (db database) store(o sqldedupe.Options) dedupe.Store[*sql.Tx] {
	return sqldedupe.NewStore(db.DB, db.dialect, &o)
}

func (db database) exec(q string, args ...any) {
	db.t.Helper()
	if _, err := db.ExecContext(db.t.Context(), q, args...); err != nil {
		db.t.Fatal(err)
	}
}

func (db database) wantInt(want int, q string) {
	db.t.Helper()
	var n int
	if err := db.QueryRowContext(db.t.Context(), q).Scan(&n); err != nil || n != want {
		db.t.Errorf("%s: %d, %v; want %d", q, n, err, want)
	}
}

func (db database) wantIdle() {
	db.t.Helper()
	testenv.Within(db.t, 10*time.Second, "all connections are back", func() bool { return db.Stats().InUse == 0 })
}

func claim(id string) dedupe.Claim {
	k := dedupe.Key{Consumer: "billing", Source: "/orders", ID: id}
	return dedupe.Claim{Key: k, Fingerprint: dedupe.Fingerprint(k)}
}

func nothing(context.Context, *sql.Tx) ([]byte, error) { return nil, nil }

// TestB34Leaked: the handler returns while a goroutine of it is in the middle
// of a call. database/sql makes the commit wait for that call.
func TestB34Leaked(t *testing.T) {
	each(t, func(t *testing.T, db database) {
		db.exec("create table e (s text)")
		store := db.store(sqldedupe.Options{Tx: dedupe.TxOptions{CommitTimeout: 50 * time.Millisecond}})
		for _, own := range []error{nil, errors.New("failed")} {
			arg, ended := blocking{make(chan struct{}), make(chan struct{})}, make(chan struct{})
			_, err := store.Once(t.Context(), claim("1"), func(_ context.Context, tx *sql.Tx) ([]byte, error) {
				go func() {
					defer close(ended)
					_, _ = tx.ExecContext(t.Context(), "insert into e values ($1)", arg)
				}()
				<-arg.entered
				return nil, own
			})
			if !errors.Is(err, dedupe.ErrScope) || own != nil && !errors.Is(err, own) {
				t.Errorf("Once: %v, want ErrScope and %v", err, own)
			}
			close(arg.release)
			<-ended
			db.wantIdle()
			db.wantInt(0, "select count(*) from unecho_key")
			db.wantInt(0, "select count(*) from e")
		}
		if res, err := store.Once(t.Context(), claim("1"), nothing); err != nil || res.Outcome != dedupe.Processed {
			t.Errorf("Once: %v, %v; want processed", res.Outcome, err)
		}
	})
}

// blocking is an argument that keeps the call that it is given to from ending.
type blocking struct{ entered, release chan struct{} }

func (b blocking) Value() (driver.Value, error) {
	close(b.entered)
	<-b.release
	return "late", nil
}

// TestRowsLeftOpen: database/sql closes them at the end of the transaction, but
// PostgreSQL's connection cannot commit before that.
func TestRowsLeftOpen(t *testing.T) {
	each(t, func(t *testing.T, db database) {
		db.exec("create table e (n integer)")
		db.exec("insert into e values (1), (2), (3)")
		res, err := db.store(sqldedupe.Options{}).Once(t.Context(), claim("1"), func(ctx context.Context, tx *sql.Tx) ([]byte, error) {
			rows, err := tx.QueryContext(ctx, "select n from e") //nolint:sqlclosecheck,rowserrcheck // what it is about
			if err != nil || !rows.Next() {
				t.Error("no rows", err)
			}
			return nil, nil
		})
		switch {
		case err == nil && res.Outcome == dedupe.Processed:
			db.wantInt(1, "select count(*) from unecho_key")
		case errors.Is(err, dedupe.ErrScope):
			db.wantInt(0, "select count(*) from unecho_key")
		default:
			t.Errorf("Once: %v, %v; want processed or ErrScope", res.Outcome, err)
		}
		db.wantIdle()
	})
}

// TestHandlerTimeoutIsNoOutage: a statement that the handler's own context cuts
// off may take the connection or the transaction with it.
func TestHandlerTimeoutIsNoOutage(t *testing.T) {
	each(t, func(t *testing.T, db database) {
		_, err := db.store(sqldedupe.Options{}).Once(t.Context(), claim("1"), func(ctx context.Context, tx *sql.Tx) ([]byte, error) {
			ctx, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
			defer cancel()
			_, err := tx.ExecContext(ctx, db.sleep)
			return nil, fmt.Errorf("handler: %w", err)
		})
		if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, dedupe.ErrUnavailable) || errors.Is(err, dedupe.ErrScope) {
			t.Errorf("Once: %v, want the handler's own time-out", err)
		}
		db.wantIdle()
		if res, err := db.store(sqldedupe.Options{}).Once(t.Context(), claim("1"), nothing); err != nil || res.Outcome != dedupe.Processed {
			t.Errorf("Once: %v, %v; want processed", res.Outcome, err)
		}
	})
}

func TestPoolExhausted(t *testing.T) {
	each(t, func(t *testing.T, db database) {
		db.SetMaxOpenConns(1)
		held, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_, err = db.store(sqldedupe.Options{Timeout: 50 * time.Millisecond}).Once(t.Context(), claim("1"), nothing)
		if !errors.Is(err, dedupe.ErrUnavailable) || !strings.Contains(err.Error(), "1 of 1 are in use") {
			t.Errorf("Once: %v, want ErrUnavailable that names the pool", err)
		}
		_ = held.Close()
		if _, err := db.store(sqldedupe.Options{}).Once(t.Context(), claim("1"), nothing); err != nil {
			t.Error(err)
		}
	})
}

func TestNotMigrated(t *testing.T) {
	each(t, func(t *testing.T, db database) {
		db.exec("drop table unecho_key")
		_, err := db.store(sqldedupe.Options{}).Once(t.Context(), claim("1"), nothing)
		if !errors.Is(err, dedupe.ErrUnavailable) {
			t.Errorf("Once: %v, want ErrUnavailable", err)
		}
		db.wantIdle()
	})
}

func TestPrune(t *testing.T) {
	each(t, func(t *testing.T, db database) {
		if n, err := sqldedupe.Prune(t.Context(), db.DB, db.dialect, nil, 0); n != 0 || err != nil {
			t.Errorf("Prune of nothing = %d, %v", n, err)
		}
		store := db.store(sqldedupe.Options{})
		for i := range 5 {
			c := claim(fmt.Sprint(i))
			c.Retain = time.Millisecond
			if i >= 3 {
				c.Retain = time.Hour
			}
			if _, err := store.Once(t.Context(), c, nothing); err != nil {
				t.Fatal(err)
			}
			c.Fingerprint = [32]byte{1}
			if i == 4 {
				if res, err := store.Once(t.Context(), c, nothing); err != nil || res.Outcome != dedupe.Conflict {
					t.Fatal(res.Outcome, err)
				}
			}
		}
		total := 0
		testenv.Within(t, 5*time.Second, "three keys are pruned, one at a time", func() bool {
			n, err := sqldedupe.Prune(t.Context(), db.DB, db.dialect, nil, 1)
			if err != nil || n > 1 {
				t.Fatalf("Prune = %d, %v", n, err)
			}
			total += n
			return total == 3
		})
		if n, err := sqldedupe.Prune(t.Context(), db.DB, db.dialect, nil, 0); n != 0 || err != nil {
			t.Errorf("Prune of what is kept = %d, %v", n, err)
		}
		db.wantInt(2, "select count(*) from unecho_key")
		db.wantInt(1, "select count(*) from unecho_conflict")
	})
}

func TestSQL(t *testing.T) {
	empty := database{t: t, DB: openSQL(t, "sqlite", sqliteFile(t, "")), dialect: sqldedupe.SQLite}
	if err := sqldedupe.Validate(t.Context(), empty.DB, sqldedupe.SQLite, nil); err == nil || !strings.Contains(err.Error(), "migrate it first") {
		t.Errorf("Validate of an empty database: %v, want what to do", err)
	}
	empty.exec(sqldedupe.SQL(sqldedupe.SQLite, nil))
	if err := sqldedupe.Validate(t.Context(), empty.DB, sqldedupe.SQLite, nil); err != nil {
		t.Error(err)
	}
	if got, want := sqldedupe.SQL(sqldedupe.Postgres, nil), pgdedupe.SQL(nil); got != want {
		t.Error("the tables on PostgreSQL are not those of pgdedupe")
	}
}

// TestOneSetOfTables: what pgdedupe has done is done for sqldedupe.
func TestOneSetOfTables(t *testing.T) {
	pool := testenv.Pool(t, 2)
	if err := pgdedupe.Migrate(t.Context(), pool, nil); err != nil {
		t.Fatal(err)
	}
	db := openSQL(t, "pgx", pool.Config().ConnString())
	if err := sqldedupe.Validate(t.Context(), db, sqldedupe.Postgres, nil); err != nil {
		t.Error(err)
	}
	reply := []byte("reply")
	if _, err := sqldedupe.NewStore(db, sqldedupe.Postgres, nil).Once(t.Context(), claim("1"), func(context.Context, *sql.Tx) ([]byte, error) {
		return reply, nil
	}); err != nil {
		t.Fatal(err)
	}
	res, err := pgdedupe.NewStore(pool, nil).Once(t.Context(), claim("1"), nil)
	if err != nil || res.Outcome != dedupe.Duplicate || string(res.Reply) != "reply" {
		t.Errorf("Once: %v, %q, %v; want the duplicate's reply", res.Outcome, res.Reply, err)
	}
}

// TestValidateSQLite: settings that lose what was acknowledged are refused.
func TestValidateSQLite(t *testing.T) {
	for params, want := range map[string]string{
		"": "", "_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)": "", "_pragma=synchronous(EXTRA)": "",
		"_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)": "synchronous is 1",
		"_pragma=synchronous(OFF)":                              "synchronous is 0",
		"_pragma=journal_mode(OFF)":                             "journal_mode is off",
		"_pragma=journal_mode(MEMORY)":                          "journal_mode is memory",
	} {
		db := openSQL(t, "sqlite", sqliteFile(t, params))
		if err := sqldedupe.Migrate(t.Context(), db, sqldedupe.SQLite, nil); err != nil {
			t.Fatal(err)
		}
		err := sqldedupe.Validate(t.Context(), db, sqldedupe.SQLite, nil)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", params, err, want)
		}
	}
	memory := openSQL(t, "sqlite", ":memory:?_pragma=journal_mode(OFF)")
	memory.SetMaxOpenConns(1)
	if err := sqldedupe.Migrate(t.Context(), memory, sqldedupe.SQLite, nil); err != nil {
		t.Fatal(err)
	}
	if err := sqldedupe.Validate(t.Context(), memory, sqldedupe.SQLite, nil); err != nil {
		t.Errorf("a database in memory: %v", err)
	}
}

// TestSQLiteReaderInTheWay: in a rollback journal a reader can make a commit
// fail. Nothing is committed then, and the handler is run again.
func TestSQLiteReaderInTheWay(t *testing.T) {
	db := database{t: t, DB: openSQL(t, "sqlite", sqliteFile(t, "_pragma=journal_mode(DELETE)")), dialect: sqldedupe.SQLite}
	if err := sqldedupe.Migrate(t.Context(), db.DB, db.dialect, nil); err != nil {
		t.Fatal(err)
	}
	db.exec("create table e (n integer)")
	db.exec("insert into e values (1), (2)")
	reader, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	rows, err := reader.QueryContext(t.Context(), "select n from e") //nolint:sqlclosecheck,rowserrcheck // closed with the reader
	if err != nil || !rows.Next() {
		t.Fatal("no rows", err)
	}
	runs := 0
	res, err := db.store(sqldedupe.Options{}).Once(t.Context(), claim("1"), func(ctx context.Context, tx *sql.Tx) ([]byte, error) {
		if runs++; runs == 2 {
			_ = rows.Close()
			_ = reader.Rollback()
		}
		_, err := tx.ExecContext(ctx, "insert into e values (3)")
		return nil, err
	})
	if err != nil || res.Outcome != dedupe.Processed || runs != 2 {
		t.Errorf("Once: %v, %v after %d runs; want processed after two", res.Outcome, err, runs)
	}
	db.wantInt(3, "select count(*) from e")
	db.wantIdle()
}

func TestOptionsCheck(t *testing.T) {
	db := openSQL(t, "sqlite", ":memory:")
	for _, tc := range []struct {
		d sqldedupe.Dialect
		o sqldedupe.Options
	}{
		{0, sqldedupe.Options{}}, {4, sqldedupe.Options{}},
		{sqldedupe.MySQL, sqldedupe.Options{Schema: "a`b"}}, {sqldedupe.MySQL, sqldedupe.Options{Isolation: sql.LevelSnapshot}},
		{sqldedupe.SQLite, sqldedupe.Options{Schema: `a"b`}},
		{sqldedupe.SQLite, sqldedupe.Options{Isolation: sql.LevelReadCommitted}},
		{sqldedupe.Postgres, sqldedupe.Options{Isolation: sql.LevelReadUncommitted}},
		{sqldedupe.Postgres, sqldedupe.Options{Isolation: sql.LevelSnapshot}},
	} {
		if tc.o.Check(tc.d) == nil {
			t.Errorf("%v, %+v passes", tc.d, tc.o)
		}
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("NewStore with %v, %+v does not panic", tc.d, tc.o)
				}
			}()
			sqldedupe.NewStore(db, tc.d, &tc.o)
		}()
	}
	if err := (*sqldedupe.Options)(nil).Check(sqldedupe.Postgres); err != nil {
		t.Error(err)
	}
}

// TestBatchLeavesLockTimeout: the bound of the claims is not that of the
// handler's statements, however many statements the claims took.
func TestBatchLeavesLockTimeout(t *testing.T) {
	db := database{t: t, DB: openSQL(t, "pgx", testenv.SchemaURL(t)), dialect: sqldedupe.Postgres}
	if err := sqldedupe.Migrate(t.Context(), db.DB, db.dialect, nil); err != nil {
		t.Fatal(err)
	}
	store := db.store(sqldedupe.Options{}).(dedupe.Batcher[*sql.Tx])
	for _, n := range []int{2, 1200} {
		var claims []dedupe.Claim
		for i := range n {
			claims = append(claims, claim(fmt.Sprint(n, " ", i)))
		}
		if _, err := store.OnceEach(t.Context(), claims, func(ctx context.Context, tx *sql.Tx, _ []int) ([][]byte, error) {
			var bound string
			err := tx.QueryRowContext(ctx, "show lock_timeout").Scan(&bound)
			if bound != "0" {
				t.Errorf("%d claims: the handler's lock_timeout is %s, want 0", n, bound)
			}
			return nil, err
		}); err != nil {
			t.Fatal(err)
		}
	}
}
