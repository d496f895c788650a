package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/segmentio/kafka-go"
	"go.uber.org/goleak"

	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/outboxtest"
	"github.com/unecho/unecho/outbox/pgoutbox"
)

// asMain is the variable that makes the test program be the relay.
const asMain = "TEST_BE_THE_RELAY"

func TestMain(m *testing.M) {
	if os.Getenv(asMain) != "" {
		main()
	}
	goleak.VerifyTestMain(m)
}

// start runs the relay as a process of its own. The race detector would have
// it sleep for a second at its end.
func start(t *testing.T, env []string, args ...string) *proc.Process {
	t.Helper()
	return proc.Start(t, append(env, asMain+"=1", "GORACE=atexit_sleep_ms=0"), os.Args[0], args...)
}

// db is an outbox in a schema of the test's own.
type db struct {
	t    *testing.T
	url  string
	pool *pgxpool.Pool
}

func openDB(t *testing.T) *db {
	t.Helper()
	url := testenv.SchemaURL(t)
	return &db{t, url, testenv.PoolOf(t, url, 4)}
}

func (d *db) env(more ...string) []string {
	return append([]string{"UNECHO_RELAY_DATABASE_URL=" + d.url}, more...)
}

// cli runs a command line in this process.
func (d *db) cli(wantCode int, args ...string) (stdout, stderr string) {
	d.t.Helper()
	code, stdout, stderr := runCommand(d.t.Context(), d.env(), args...)
	if code != wantCode {
		d.t.Fatalf("relay %q: exit code %d, want %d: %s", args, code, wantCode, stderr)
	}
	return stdout, stderr
}

func (d *db) write(msgs ...*envelope.Message) {
	d.t.Helper()
	w := pgoutbox.NewWriter(nil, &outbox.WriterOptions{Source: "/test"})
	err := pgx.BeginFunc(d.t.Context(), d.pool, func(tx pgx.Tx) error { return w.Write(d.t.Context(), tx, msgs...) })
	if err != nil {
		d.t.Fatal(err)
	}
}

func (d *db) count(sql string) (n int) {
	d.t.Helper()
	if err := d.pool.QueryRow(context.Background(), sql).Scan(&n); err != nil {
		d.t.Fatal(err)
	}
	return n
}

func (d *db) leaseIsFree() bool {
	return d.count("select count(*) from unecho_outbox_shard where lease_until < clock_timestamp()") == 1
}

func events(topic string, n int) []*envelope.Message {
	ms := make([]*envelope.Message, n)
	for i := range ms {
		ms[i] = &envelope.Message{ID: fmt.Sprint(i), Type: "t", Topic: topic, Key: fmt.Append(nil, i%7), Body: fmt.Append(nil, i)}
	}
	return ms
}

func TestMigrate(t *testing.T) {
	d := openDB(t)
	if _, stderr := d.cli(1, "parked", "list"); !strings.Contains(stderr, "relay migrate") {
		t.Errorf("without tables: %q", stderr)
	}
	sql, _ := d.cli(0, "migrate", "--sql")
	if n := d.count("select count(*) from pg_tables where schemaname = current_schema()"); n != 0 {
		t.Errorf("migrate --sql made %d tables", n)
	}
	d.cli(0, "migrate")
	d.cli(0, "migrate") // again changes nothing
	d.cli(0, "parked", "list")

	other := openDB(t)
	if _, err := other.pool.Exec(t.Context(), sql); err != nil {
		t.Fatalf("the statements of --sql: %v", err)
	}
	other.cli(0, "migrate")
	other.cli(0, "parked", "list")

	// Without a database, and in a schema with a name of its own.
	code, stdout, stderr := runCommand(t.Context(), nil, "migrate", "--sql", "--database-schema", "Odd Näme")
	if code != 0 || !strings.Contains(stdout, `"Odd Näme"."unecho_outbox"`) {
		t.Errorf("exit code %d, %s%s", code, stdout, stderr)
	}
}

