package sqldedupe_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	mysqldriver "github.com/go-sql-driver/mysql"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/sqldedupe"
	"github.com/unecho/unecho/dedupe/storetest"
	"github.com/unecho/unecho/internal/dbcut"
	"github.com/unecho/unecho/internal/testenv"
)

// mysql has all powers but Aborter: a statement that fails undoes itself alone.
type mysql struct {
	*harness
	*dbcut.Proxy
}

func openMySQL(o sqldedupe.Options, change func(*mysqldriver.Config)) storetest.Open[*sql.Tx] {
	return func(tb testing.TB, s storetest.Settings) storetest.Harness[*sql.Tx] {
		tb.Helper()
		direct := testenv.MariaDB(tb)
		cfg, err := mysqldriver.ParseDSN(direct)
		if err != nil {
			tb.Fatal(err)
		}
		change(cfg)
		proxy, addr := dbcut.StartMySQL(tb, cfg.Addr)
		cfg.Addr = addr
		h := newHarness(tb, sqldedupe.MySQL, o, s, "mysql", cfg.FormatDSN(), direct)
		h.ends = []string{"commit", "rollback", "commit and chain", "rollback and chain", "create table ddl (n integer)", "begin", "set autocommit = 1"}
		return mysql{h, proxy}
	}
}

func (mysql) Lost() error { return &mysqldriver.MySQLError{Number: 1213, Message: "Deadlock found"} }

// Abort hides the power of the harness.
func (mysql) Abort() {}

func asItComes(*mysqldriver.Config) {}

func TestConformanceMySQL(t *testing.T) {
	for _, level := range []sql.IsolationLevel{sql.LevelDefault, sql.LevelRepeatableRead, sql.LevelSerializable} {
		t.Run(level.String(), func(t *testing.T) { storetest.Run(t, openMySQL(sqldedupe.Options{Isolation: level}, asItComes)) })
	}
	for name, change := range map[string]func(*mysqldriver.Config){
		"no prepared statements": func(c *mysqldriver.Config) { c.InterpolateParams = true },
		"found rows, local time": func(c *mysqldriver.Config) {
			c.ClientFoundRows, c.ParseTime, c.Loc = true, true, time.Local
			c.Params = map[string]string{"time_zone": "'-11:00'"}
		},
		"packets of a mebibyte": func(c *mysqldriver.Config) { c.MaxAllowedPacket = 1 << 20 },
		"packets of a mebibyte, no prepared statements": func(c *mysqldriver.Config) {
			c.MaxAllowedPacket, c.InterpolateParams = 1<<20, true
		},
		"several statements": func(c *mysqldriver.Config) { c.MultiStatements = true },
	} {
		t.Run(name, func(t *testing.T) { storetest.Run(t, openMySQL(sqldedupe.Options{Anonymous: true}, change)) })
	}
	t.Run("wait bounded by the session", func(t *testing.T) {
		storetest.Run(t, openMySQL(sqldedupe.BySession(sqldedupe.Options{}), asItComes))
	})
}

func TestClaimConformanceMySQL(t *testing.T) {
	for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		t.Run("MySQL "+level.String(), func(t *testing.T) {
			storetest.RunClaim(t, func(tb testing.TB) storetest.ClaimHarness[*sql.Tx] {
				return newClaims(openMySQL(sqldedupe.Options{}, asItComes)(tb, storetest.Settings{}).(mysql).harness, level)
			})
		})
	}
}

func mysqlFixture(t *testing.T) mysql {
	t.Helper()
	return openMySQL(sqldedupe.Options{}, asItComes)(t, storetest.Settings{}).(mysql)
}

