// Package testenv gives tests the real servers that `make services` started,
// or that the environment names.
package testenv

import (
	"bufio"
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/segmentio/kafka-go"
)

// NeedsServices is why a test is skipped where there are none.
const NeedsServices = "this test needs `make services`"

// Require is the variable that makes a missing service a failure instead of a
// skipped test.
const Require = "UNECHO_REQUIRE_SERVICES"

var file = sync.OnceValue(readFile)

// readFile reads .services/env of the checkout; an empty map if there is none.
func readFile() map[string]string {
	vars := map[string]string{}
	f, err := os.Open(filepath.Join(Root(), ".services", "env"))
	if err != nil {
		return vars
	}
	defer func() { _ = f.Close() }()
	for s := bufio.NewScanner(f); s.Scan(); {
		if name, v, ok := strings.Cut(s.Text(), "="); ok {
			vars[name] = strings.Trim(v, "'")
		}
	}
	return vars
}

// Root is the folder of go.mod.
func Root() string {
	dir, err := os.Getwd()
	for err == nil {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		if dir == filepath.Dir(dir) {
			break
		}
		dir = filepath.Dir(dir)
	}
	return "."
}

// Get returns a variable of the environment or of the env file. Without one
// the test is skipped, or fails when services are required.
func Get(t testing.TB, name string) string {
	t.Helper()
	v := os.Getenv(name)
	if v == "" {
		v = file()[name]
	}
	if v == "" && os.Getenv(Require) != "" {
		t.Fatalf("%s is not set and services are required: run `make services`", name)
	}
	if v == "" {
		t.Skipf("%s is not set: %s", name, NeedsServices)
	}
	return v
}

// Redis is the address of a Redis server.
func Redis(t testing.TB) string { t.Helper(); return Get(t, "UNECHO_REDIS_ADDR") }

// NATS is the URL of a NATS server with JetStream.
func NATS(t testing.TB) string { t.Helper(); return Get(t, "UNECHO_NATS_URL") }

// Kafka is the addresses of Kafka brokers.
func Kafka(t testing.TB) []string {
	t.Helper()
	return strings.Split(Get(t, "UNECHO_KAFKA_BROKERS"), ",")
}

// Postgres is the URL of a PostgreSQL database.
func Postgres(t testing.TB) string { t.Helper(); return Get(t, "UNECHO_POSTGRES_URL") }

// Database creates a database for this test alone and returns its URL, for
// those who cannot give a connection a search path. It goes with the test.
func Database(t testing.TB) string {
	t.Helper()
	base, name := Postgres(t), Name("t")
	exec(t, base, "create database "+name)
	t.Cleanup(func() { exec(t, base, "drop database if exists "+name+" with (force)") })
	u, err := url.Parse(base)
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/" + name
	return u.String()
}

// MariaDB returns the name of a data source for go-sql-driver/mysql, in a
// database of the test's own, which goes with it.
func MariaDB(t testing.TB) string {
	t.Helper()
	base := Get(t, "UNECHO_MARIADB_DSN")
	cfg, err := mysql.ParseDSN(base)
	if err != nil {
		t.Fatal(err)
	}
	name := Name("t")
	mariaExec(t, base, "create database "+name)
	t.Cleanup(func() { mariaExec(t, base, "drop database if exists "+name) })
	cfg.DBName = name
	return cfg.FormatDSN()
}

