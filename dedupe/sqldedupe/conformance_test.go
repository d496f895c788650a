package sqldedupe_test

import (
	"context"
	"database/sql"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/sqldedupe"
	"github.com/unecho/unecho/dedupe/storetest"
	"github.com/unecho/unecho/internal/dbcut"
	"github.com/unecho/unecho/internal/testenv"
)

func TestConformancePostgres(t *testing.T) {
	for _, level := range []sql.IsolationLevel{sql.LevelDefault, sql.LevelRepeatableRead, sql.LevelSerializable} {
		t.Run(level.String(), func(t *testing.T) { storetest.Run(t, openPostgres(sqldedupe.Options{Isolation: level})) })
	}
}

func TestConformanceSQLite(t *testing.T) {
	for name, params := range map[string]string{
		"WAL":          "_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)",
		"as it comes":  "",
		"immediate":    "_pragma=journal_mode(WAL)&_txlock=immediate",
		"busy_timeout": "_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)",
	} {
		t.Run(name, func(t *testing.T) { storetest.Run(t, openSQLite(sqldedupe.Options{Anonymous: name == "WAL"}, params)) })
	}
}

// harness is what the databases have in common.
type harness struct {
	db, direct *sql.DB // of the store, and for looking behind it
	store      dedupe.Store[*sql.Tx]
	ends       []string // statements that end a transaction
	abort      string   // a statement that fails, and the transaction with it
	dialect    sqldedupe.Dialect

	insert, count1 string // of an effect

	o sqldedupe.Options
}

func newHarness(tb testing.TB, d sqldedupe.Dialect, o sqldedupe.Options, s storetest.Settings, driver, store, direct string) *harness {
	tb.Helper()
	open := func(dsn string, conns int) *sql.DB {
		db, err := sql.Open(driver, dsn)
		if err != nil {
			tb.Fatal(err)
		}
		db.SetMaxOpenConns(conns)
		db.SetMaxIdleConns(conns)
		tb.Cleanup(func() { _ = db.Close() })
		return db
	}
	conns := s.Conns
	if conns == 0 {
		conns = 8
	}
	h := &harness{db: open(store, conns), direct: open(direct, 2)}
	o.LockWait = s.Wait
	h.dialect, h.o = d, o
	if err := sqldedupe.Migrate(tb.Context(), h.direct, d, &o); err != nil {
		tb.Fatal(err)
	}
	effect := "create table effect (name varchar(200) not null)"
	if d == sqldedupe.MySQL {
		effect += " collate utf8mb4_bin" // names differ in their letters' case
	}
	for _, sql := range []string{effect, "create table one (n integer unique)", "insert into one values (1)"} {
		if _, err := h.direct.Exec(sql); err != nil {
			tb.Fatal(err)
		}
	}
	h.insert, h.count1 = "insert into effect (name) values ($1)", "select count(*) from effect where name = $1"
	if d == sqldedupe.MySQL {
		h.insert, h.count1 = "insert into effect (name) values (?)", "select count(*) from effect where name = ?"
	}
	h.store = sqldedupe.NewStore(h.db, d, &o)
	return h
}

func (h *harness) Store() dedupe.Store[*sql.Tx] { return h.store }

func (h *harness) Add(ctx context.Context, tx *sql.Tx, name string) error {
	_, err := tx.ExecContext(ctx, h.insert, name)
	return err
}

func (h *harness) Count(tb testing.TB, name string) int {
	tb.Helper()
	return h.count(tb, h.count1, name)
}

func (h *harness) Conflicts(tb testing.TB) int {
	tb.Helper()
	return h.count(tb, "select count(*) from unecho_conflict")
}

func (h *harness) count(tb testing.TB, q string, args ...any) (n int) {
	tb.Helper()
	if err := h.direct.QueryRow(q, args...).Scan(&n); err != nil {
		tb.Fatal(err)
	}
	return n
}

func (h *harness) Admin() dedupe.Admin { return sqldedupe.NewAdmin(h.direct, h.dialect, &h.o) }

func (h *harness) Prune(tb testing.TB) int {
	tb.Helper()
	n, err := sqldedupe.Prune(tb.Context(), h.direct, h.dialect, &h.o, 0)
	if err != nil {
		tb.Fatal(err)
	}
	return n
}