func TestParked(t *testing.T) {
	d := openDB(t)
	d.cli(0, "migrate")
	d.write(events("t", 5)...)
	if _, err := d.pool.Exec(t.Context(), "update unecho_outbox set meta = '\\x' where event_id <> '2'"); err != nil {
		t.Fatal(err)
	}
	if _, err := d.pool.Exec(t.Context(), "update unecho_outbox set type = E'\\x1b[31mred' where event_id = '0'"); err != nil {
		t.Fatal(err)
	}
	r := outbox.NewRelay(pgoutbox.NewStore(d.pool, nil), &outboxtest.Broker{}, nil)
	if n, err := r.Step(t.Context()); n != 5 || err != nil {
		t.Fatal(n, err)
	}
	list, _ := d.cli(0, "parked", "list")
	if lines := strings.Split(strings.TrimSpace(list), "\n"); len(lines) != 5 || !strings.HasPrefix(lines[0], "ID") || !strings.Contains(lines[1], "?[31mred") || strings.Contains(list, "\x1b") {
		t.Errorf("list:\n%s", list)
	}
	lines, _ := d.cli(0, "parked", "list", "--json", "--limit=3", "--after=1")
	var ids []string
	for line := range strings.SplitSeq(strings.TrimSpace(lines), "\n") {
		var row struct {
			ID              int64
			Topic, Type     string
			Attempts, Bytes *int
			Reason          string
		}
		dec := json.NewDecoder(strings.NewReader(line))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&row); err != nil || row.Topic != "t" || row.Type != "t" || row.Attempts == nil || *row.Bytes != 1 || row.Reason == "" {
			t.Errorf("%s: %v", line, err)
		}
		ids = append(ids, fmt.Sprint(row.ID))
	}
	if strings.Join(ids, " ") != "2 4 5" {
		t.Fatalf("ids %q", ids)
	}
	if out, _ := d.cli(0, "parked", "drop", ids[0], ids[1]); out != "dropped 2\ndropped 4\n" {
		t.Errorf("drop: %q", out)
	}
	if out, _ := d.cli(0, "parked", "requeue", ids[2]); out != "requeued 5\n" {
		t.Errorf("requeue: %q", out)
	}
	if n := d.count("select count(*) from unecho_outbox_held"); n != 2 {
		t.Errorf("%d rows are held, want the one requeued and the one not touched", n)
	}
	// One that is not parked fails, and the others are done all the same.
	out, stderr := d.cli(1, "parked", "drop", "999", "1", "3")
	if out != "dropped 1\n" || !strings.Contains(stderr, "999 is not parked") || !strings.Contains(stderr, "3 is not parked") {
		t.Errorf("drop: %q, %q", out, stderr)
	}
	if list, _ := d.cli(0, "parked", "list", "--json"); list != "" {
		t.Errorf("left: %q", list)
	}
}

