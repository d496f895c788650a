// Command probe tells whether the services of the tests are ready, and finds
// free ports for them. It prints one line a service, with its version.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	_ "github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/redis/go-redis/v9"
	"github.com/segmentio/kafka-go"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 2 && args[0] == "ports":
		n, err := strconv.Atoi(args[1])
		if err != nil {
			return err
		}
		return ports(n)
	case len(args) == 1 && args[0] == "ready":
		return probeAll(60 * time.Second)
	case len(args) == 1 && args[0] == "status":
		return probeAll(3 * time.Second)
	}
	return errors.New("usage: probe ports N | ready | status")
}

// ports prints n free ports. All are held until the last is found, or two
// could be the same.
func ports(n int) error {
	var found []string
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer func() { _ = l.Close() }()
		found = append(found, strconv.Itoa(l.Addr().(*net.TCPAddr).Port))
	}
	fmt.Println(strings.Join(found, " "))
	return nil
}

func probeAll(within time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	var failed []error
	for _, s := range []struct {
		name, env string
		probe     func(context.Context, string) (string, error)
	}{
		{"PostgreSQL", "UNECHO_POSTGRES_URL", postgres},
		{"Redis", "UNECHO_REDIS_ADDR", redisServer},
		{"NATS", "UNECHO_NATS_URL", natsServer},
		{"Apache Kafka", "UNECHO_KAFKA_BROKERS", kafkaBroker},
		{"MariaDB", "UNECHO_MARIADB_DSN", mariaDB},
	} {
		addr := os.Getenv(s.env)
		version, err := until(ctx, addr, s.probe)
		if err != nil {
			failed = append(failed, fmt.Errorf("%s at %s: %w", s.name, addr, err))
			continue
		}
		fmt.Printf("%-12s %-28s %s\n", s.name, version, addr)
	}
	return errors.Join(failed...)
}

// until asks again and again until the service is ready or ctx is done.
func until(ctx context.Context, addr string, probe func(context.Context, string) (string, error)) (string, error) {
	for {
		one, cancel := context.WithTimeout(ctx, 10*time.Second)
		version, err := probe(one, addr)
		cancel()
		if err == nil {
			return version, nil
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return "", err
		}
	}
}

func postgres(ctx context.Context, url string) (version string, err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close(ctx) }()
	err = conn.QueryRow(ctx, "show server_version").Scan(&version)
	return version, err
}

func mariaDB(ctx context.Context, dsn string) (version string, err error) {
	db, err := sql.Open("mysql", dsn)
	if err != nil {
		return "", err
	}
	defer func() { _ = db.Close() }()
	err = db.QueryRowContext(ctx, "select version()").Scan(&version)
	return version, err
}

func redisServer(ctx context.Context, addr string) (string, error) {
	c := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1})
	defer func() { _ = c.Close() }()
	info, err := c.Info(ctx, "server").Result()
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(line, "redis_version:"); ok {
			return strings.TrimSpace(v), nil
		}
	}
	return "", errors.New("INFO names no version")
}

func natsServer(ctx context.Context, url string) (string, error) {
	nc, err := nats.Connect(url, nats.Timeout(2*time.Second))
	if err != nil {
		return "", err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return "", err
	}
	_, err = js.AccountInfo(ctx)
	return nc.ConnectedServerVersion() + " with JetStream", err
}

// kafkaBroker is content when a produce went through on a new connection:
// metadata can be answered by a broker that does not serve yet.
func kafkaBroker(ctx context.Context, brokers string) (string, error) {
	addr := strings.Split(brokers, ",")[0]
	t := &kafka.Transport{}
	defer t.CloseIdleConnections()
	client := &kafka.Client{Addr: kafka.TCP(addr), Transport: t, Timeout: 5 * time.Second}
	created, err := client.CreateTopics(ctx, &kafka.CreateTopicsRequest{
		Topics: []kafka.TopicConfig{{Topic: "unecho-probe", NumPartitions: 1, ReplicationFactor: 1}},
	})
	if err != nil {
		return "", err
	}
	if err := created.Errors["unecho-probe"]; err != nil && !errors.Is(err, kafka.TopicAlreadyExists) {
		return "", err
	}
	res, err := client.Produce(ctx, &kafka.ProduceRequest{Topic: "unecho-probe", RequiredAcks: kafka.RequireAll,
		Records: kafka.NewRecordReader(kafka.Record{Value: kafka.NewBytes([]byte("ready"))})})
	if err != nil {
		return "", err
	}
	return os.Getenv("UNECHO_KAFKA_VERSION") + kafkaVersion(), res.Error
}

// kafkaVersion reads the version from the name of the server's jar: the
// protocol does not tell it.
func kafkaVersion() string {
	files, _ := os.ReadDir(os.Getenv("UNECHO_KAFKA_LIBS"))
	for _, f := range files {
		if v, ok := strings.CutPrefix(f.Name(), "kafka_2.13-"); ok {
			return strings.TrimSuffix(v, ".jar") + " (KRaft)"
		}
	}
	return "version unknown"
}