// A deadlock undoes the whole transaction behind the handler's back. One that
// ignores it and goes on must not commit what it does then.
func TestMySQLIgnoredDeadlockIsNoSuccess(t *testing.T) {
	h := mysqlFixture(t)
	ctx := t.Context()
	for _, q := range []string{"create table pair (n integer primary key, v integer)", "insert into pair values (1, 0), (2, 0)", "create table heavy (n integer)"} {
		if _, err := h.direct.ExecContext(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	k := dedupe.Key{Consumer: "c", ID: "1"}
	runs := 0
	res, err := h.store.Once(ctx, dedupe.Claim{Key: k}, func(ctx context.Context, tx *sql.Tx) ([]byte, error) {
		runs++
		if _, err := tx.ExecContext(ctx, "update pair set v = 1 where n = 1"); err != nil {
			return nil, err
		}
		if err := deadlock(ctx, t, h.direct, tx); err == nil {
			t.Error("there was no deadlock, so this test shows nothing")
		}
		return nil, h.Add(ctx, tx, "after the deadlock")
	})
	if !errors.Is(err, dedupe.ErrScope) {
		t.Errorf("Once: %v, %v after %d runs; want ErrScope", res.Outcome, err, runs)
	}
	if n := h.Count(t, "after the deadlock"); n != 0 {
		t.Errorf("%d effects are committed without their key", n)
	}
	if res, err := h.store.Once(ctx, dedupe.Claim{Key: k}, func(context.Context, *sql.Tx) ([]byte, error) { return nil, nil }); err != nil || res.Outcome != dedupe.Processed {
		t.Errorf("the redelivery: %v, %v", res.Outcome, err)
	}
	var autocommit int
	if err := h.db.QueryRowContext(ctx, "select @@autocommit").Scan(&autocommit); err != nil || autocommit != 1 {
		t.Errorf("a connection came back with autocommit %d, %v", autocommit, err)
	}
}

// deadlock makes tx, which has the first row, the victim of a transaction that
// weighs more.
func deadlock(ctx context.Context, t *testing.T, db *sql.DB, tx *sql.Tx) error {
	other, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		if _, err := other.ExecContext(ctx, "insert into heavy values (1)"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := other.ExecContext(ctx, "update pair set v = 2 where n = 2"); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := other.ExecContext(ctx, "update pair set v = 2 where n = 1"); err != nil {
			t.Errorf("the heavier transaction: %v", err)
		}
	})
	defer func() {
		wg.Wait()
		_ = other.Rollback()
	}()
	_, err = tx.ExecContext(ctx, "update pair set v = 1 where n = 2")
	return err
}

// A deadlock that a handler returns is run again, however it is wrapped.
func TestMySQLDeadlockIsRunAgain(t *testing.T) {
	h := mysqlFixture(t)
	runs := 0
	res, err := h.store.Once(t.Context(), dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: "1"}}, func(ctx context.Context, tx *sql.Tx) ([]byte, error) {
		if runs++; runs < 3 {
			return nil, errors.Join(errors.New("handler"), h.add(ctx, tx), mysql{}.Lost())
		}
		return nil, h.Add(ctx, tx, "e")
	})
	if err != nil || res.Outcome != dedupe.Processed || runs != 3 || h.Count(t, "e") != 1 {
		t.Errorf("%v, %v after %d runs with %d effects", res.Outcome, err, runs, h.Count(t, "e"))
	}
}

func (h *harness) add(ctx context.Context, tx *sql.Tx) error { return h.Add(ctx, tx, "e") }