func (h *harness) InUse() int { return h.db.Stats().InUse }

func (h *harness) Abort(ctx context.Context, tx *sql.Tx) error {
	_, err := tx.ExecContext(ctx, h.abort)
	return err
}

func (h *harness) Ends() []storetest.End[*sql.Tx] {
	ends := []storetest.End[*sql.Tx]{
		{Name: "Commit", Do: func(_ context.Context, tx *sql.Tx) error { return tx.Commit() }},
		{Name: "Rollback", Do: func(_ context.Context, tx *sql.Tx) error { return tx.Rollback() }},
	}
	for _, q := range h.ends {
		ends = append(ends, storetest.End[*sql.Tx]{Name: q, Do: func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, q)
			return err
		}})
	}
	return ends
}

// claimTriggers note the keys of a table, on each dialect. The log is undone with
// the transaction, as the key is.
var claimTriggers = map[sqldedupe.Dialect][]string{
	sqldedupe.Postgres: {
		"create table claim_log (n bigserial primary key, id text not null)",
		"create function log_claim() returns trigger language plpgsql as $$ begin insert into claim_log (id) values (new.key::text); return new; end $$",
		"create trigger log_claim after insert on unecho_key for each row execute function log_claim()",
	},
	sqldedupe.MySQL: {
		"create table claim_log (n integer auto_increment primary key, id varchar(40) not null)",
		"create trigger log_claim after insert on unecho_key for each row insert into claim_log (id) values (hex(new.`key`))",
	},
	sqldedupe.SQLite: {
		"create table claim_log (n integer primary key, id text not null)",
		"create trigger log_claim after insert on unecho_key begin insert into claim_log (id) values (hex(new.key)); end",
	},
}

func (h *harness) LogClaims(tb testing.TB) func() []dedupe.KeyID {
	tb.Helper()
	for _, sql := range claimTriggers[h.dialect] {
		if _, err := h.direct.Exec(sql); err != nil {
			tb.Fatal(err)
		}
	}
	return func() (ids []dedupe.KeyID) {
		tb.Helper()
		rows, err := h.direct.Query("select id from claim_log order by n")
		if err != nil {
			tb.Fatal(err)
		}
		defer func() { _ = rows.Close() }()
		for rows.Next() {
			var text string
			if err := rows.Scan(&text); err != nil {
				tb.Fatal(err)
			}
			id, err := dedupe.ParseKeyID(text)
			if err != nil {
				tb.Fatal(err)
			}
			ids = append(ids, id)
		}
		if err := rows.Err(); err != nil {
			tb.Fatal(err)
		}
		return ids
	}
}

// postgres has all powers.
type postgres struct {
	*harness
	*dbcut.Proxy
}

func openPostgres(o sqldedupe.Options) storetest.Open[*sql.Tx] {
	return func(tb testing.TB, s storetest.Settings) storetest.Harness[*sql.Tx] {
		url := testenv.SchemaURL(tb)
		proxy, through := dbcut.Start(tb, url)
		h := newHarness(tb, sqldedupe.Postgres, o, s, "pgx", through, url)
		h.ends = []string{"commit", "rollback", "commit; begin", "rollback; begin; select pg_current_xact_id()", "rollback and chain"}
		h.abort = "select 1/0"
		return postgres{h, proxy}
	}
}

func (postgres) Lost() error { return &pgconn.PgError{Severity: "ERROR", Code: "40001"} }

// sqlite has no connection that could be cut.
type sqlite struct{ *harness }

func openSQLite(o sqldedupe.Options, params string) storetest.Open[*sql.Tx] {
	return func(tb testing.TB, s storetest.Settings) storetest.Harness[*sql.Tx] {
		file := "file:" + filepath.Join(tb.TempDir(), "test.db")
		h := newHarness(tb, sqldedupe.SQLite, o, s, "sqlite", file+"?"+params, file+"?_pragma=busy_timeout(10000)&"+params)
		h.ends = []string{"commit", "rollback", "commit; begin", "rollback; begin", "rollback; begin; insert into one values (2); delete from one where n = 2"}
		h.abort = "insert or rollback into one values (1)"
		return sqlite{h}
	}
}

type busy struct{}

func (busy) Error() string { return "database is locked" }
func (busy) Code() int     { return 5 }

func (sqlite) Lost() error { return busy{} }
