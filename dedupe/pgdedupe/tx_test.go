package pgdedupe_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/internal/testenv"
)

// TestTx: the scope does what a pgx.Tx does.
func TestTx(t *testing.T) {
	f := newFixture(t, 2, "create table e (n int, s text)")
	var kept pgx.Tx
	var large pgx.LargeObjects
	_, err := pgdedupe.NewStore(f.pool, nil).Once(t.Context(), claim("1"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
		kept = tx
		n, err := tx.CopyFrom(ctx, pgx.Identifier{"e"}, []string{"n", "s"}, pgx.CopyFromRows([][]any{{1, "a"}, {2, "b"}}))
		if n != 2 || err != nil {
			t.Errorf("CopyFrom = %d, %v", n, err)
		}
		rows, err := tx.Query(ctx, "select n from e order by n")
		if got, err := pgx.CollectRows(rows, pgx.RowTo[int]); len(got) != 2 || err != nil {
			t.Errorf("Query: %v, %v", got, err)
		}
		if err != nil {
			t.Error(err)
		}
		if err := tx.QueryRow(ctx, "select n from e where n = 3").Scan(new(int)); !errors.Is(err, pgx.ErrNoRows) {
			t.Errorf("QueryRow of nothing: %v", err)
		}
		if _, err := tx.Prepare(ctx, "add", "insert into e values ($1, $2)"); err != nil {
			t.Error(err)
		}
		b := &pgx.Batch{}
		b.Queue("add", 3, "c")
		b.Queue("select count(*) from e")
		b.Queue("select n from e where n = 3")
		br := tx.SendBatch(ctx, b)
		if tag, err := br.Exec(); err != nil || tag.RowsAffected() != 1 {
			t.Errorf("Exec of a batch: %v, %v", tag, err)
		}
		var count int
		if err := br.QueryRow().Scan(&count); err != nil || count != 3 {
			t.Errorf("QueryRow of a batch: %d, %v", count, err)
		}
		rows, _ = br.Query()
		if got, err := pgx.CollectRows(rows, pgx.RowTo[int]); len(got) != 1 || err != nil {
			t.Errorf("Query of a batch: %v, %v", got, err)
		}
		if err := br.Close(); err != nil {
			t.Error(err)
		}
		large = tx.LargeObjects()
		oid, err := large.Create(ctx, 0)
		if err != nil {
			t.Error(err)
		}
		o, err := large.Open(ctx, oid, pgx.LargeObjectModeWrite)
		if err != nil {
			t.Error(err)
		} else if _, err := io.WriteString(o, "large"); err != nil {
			t.Error(err)
		}
		return nil, large.Unlink(ctx, oid)
	})
	if err != nil {
		t.Fatal(err)
	}
	f.wantInt(3, "select count(*) from e")
	f.wantIdle()
	for name, use := range map[string]func() error{
		"Exec":     func() error { _, err := kept.Exec(t.Context(), "select 1"); return err },
		"Query":    func() error { rows, err := kept.Query(t.Context(), "select 1"); rows.Close(); return err },
		"QueryRow": func() error { return kept.QueryRow(t.Context(), "select 1").Scan(new(int)) },
		"CopyFrom": func() error {
			_, err := kept.CopyFrom(t.Context(), pgx.Identifier{"e"}, []string{"n"}, pgx.CopyFromRows(nil))
			return err
		},
		"SendBatch": func() error {
			b := &pgx.Batch{}
			b.Queue("select 1")
			return kept.SendBatch(t.Context(), b).Close()
		},
		"Prepare":       func() error { _, err := kept.Prepare(t.Context(), "x", "select 1"); return err },
		"Begin":         func() error { _, err := kept.Begin(t.Context()); return err },
		"Commit":        func() error { return kept.Commit(t.Context()) },
		"Rollback":      func() error { return kept.Rollback(t.Context()) },
		"large objects": func() error { _, err := large.Create(t.Context(), 0); return err },
	} {
		if err := use(); !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("%s after the handler has returned: %v, want pgx.ErrTxClosed", name, err)
		}
	}
	f.wantIdle()
}

// TestSavepoints: a failure inside one leaves no trace on the transaction, nor
// on the verdict about the handler.
func TestSavepoints(t *testing.T) {
	f := newFixture(t, 2, "create table e (n int unique)", "insert into e values (1)")
	store := pgdedupe.NewStore(f.pool, nil)
	inner := errors.New("the inner transaction failed")
	recovered := func(ctx context.Context, tx pgx.Tx) error {
		if err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "insert into e values (2)"); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "insert into e values (1)")
			return err
		}); err == nil {
			t.Error("the inner transaction did not fail")
		}
		return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "insert into e values (3)")
			return err
		})
	}
	_, err := store.Once(t.Context(), claim("fails"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
		if err := recovered(ctx, tx); err != nil {
			t.Error(err)
		}
		return nil, inner
	})
	if !errors.Is(err, inner) {
		t.Errorf("Once: %v, want the handler's error as it is", err)
	}
	if _, err := store.Once(t.Context(), claim("succeeds"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
		return nil, recovered(ctx, tx)
	}); err != nil {
		t.Error(err)
	}
	f.wantInt(13, "select sum(n * n) + 3 from e") // 1 and 3
	f.wantIdle()
}