// A table of another engine commits what it likes.
func TestMySQLValidate(t *testing.T) {
	h := mysqlFixture(t)
	ctx := t.Context()
	if err := sqldedupe.Validate(ctx, h.direct, sqldedupe.MySQL, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := h.direct.ExecContext(ctx, "alter table unecho_key engine = MyISAM"); err != nil {
		t.Fatal(err)
	}
	if err := sqldedupe.Validate(ctx, h.direct, sqldedupe.MySQL, nil); err == nil || !strings.Contains(err.Error(), "engine = InnoDB") {
		t.Errorf("Validate with MyISAM: %v", err)
	}
	db, err := sql.Open("mysql", testenv.MariaDB(t)+"?autocommit=0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	if err := sqldedupe.Validate(ctx, db, sqldedupe.MySQL, nil); err == nil || !strings.Contains(err.Error(), "migrate it first") {
		t.Errorf("Validate before Migrate: %v", err)
	}
	if err := sqldedupe.Migrate(ctx, db, sqldedupe.MySQL, nil); err != nil {
		t.Fatal(err)
	}
	if err := sqldedupe.Validate(ctx, db, sqldedupe.MySQL, nil); err == nil || !strings.Contains(err.Error(), "autocommit") {
		t.Errorf("Validate without autocommit: %v", err)
	}
}

// Ten processes may migrate at once; a step that ended half-way is run again;
// and what SQL returns is accepted.
func TestMySQLMigrate(t *testing.T) {
	ctx := t.Context()
	open := func(dsn string) *sql.DB {
		db, err := sql.Open("mysql", dsn)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = db.Close() })
		return db
	}
	db := open(testenv.MariaDB(t))
	_, all, _ := strings.Cut(sqldedupe.SQL(sqldedupe.MySQL, nil), "create table if not exists `unecho_key`")
	first, _, _ := strings.Cut(all, ";\n")
	if _, err := db.ExecContext(ctx, "create table `unecho_key`"+first); err != nil { // a process died after the first statement
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			if err := sqldedupe.Migrate(ctx, db, sqldedupe.MySQL, nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if err := sqldedupe.Validate(ctx, db, sqldedupe.MySQL, nil); err != nil {
		t.Error(err)
	}
	if has, needs, err := sqldedupe.Version(ctx, db, sqldedupe.MySQL, nil); err != nil || has != needs || needs < 1 {
		t.Errorf("Version = %d, %d, %v", has, needs, err)
	}

	other := open(testenv.MariaDB(t))
	for statement := range strings.SplitSeq(sqldedupe.SQL(sqldedupe.MySQL, nil), ";\n") {
		if strings.TrimSpace(statement) == "" {
			continue
		}
		if _, err := other.ExecContext(ctx, statement); err != nil {
			t.Fatalf("%s: %v", statement, err)
		}
	}
	if err := sqldedupe.Validate(ctx, other, sqldedupe.MySQL, nil); err != nil {
		t.Error(err)
	}
}

// Keys in another database of the server.
func TestMySQLSchema(t *testing.T) {
	h := mysqlFixture(t)
	ctx := t.Context()
	cfg, err := mysqldriver.ParseDSN(testenv.MariaDB(t))
	if err != nil {
		t.Fatal(err)
	}
	o := &sqldedupe.Options{Schema: cfg.DBName}
	if err := errors.Join(sqldedupe.Migrate(ctx, h.direct, sqldedupe.MySQL, o), sqldedupe.Validate(ctx, h.direct, sqldedupe.MySQL, o)); err != nil {
		t.Fatal(err)
	}
	st := sqldedupe.NewStore(h.direct, sqldedupe.MySQL, o)
	c := dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: "1"}, Retain: time.Millisecond}
	for _, want := range []dedupe.Outcome{dedupe.Processed, dedupe.Duplicate} {
		if res, err := st.Once(ctx, c, func(ctx context.Context, tx *sql.Tx) ([]byte, error) { return nil, h.Add(ctx, tx, "e") }); err != nil || res.Outcome != want {
			t.Errorf("Once: %v, %v; want %v", res.Outcome, err, want)
		}
	}
	testenv.Within(t, 10*time.Second, "the key is pruned", func() bool {
		n, err := sqldedupe.Prune(ctx, h.direct, sqldedupe.MySQL, o, 0)
		if err != nil {
			t.Fatal(err)
		}
		return n == 1
	})
	if _, err := sqldedupe.NewAdmin(h.direct, sqldedupe.MySQL, o).Counts(ctx); err != nil {
		t.Error(err)
	}
	if err := (&sqldedupe.Options{Schema: "a`b"}).Check(sqldedupe.MySQL); err == nil {
		t.Error("a name with a backtick is accepted")
	}
}
