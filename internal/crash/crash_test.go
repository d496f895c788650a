// Package crash ends a process at every boundary between a delivery and its
// acknowledgement, and looks at what the redelivery finds.
package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/dedupe/redisdedupe"
	"github.com/unecho/unecho/internal/testenv"
)

// lease is how long the key of a process that has died stays claimed.
const lease = 500 * time.Millisecond

// exitCode of a process that ended where it was told to.
const exitCode = 42

func TestMain(m *testing.M) {
	if kind := os.Getenv("CRASH_KIND"); kind != "" {
		os.Exit(deliver(kind, os.Getenv("CRASH_AT"), os.Getenv("CRASH_ADDR"), os.Getenv("CRASH_FILE"), os.Getenv("CRASH_ID")))
	}
	os.Exit(m.Run())
}

// deliver is one delivery in a process of its own. It returns the exit code: 0
// if it may be acknowledged, 1 if not; at the boundary it ends with exitCode.
func deliver(kind, at, addr, file, id string) int {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	here := func(boundary string) {
		if boundary == at {
			os.Exit(exitCode)
		}
	}
	k := dedupe.Key{Consumer: "crash", ID: id}
	c := dedupe.Claim{Key: k, Fingerprint: dedupe.Fingerprint(k), Retain: time.Hour}
	here("delivered")
	res, err := stores[kind](ctx, addr, file, c, here)
	fmt.Println(res.Outcome, string(res.Reply), err)
	if err != nil {
		return 1
	}
	here("decided")
	return 0
}

type once = func(ctx context.Context, addr, file string, c dedupe.Claim, here func(string)) (dedupe.Result, error)

var stores = map[string]once{"pgx": oncePgx, "pipelined": oncePipelined, "redis": onceRedis, "pglease": oncePgLease}

func mustPool(ctx context.Context, url string) *pgxpool.Pool {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		panic(err)
	}
	return pool
}

const insert = "insert into effect (id) values ($1)"

func oncePgx(ctx context.Context, url, _ string, c dedupe.Claim, here func(string)) (dedupe.Result, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		panic(err)
	}
	cfg.ConnConfig.Tracer = tracer{here}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		panic(err)
	}
	return pgdedupe.NewStore(pool, nil).Once(ctx, c, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
		here("handler begun")
		_, err := tx.Exec(ctx, insert, c.Key.ID)
		here("effect written")
		return []byte("reply"), err
	})
}

// tracer ends the process around the batches of claim and commit.
type tracer struct{ here func(string) }

type batchKey struct{}

func (t tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (t tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData)     {}
func (t tracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (t tracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	last := data.Batch.QueuedQueries[len(data.Batch.QueuedQueries)-1].SQL
	name := "claim"
	if last == "commit" {
		name = "commit"
	}
	t.here("before the " + name)
	return context.WithValue(ctx, batchKey{}, name)
}

func (t tracer) TraceBatchEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchEndData) {
	if name, ok := ctx.Value(batchKey{}).(string); ok {
		t.here("after the " + name)
	}
}

func oncePipelined(ctx context.Context, url, _ string, c dedupe.Claim, here func(string)) (dedupe.Result, error) {
	return pgdedupe.NewPipelinedStore(mustPool(ctx, url), nil).Once(ctx, c, func(_ context.Context, b *pgx.Batch) ([]byte, error) {
		here("handler begun")
		b.Queue(insert, c.Key.ID)
		here("effect written")
		return []byte("reply"), nil
	})
}

func onceRedis(ctx context.Context, addr, file string, c dedupe.Claim, here func(string)) (dedupe.Result, error) {
	d, err := redisdedupe.NewDriver(redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true}), nil)
	if err != nil {
		return dedupe.Result{}, err
	}
	return onceLease(ctx, d, file, c, here)
}

func oncePgLease(ctx context.Context, url, file string, c dedupe.Claim, here func(string)) (dedupe.Result, error) {
	return onceLease(ctx, pgdedupe.NewLeaseDriver(mustPool(ctx, url), nil), file, c, here)
}

func onceLease(ctx context.Context, d dedupe.LeaseDriver, file string, c dedupe.Claim, here func(string)) (dedupe.Result, error) {
	st := dedupe.NewLeaseStore(traced{d, here}, &dedupe.LeaseOptions{Lease: lease})
	return st.Once(ctx, c, func(_ context.Context, l *dedupe.Lease) ([]byte, error) {
		here("handler begun")
		f, err := os.OpenFile(file, os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o600)
		if err != nil {
			return nil, err
		}
		_, err = fmt.Fprintln(f, l.Derive("effect", 0), l.Unknown)
		here("effect written")
		return []byte("reply"), errors.Join(err, f.Close())
	})
}

type traced struct {
	dedupe.LeaseDriver
	here func(string)
}

func (t traced) Acquire(ctx context.Context, c dedupe.Claim, owner string, d time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	t.here("before the claim")
	defer t.here("after the claim")
	return t.LeaseDriver.Acquire(ctx, c, owner, d)
}

func (t traced) Complete(ctx context.Context, c dedupe.Claim, owner string, token int64, reply []byte) error {
	t.here("before the completion")
	defer t.here("after the completion")
	return t.LeaseDriver.Complete(ctx, c, owner, token, reply)
}