// A password stays where it was put, at whatever goes wrong and however much
// is logged.
func TestSecretsStaySecret(t *testing.T) {
	const canary = "c4n4ry"
	for name, env := range map[string][]string{
		"unreachable":      {"UNECHO_RELAY_DATABASE_URL=postgres://u:" + canary + "@127.0.0.1:1/x"},
		"wrong password":   {"UNECHO_RELAY_DATABASE_URL=" + withPassword(t, canary)},
		"key and value":    {"UNECHO_RELAY_DATABASE_URL=host=127.0.0.1 port=1 user=u password='" + canary + "' dbname=x"},
		"malformed":        {"UNECHO_RELAY_DATABASE_URL=postgres://u:" + canary + "@[h:1/x"},
		"malformed DSN":    {"UNECHO_RELAY_DATABASE_URL=" + canary},
		"in a file":        {"UNECHO_RELAY_DATABASE_URL_FILE=" + write(t, "url", "postgres://u:"+canary+"@127.0.0.1:1/x")},
		"no map":           {"UNECHO_RELAY_CONFIG=" + write(t, "relay.yaml", canary+"@127.0.0.1:1/x")},
		"no map, long":     {"UNECHO_RELAY_CONFIG=" + write(t, "relay.yaml", "[{"+canary+": 1}]")},
		"unfinished":       {"UNECHO_RELAY_CONFIG=" + write(t, "relay.yaml", "database: {url: 'postgres://u:"+canary+"@h")},
		"a list":           {"UNECHO_RELAY_CONFIG=" + write(t, "relay.yaml", "database: {url: [x, postgres://u:"+canary+"@h]}")},
		"NATS, malformed":  {"UNECHO_RELAY_DATABASE_URL=postgres://x", "UNECHO_RELAY_NATS_URL=nats://u:" + canary + "@h:port"},
		"NATS unreachable": {"UNECHO_RELAY_DATABASE_URL=" + migrated(t), "UNECHO_RELAY_NATS_URL=nats://u:" + canary + "@127.0.0.1:1"},
	} {
		t.Run(name, func(t *testing.T) {
			env := append([]string{"UNECHO_RELAY_LOG_LEVEL=debug", "UNECHO_RELAY_BROKER=nats", "UNECHO_RELAY_NATS_URL=nats://127.0.0.1:1"}, env...)
			for _, args := range [][]string{{"run"}, {"parked", "list"}, {"migrate"}} {
				ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
				_, stdout, stderr := runCommand(ctx, env, args...)
				cancel()
				if strings.Contains(stdout+stderr, canary) {
					t.Errorf("relay %s: %s%s", args[0], stdout, stderr)
				}
				if args[0] == "run" && stderr == "" {
					t.Error("it said nothing at all")
				}
			}
		})
	}
}

// withPassword is the URL of the server under a user that is not there.
func withPassword(t *testing.T, password string) string {
	t.Helper()
	u, err := url.Parse(testenv.Postgres(t))
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword("nobody-such", password)
	return u.String()
}

func migrated(t *testing.T) string {
	t.Helper()
	d := openDB(t)
	d.cli(0, "migrate")
	d.write(events("nowhere", 3)...)
	return d.url
}

// target is a broker with a topic of the test's own.
type target struct {
	env   []string
	topic string
	// stored returns the ids of what is stored, with repetitions.
	stored func() []string
}

func kafkaTarget(t *testing.T) target {
	t.Helper()
	addrs := testenv.Kafka(t)
	topic := testenv.Topic(t, 1)
	return target{[]string{"UNECHO_RELAY_BROKER=kafka", "UNECHO_RELAY_KAFKA_BROKERS=" + strings.Join(addrs, ",")}, topic, func() []string {
		conn, err := kafka.DialLeader(t.Context(), "tcp", addrs[0], topic, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		last, err := conn.ReadLastOffset()
		if err != nil {
			t.Fatal(err)
		}
		var ids []string
		batch := conn.ReadBatch(1, 10<<20)
		for int64(len(ids)) < last {
			m, err := batch.ReadMessage()
			if err != nil {
				t.Fatal(err)
			}
			for _, h := range m.Headers {
				if h.Key == "ce_id" {
					ids = append(ids, string(h.Value))
				}
			}
		}
		_ = batch.Close()
		return ids
	}}
}

func natsTarget(t *testing.T) target {
	t.Helper()
	server := testenv.NATS(t)
	nc, err := nats.Connect(server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	name := testenv.Name("R")
	stream, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}, Duplicates: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = js.DeleteStream(context.Background(), name) })
	return target{[]string{"UNECHO_RELAY_BROKER=nats", "UNECHO_RELAY_NATS_URL=" + server}, name + ".t", func() []string {
		info, err := stream.Info(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var ids []string
		for seq := range info.State.LastSeq {
			m, err := stream.GetMsg(t.Context(), seq+1)
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, m.Header.Get("ce-id"))
		}
		return ids
	}}
}