func TestSwallowedErrorIsNamed(t *testing.T) {
	f := newFixture(t, 1)
	for name, swallow := range map[string]func(ctx context.Context, tx pgx.Tx){
		"Exec": func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Exec(ctx, "select 1/0") },
		"two": func(ctx context.Context, tx pgx.Tx) {
			_, _ = tx.Exec(ctx, "select 1/0")
			_, _ = tx.Exec(ctx, "select 1")
		},
		"QueryRow": func(ctx context.Context, tx pgx.Tx) { _ = tx.QueryRow(ctx, "select 1/0").Scan(new(int)) },
		"Query": func(ctx context.Context, tx pgx.Tx) {
			rows, _ := tx.Query(ctx, "select 1 / (3 - n) from generate_series(1, 5) n")
			for rows.Next() {
				_ = rows.Scan(new(int))
			}
		},
		"Close": func(ctx context.Context, tx pgx.Tx) {
			rows, _ := tx.Query(ctx, "select 1 / (3 - n) from generate_series(1, 5) n")
			rows.Close()
		},
		"Batch": func(ctx context.Context, tx pgx.Tx) {
			b := &pgx.Batch{}
			b.Queue("select 1 / $1", 0)
			_ = tx.SendBatch(ctx, b).Close()
		},
	} {
		_, err := pgdedupe.NewStore(f.pool, nil).Once(t.Context(), claim(name), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			swallow(ctx, tx)
			return nil, nil
		})
		var pg *pgconn.PgError
		if !errors.Is(err, dedupe.ErrScope) || !errors.As(err, &pg) || pg.Code != "22012" {
			t.Errorf("%s: %v, want ErrScope that names the division by zero", name, err)
		}
	}
	f.wantInt(0, "select count(*) from unecho_key")
	f.wantIdle()
}

func TestRowsLeftOpen(t *testing.T) {
	f := newFixture(t, 2)
	store := pgdedupe.NewStore(f.pool, nil)
	failed := errors.New("failed")
	for _, own := range []error{nil, failed} {
		_, err := store.Once(t.Context(), claim("1"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			rows, err := tx.Query(ctx, "select n from generate_series(1, 1000000) n")
			if err != nil || !rows.Next() {
				t.Error("no rows", err)
			}
			return nil, own
		})
		want := own
		if own == nil {
			want = dedupe.ErrScope
		}
		if !errors.Is(err, want) || errors.Is(err, dedupe.ErrUnavailable) {
			t.Errorf("Once: %v, want %v", err, want)
		}
	}
	f.wantInt(0, "select count(*) from unecho_key")
	f.wantIdle()
}

// TestB34Leaked: the handler returns while a goroutine of it is in the middle of
// a statement, or of its rows. Run it with the race detector.
func TestB34Leaked(t *testing.T) {
	f := newFixture(t, 2)
	store := pgdedupe.NewStore(f.pool, nil)
	for name, use := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"statement": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "select pg_sleep(60)")
			return err
		},
		"rows": func(ctx context.Context, tx pgx.Tx) error {
			rows, err := tx.Query(ctx, "select n, pg_sleep(0.001) from generate_series(1, 60000) n")
			if err != nil {
				return err
			}
			defer rows.Close()
			for rows.Next() {
				if err := rows.Scan(new(int), nil); err != nil {
					return err
				}
			}
			return rows.Err()
		},
	} {
		for _, own := range []error{nil, errors.New("failed")} {
			ended := make(chan error, 1)
			_, err := store.Once(t.Context(), claim(name), func(_ context.Context, tx pgx.Tx) ([]byte, error) {
				pid := tx.Conn().PgConn().PID()
				go func() { ended <- use(t.Context(), tx) }()
				testenv.Within(t, 10*time.Second, "the goroutine's statement runs", func() bool {
					var running bool
					err := f.pool.QueryRow(t.Context(),
						"select query like '%pg_sleep%' and state = 'active' from pg_stat_activity where pid = $1", pid).Scan(&running)
					return err == nil && running
				})
				return nil, own
			})
			if own == nil && !errors.Is(err, dedupe.ErrScope) || own != nil && !errors.Is(err, own) {
				t.Errorf("%s: %v, want ErrScope, or %v", name, err, own)
			}
			select {
			case err := <-ended:
				if err == nil {
					t.Errorf("%s: the goroutine's use of the transaction succeeded", name)
				}
			case <-time.After(20 * time.Second):
				t.Fatalf("%s: the goroutine hangs", name)
			}
			f.wantInt(0, "select count(*) from unecho_key")
			f.wantIdle()
		}
	}
}

