package e2e

import (
	"context"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

// What the README tells a newcomer to run, run.
func TestQuickstart(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, proc.Build(t, "./examples/quickstart")).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "duplicates suppressed") {
		t.Errorf("%v\n%s", err, out)
	}
}

// The example for production: producer, relay and consumer as processes, and
// a clean end of each by SIGTERM.
func TestOrdersExample(t *testing.T) {
	kafka, url, topic := testenv.Kafka(t), testenv.SchemaURL(t), testenv.Topic(t, 3)
	env := []string{"DATABASE_URL=" + url, "KAFKA_BROKERS=" + strings.Join(kafka, ","), "ORDERS_TOPIC=" + topic,
		"UNECHO_RELAY_DATABASE_URL=" + url, "UNECHO_RELAY_BROKER=kafka", "UNECHO_RELAY_KAFKA_BROKERS=" + strings.Join(kafka, ",")}
	producer := proc.Build(t, "./examples/orders/producer")
	place := func(n string) {
		t.Helper()
		if err := proc.Start(t, env, producer, n).Wait(60 * time.Second); err != nil {
			t.Fatalf("producer: %v", err)
		}
	}
	place("50")
	relay := proc.Start(t, env, proc.Build(t, "./cmd/relay"), "run")
	consumer := proc.Start(t, env, proc.Build(t, "./examples/orders/consumer"))
	place("50")
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.Background()) }()
	testenv.Within(t, 60*time.Second, "the balances are those of the orders", func() bool {
		var n int
		var equal bool
		err := conn.QueryRow(t.Context(), `select (select count(*) from orders),
			coalesce((select sum(cents) from orders) = (select sum(cents) from balances), false)`).Scan(&n, &equal)
		if err != nil {
			t.Fatal(err)
		}
		return n == 100 && equal
	})
	for name, p := range map[string]*proc.Process{"relay": relay, "consumer": consumer} {
		if err := p.Term(30 * time.Second); err != nil {
			t.Errorf("%s after SIGTERM: %v", name, err)
		}
	}
}