// R13: SIGTERM under load, a new relay, and so on: exit code 0 each time, the
// lease is free, and every row is stored once.
func TestR13TermUnderLoad(t *testing.T) {
	for name, open := range map[string]func(*testing.T) target{"kafka": kafkaTarget, "nats": natsTarget} {
		t.Run(name, func(t *testing.T) {
			to, d := open(t), openDB(t)
			d.cli(0, "migrate")
			const n = 3000
			d.write(events(to.topic, n)...)
			env := d.env(append(to.env, "UNECHO_RELAY_RELAY_BATCH=100", "UNECHO_RELAY_LOG_LEVEL=debug")...)
			stops := 0
			for done := false; !done; stops++ {
				relay := start(t, env, "run")
				relay.WaitFor(t, `"msg":"publish"`, 20*time.Second)
				if err := relay.Term(15 * time.Second); err != nil {
					t.Fatalf("SIGTERM: %v\n%s", err, relay.Output())
				}
				if !d.leaseIsFree() {
					t.Error("the lease was not released")
				}
				done = d.count("select count(*) from unecho_outbox_shard where cur is null") == 1 // the window is through
			}
			if stops < 5 {
				t.Errorf("only %d stops", stops)
			}
			seen := map[string]int{}
			for _, id := range to.stored() {
				seen[id]++
			}
			twice := 0
			for _, times := range seen {
				twice += times - 1
			}
			if len(seen) != n || twice != 0 {
				t.Errorf("%d of %d rows are stored, %d more than once, over %d stops", len(seen), n, twice, stops)
			}
			t.Logf("%d stops", stops)
		})
	}
}

// The first SIGTERM waits for the batch in hand; a second one does not.
func TestSecondTermEndsAtOnce(t *testing.T) {
	d := openDB(t)
	d.cli(0, "migrate")
	// A lock on the position lets the settlement wait, and so the relay.
	to := kafkaTarget(t)
	relay := start(t, d.env(append(to.env, "UNECHO_RELAY_LOG_LEVEL=debug", "UNECHO_RELAY_RELAY_GRACE=1m")...), "run")
	relay.WaitFor(t, `lease taken`, 20*time.Second)
	tx, err := d.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), "select 1 from unecho_outbox_shard for update"); err != nil {
		t.Fatal(err)
	}
	d.write(events(to.topic, 1)...)
	relay.WaitFor(t, `"msg":"publish"`, 20*time.Second)
	relay.Signal(syscall.SIGTERM)
	if err := relay.Wait(time.Second); err == nil || !strings.Contains(err.Error(), "did not end") {
		t.Fatalf("the first SIGTERM did not wait for the batch: %v", err)
	}
	relay.Signal(syscall.SIGTERM)
	err = relay.Wait(5 * time.Second)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
		t.Errorf("the second SIGTERM: %v", err)
	}
}

// The database comes up later than the relay.
func TestWaitsForTheDatabase(t *testing.T) {
	to := kafkaTarget(t)
	pg := proc.StartPostgres(t)
	pool := testenv.PoolOf(t, pg.URL, 2)
	if err := pgoutbox.Migrate(t.Context(), pool, nil); err != nil {
		t.Fatal(err)
	}
	pool.Reset()
	pg.Kill()
	relay := start(t, append(to.env, "UNECHO_RELAY_DATABASE_URL="+pg.URL), "run")
	relay.WaitFor(t, "the database is not ready", 10*time.Second)
	stopped := start(t, append(to.env, "UNECHO_RELAY_DATABASE_URL="+pg.URL), "run")
	stopped.WaitFor(t, "the database is not ready", 10*time.Second)
	if err := stopped.Term(5 * time.Second); err != nil {
		t.Errorf("SIGTERM while it waits: %v", err)
	}
	pg.Restart()
	d := &db{t, pg.URL, pool}
	d.write(events(to.topic, 3)...)
	testenv.Within(t, 30*time.Second, "the rows are stored", func() bool { return len(to.stored()) == 3 })
	if err := relay.Term(15 * time.Second); err != nil {
		t.Error(err)
	}
}

func TestRunWithoutTables(t *testing.T) {
	d := openDB(t)
	relay := start(t, d.env("UNECHO_RELAY_BROKER=nats", "UNECHO_RELAY_NATS_URL=nats://127.0.0.1:1"), "run")
	err := relay.Wait(10 * time.Second)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(relay.Output(), "relay migrate") {
		t.Errorf("%v\n%s", err, relay.Output())
	}
}