// run is a delivery in a process of its own, that ends at a boundary, or not.
func run(t *testing.T, kind, at, addr, file, id string) (code int, said string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), "CRASH_KIND="+kind, "CRASH_AT="+at, "CRASH_ADDR="+addr, "CRASH_FILE="+file, "CRASH_ID="+id)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

// redeliver delivers until the delivery may be acknowledged.
func redeliver(t *testing.T, kind, addr, file, id string) string {
	t.Helper()
	var said string
	testenv.Within(t, 20*time.Second, "the redelivery is acknowledged", func() bool {
		code, out := run(t, kind, "", addr, file, id)
		said = out
		if code != 0 && !strings.Contains(out, dedupe.ErrInProgress.Error()) {
			t.Errorf("a redelivery: %s", out)
		}
		return code == 0
	})
	return said
}

// B26: wherever the process dies, a transactional store has one effect in the
// end, and the reply of the attempt that was committed.
func TestB26TransactionalAtEveryBoundary(t *testing.T) {
	url := testenv.SchemaURL(t)
	pool := testenv.PoolOf(t, url, 2)
	if err := pgdedupe.Migrate(t.Context(), pool, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), "create table effect (id text not null)"); err != nil {
		t.Fatal(err)
	}
	boundaries := map[string][]string{
		"pgx":       {"delivered", "before the claim", "after the claim", "handler begun", "effect written", "before the commit", "after the commit", "decided"},
		"pipelined": {"delivered", "handler begun", "effect written", "decided"},
	}
	for kind, all := range boundaries {
		for i, at := range all {
			id := kind + " " + at
			if code, out := run(t, kind, at, url, "", id); code != exitCode {
				t.Fatalf("%s: the process did not end there: %d\n%s", id, code, out)
			}
			said := redeliver(t, kind, url, "", id)
			committed := strings.HasPrefix(at, "after the commit") || at == "decided"
			if want := map[bool]string{false: "processed reply", true: "duplicate reply"}[committed]; !strings.HasPrefix(said, want) {
				t.Errorf("%s (%d): the redelivery is %q, want %q", id, i, said, want)
			}
			var n int
			if err := pool.QueryRow(t.Context(), "select count(*) from effect where id = $1", id).Scan(&n); err != nil || n != 1 {
				t.Errorf("%s: %d effects, %v; want 1", id, n, err)
			}
		}
	}
}

// B26: under a lease an event is never lost, and repeated only if the process
// dies between effect and completion; the handler is told then, and derives the
// same key.
func TestB26LeaseAtEveryBoundary(t *testing.T) {
	url := testenv.SchemaURL(t)
	if err := pgdedupe.Migrate(t.Context(), testenv.PoolOf(t, url, 1), nil); err != nil {
		t.Fatal(err)
	}
	for kind, addr := range map[string]string{"redis": testenv.Redis(t), "pglease": url} {
		for at, want := range map[string]struct {
			effects int
			unknown bool // in the last run
			said    string
		}{
			"delivered":             {1, false, "processed reply"},
			"before the claim":      {1, false, "processed reply"},
			"after the claim":       {1, true, "processed reply"},
			"handler begun":         {1, true, "processed reply"},
			"effect written":        {2, true, "processed reply"}, // the window
			"before the completion": {2, true, "processed reply"}, // the window
			"after the completion":  {1, false, "duplicate reply"},
			"decided":               {1, false, "duplicate reply"},
		} {
			t.Run(kind+" "+at, func(t *testing.T) {
				file, id := filepath.Join(t.TempDir(), "effects"), testenv.Name("crash")
				if code, out := run(t, kind, at, addr, file, id); code != exitCode {
					t.Fatalf("the process did not end there: %d\n%s", code, out)
				}
				if said := redeliver(t, kind, addr, file, id); !strings.HasPrefix(said, want.said) {
					t.Errorf("the redelivery is %q, want %q", said, want.said)
				}
				b, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				lines := strings.Split(strings.TrimSpace(string(b)), "\n")
				first, _, _ := strings.Cut(lines[0], " ")
				last, unknown, _ := strings.Cut(lines[len(lines)-1], " ")
				if len(lines) != want.effects || first != last || unknown != fmt.Sprint(want.unknown) {
					t.Errorf("the effects are\n%swant %d, with one derived key, the last of them unknown: %v", b, want.effects, want.unknown)
				}
			})
		}
	}
}

// B27: while the lease of a process that has died has not run out, a redelivery
// is not handled, and is told to come back; afterwards it is handled once.
func TestB27BeforeAndAfterTheLease(t *testing.T) {
	file, id, addr := filepath.Join(t.TempDir(), "effects"), testenv.Name("crash"), testenv.Redis(t)
	start := time.Now()
	if code, out := run(t, "redis", "handler begun", addr, file, id); code != exitCode {
		t.Fatalf("%d\n%s", code, out)
	}
	code, out := run(t, "redis", "", addr, file, id)
	if took := time.Since(start); took < lease && (code == 0 || !strings.Contains(out, dedupe.ErrInProgress.Error())) {
		t.Errorf("after %v, in a lease of %v: %d, %s; want that it is in progress", took, lease, code, out)
	}
	redeliver(t, "redis", addr, file, id)
	if b, err := os.ReadFile(file); err != nil || strings.Count(string(b), "\n") != 1 {
		t.Errorf("the effects are %q, %v; want one", b, err)
	}
}