// TestLeakedCallThatHangs: a copy whose source never yields cannot be ended by
// anybody. The store does not wait for it for ever.
func TestLeakedCallThatHangs(t *testing.T) {
	f := newFixture(t, 1, "create table e (n int)")
	store := pgdedupe.NewStore(f.pool, &pgdedupe.Options{Tx: dedupe.TxOptions{CommitTimeout: 100 * time.Millisecond}})
	blocked, unblock, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	_, err := store.Once(t.Context(), claim("1"), func(_ context.Context, tx pgx.Tx) ([]byte, error) {
		go func() {
			defer close(ended)
			_, err := tx.CopyFrom(t.Context(), pgx.Identifier{"e"}, []string{"n"}, pgx.CopyFromFunc(func() ([]any, error) {
				close(blocked)
				<-unblock
				return nil, nil
			}))
			if err == nil {
				t.Error("a copy on a connection that was cut succeeded")
			}
		}()
		<-blocked
		return nil, nil
	})
	if !errors.Is(err, dedupe.ErrScope) {
		t.Errorf("Once: %v, want ErrScope", err)
	}
	if res, err := store.Once(t.Context(), claim("1"), exec("insert into e values (1)")); err != nil || res.Outcome != dedupe.Processed {
		t.Errorf("the pool has no place for the next one: %v, %v", res.Outcome, err)
	}
	close(unblock)
	<-ended
	f.wantIdle()
}

// TestBusy: one call at a time, and no deadlock when a copy's source uses the
// transaction that it is copied in.
func TestBusy(t *testing.T) {
	f := newFixture(t, 1, "create table e (n int)")
	_, err := pgdedupe.NewStore(f.pool, nil).Once(t.Context(), claim("1"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
		asked := false
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"e"}, []string{"n"}, pgx.CopyFromFunc(func() ([]any, error) {
			if asked {
				return nil, nil
			}
			asked = true
			if _, err := tx.Exec(ctx, "select 1"); err == nil || !strings.Contains(err.Error(), "in use") {
				t.Errorf("Exec during a copy: %v, want that it is in use", err)
			}
			return []any{1}, nil
		}))
		return nil, err
	})
	if err != nil {
		t.Error(err)
	}
	f.wantInt(1, "select count(*) from e")
}

// TestRefusalIsSaidAtOnce: what would end the transaction gets an error, is
// named in the verdict, and has no effect: the handler may go on, but in vain.
func TestRefusalIsSaidAtOnce(t *testing.T) {
	f := newFixture(t, 1, "create table e (n int)")
	for name, end := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"Commit":   func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) },
		"Rollback": func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) },
		"commit":   func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Exec(ctx, "COMMIT"); return err },
		"abort": func(ctx context.Context, tx pgx.Tx) error {
			b := &pgx.Batch{}
			b.Queue("abort")
			return tx.SendBatch(ctx, b).Close()
		},
	} {
		_, err := pgdedupe.NewStore(f.pool, nil).Once(t.Context(), claim("1"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			_, _ = exec("insert into e values (1)")(ctx, tx)
			if err := end(ctx, tx); err == nil || !strings.Contains(err.Error(), name+" is refused") {
				t.Errorf("%s: %v, want a refusal", name, err)
			}
			return nil, tx.QueryRow(ctx, "select n from e").Scan(new(int)) // it is all still there
		})
		if !errors.Is(err, dedupe.ErrScope) || !strings.Contains(err.Error(), name) {
			t.Errorf("Once: %v, want ErrScope that names %s", err, name)
		}
		testenv.Within(t, 5*time.Second, "the connection is back", func() bool { return f.pool.Stat().AcquiredConns() == 0 })
		f.wantInt(0, "select count(*) from unecho_key")
		f.wantInt(0, "select count(*) from e")
	}
}

// TestSwallowedOutage: a full disk is no message's fault, even where the
// handler ignores it.
func TestSwallowedOutage(t *testing.T) {
	f := newFixture(t, 1)
	_, err := pgdedupe.NewStore(f.pool, nil).Once(t.Context(), claim("1"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
		_, _ = tx.Exec(ctx, "do $$ begin raise exception using errcode = '53100'; end $$")
		return nil, nil
	})
	if !errors.Is(err, dedupe.ErrUnavailable) {
		t.Errorf("Once: %v, want ErrUnavailable", err)
	}
	f.wantIdle()
}