func mariaExec(t testing.TB, dsn, query string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	db, err := sql.Open("mysql", dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	if _, err := db.ExecContext(ctx, query); err != nil {
		t.Errorf("%s: %v", query, err)
	}
}

// Name returns a name that no other test uses, made of prefix and lower-case
// letters and digits.
func Name(prefix string) string {
	b := make([]byte, 6)
	_, _ = rand.Read(b)
	return prefix + hex.EncodeToString(b)
}

// SchemaURL creates a schema for this test alone and returns a URL whose
// connections find it first. The schema goes with the test.
func SchemaURL(t testing.TB) string {
	t.Helper()
	return SchemaURLIn(t, Postgres(t))
}

// SchemaURLIn is SchemaURL in the database that base names.
func SchemaURLIn(t testing.TB, base string) string {
	t.Helper()
	schema := Name("t")
	exec(t, base, "create schema "+schema)
	t.Cleanup(func() { exec(t, base, "drop schema if exists "+schema+" cascade") })
	u, err := url.Parse(base)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	q.Set("search_path", schema)
	u.RawQuery = q.Encode()
	return u.String()
}

func exec(t testing.TB, base, sql string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, base)
	if err != nil {
		t.Errorf("connect: %v", err)
		return
	}
	defer func() { _ = conn.Close(ctx) }()
	if _, err := conn.Exec(ctx, sql); err != nil {
		t.Errorf("%s: %v", sql, err)
	}
}

// Pool returns a pool of at most size connections in a schema of the test's own.
func Pool(t testing.TB, size int32) *pgxpool.Pool {
	t.Helper()
	return PoolOf(t, SchemaURL(t), size)
}

// PoolOf returns a pool of at most size connections to url; it goes with the test.
func PoolOf(t testing.TB, url string, size int32) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = size
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// Topic creates a topic of the test's own, waits until it is served, and
// deletes it with the test.
func Topic(t testing.TB, partitions int) string {
	t.Helper()
	return TopicAt(t, Kafka(t), partitions, 1)
}

// TopicAt is Topic on the given brokers, with so many replicas, of which all but
// one have to take what is acknowledged.
func TopicAt(t testing.TB, brokers []string, partitions, replicas int) string {
	t.Helper()
	topic := Name("t-")
	client, done := kafkaClient(brokers)
	defer done()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	res, err := client.CreateTopics(ctx, &kafka.CreateTopicsRequest{
		Topics: []kafka.TopicConfig{{Topic: topic, NumPartitions: partitions, ReplicationFactor: replicas,
			ConfigEntries: []kafka.ConfigEntry{{ConfigName: "min.insync.replicas", ConfigValue: strconv.Itoa(max(1, replicas-1))}}}}})
	if err == nil {
		err = res.Errors[topic]
	}
	if err != nil {
		t.Fatalf("create topic: %v", err)
	}
	t.Cleanup(func() { deleteTopic(brokers, topic) })
	if err := served(ctx, brokers, topic, partitions); err != nil {
		t.Fatalf("topic %s is not served: %v", topic, err)
	}
	return topic
}

func kafkaClient(brokers []string) (*kafka.Client, func()) {
	tr := &kafka.Transport{}
	return &kafka.Client{Addr: kafka.TCP(brokers...), Transport: tr, Timeout: 10 * time.Second}, tr.CloseIdleConnections
}

func deleteTopic(brokers []string, topic string) {
	client, done := kafkaClient(brokers)
	defer done()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, _ = client.DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: []string{topic}}) // gone with the data folder otherwise
}

// served waits until every partition has a leader that answers for it. Each
// question goes over a new connection: a client answers from its cache.
func served(ctx context.Context, brokers []string, topic string, partitions int) error {
	for {
		client, done := kafkaClient(brokers)
		reqs := make([]kafka.OffsetRequest, partitions)
		for i := range reqs {
			reqs[i] = kafka.LastOffsetOf(i)
		}
		res, err := client.ListOffsets(ctx, &kafka.ListOffsetsRequest{Topics: map[string][]kafka.OffsetRequest{topic: reqs}})
		done()
		if err == nil {
			ok := len(res.Topics[topic]) == partitions
			for _, p := range res.Topics[topic] {
				ok = ok && p.Error == nil
				err = errors.Join(err, p.Error)
			}
			if ok {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Within waits until ok answers true, and fails the test if it has not within d.
func Within(t testing.TB, d time.Duration, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(d)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", d, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
