package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/kafkabroker"
	"github.com/unecho/unecho/brokers/natsbroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/pgparking"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

const (
	loopOrders = 60
	loopFatal  = "order-20"
	loopStarts = 3 // CrashLoop.Max, by default
)

// One order ends the consumer's process by SIGKILL whenever it is handled, in the
// middle of its transaction and beside others. Whoever starts the process again and again
// gets all the others done once, and that one parked after three deaths.
func TestKafkaCrashLoop(t *testing.T) {
	addrs, topic := testenv.Kafka(t), testenv.Topic(t, 2)
	pub, err := kafkabroker.NewPublisher(kafkabroker.PublisherConfig{Brokers: addrs})
	if err != nil {
		t.Fatal(err)
	}
	crashLoop(t, topic, pub, "WORKER_KAFKA="+strings.Join(addrs, ","), "WORKER_TOPIC="+topic)
}

// TestNATSCrashLoop is the same without any order.
func TestNATSCrashLoop(t *testing.T) {
	pub, topic, env := crashLoopStream(t)
	crashLoop(t, topic, pub, append(env, "WORKER_ORDER=none")...)
}

// TestNATSCrashLoopGroups is the same in groups: those that share the
// transaction with the culprit die with it.
func TestNATSCrashLoopGroups(t *testing.T) {
	pub, topic, env := crashLoopStream(t)
	crashLoop(t, topic, pub, append(env, "WORKER_ORDER=none", "WORKER_BATCH=8")...)
}

func crashLoopStream(t *testing.T) (brokers.Publisher, string, []string) {
	t.Helper()
	url, stream := testenv.NATS(t), testenv.Name("L")
	nc, err := natsbroker.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: stream, Subjects: []string{stream + ".>"}, MaxAge: time.Hour, Storage: jetstream.MemoryStorage}); err != nil {
		t.Fatal(err)
	}
	pub, err := natsbroker.NewPublisher(nc, natsbroker.PublisherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return pub, stream + ".orders", []string{"WORKER_NATS=" + url, "WORKER_TOPIC=" + stream}
}

func crashLoop(t *testing.T, topic string, pub brokers.Publisher, env ...string) {
	s := openShop(t, topic)
	if err := pgparking.Migrate(t.Context(), s.pool, nil); err != nil {
		t.Fatal(err)
	}
	placeOrders(t, s, pub)
	program := proc.Build(t, "./internal/e2e/worker")
	env = append(env, "WORKER_DATABASE="+s.url, "WORKER_FATAL="+loopFatal)
	lot := pgparking.NewLot(s.pool, nil)
	parked := func() []*consumer.Parked {
		page, err := lot.List(t.Context(), consumer.ParkedFilter{})
		if err != nil {
			t.Fatal(err)
		}
		return page.Records
	}
	deaths := 0
	worker := proc.Start(t, env, program)
	testenv.Within(t, 120*time.Second, "all is done or parked", func() bool {
		select {
		case <-worker.Exited():
			if n := len(parked()); n != 0 {
				t.Fatalf("the process ended with %d messages parked", n)
			}
			deaths++
			worker = proc.Start(t, env, program)
		default:
		}
		return len(parked()) > 0 && s.effects() >= loopOrders-1
	})
	if err := worker.Term(30 * time.Second); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	if p := parked(); deaths != loopStarts || len(p) != 1 || p[0].Reason != consumer.ReasonCrashLoop {
		t.Errorf("%d deaths, want %d; parked %+v, want one, for %s", deaths, loopStarts, p, consumer.ReasonCrashLoop)
	} else if p, err := lot.Find(t.Context(), p[0].ID); err != nil || !strings.Contains(string(p.Message.Body), `"`+loopFatal+`"`) {
		t.Errorf("parked %+v, %v, want %s", p, err, loopFatal)
	}
	for what, sql := range map[string]string{
		"orders with an effect":     "select count(distinct order_id) from effects where order_id <> '" + loopFatal + "'",
		"effects":                   "select count(*) from effects",
		"balances of the customers": "select sum(balance) from customers",
	} {
		if n := s.count(sql); n != loopOrders-1 {
			t.Errorf("%s: %d, want %d", what, n, loopOrders-1)
		}
	}
	if n := s.count("select count(*) from unecho_start"); n != 0 {
		t.Errorf("%d starts have no end, though all is settled", n)
	}
	t.Logf("CRASHLOOP %s: orders=%d effects=%d deaths=%d", t.Name(), loopOrders, s.effects(), deaths)
}

// placeOrders publishes the orders.
func placeOrders(t *testing.T, s *shop, pub brokers.Publisher) {
	t.Helper()
	ms := make([]*envelope.Message, loopOrders)
	for i := range ms {
		id := fmt.Sprint("order-", i)
		body, err := json.Marshal(map[string]any{"id": id, "customer": i % customers, "seq": i})
		if err != nil {
			t.Fatal(err)
		}
		ms[i] = &envelope.Message{ID: id, Source: "/shop", Type: "order.placed", Topic: s.topic, Key: fmt.Append(nil, i%customers),
			ContentType: "application/json", Body: body}
	}
	if err := pub.Publish(t.Context(), ms).Err(); err != nil {
		t.Fatal(err)
	}
	if err := pub.Close(); err != nil {
		t.Fatal(err)
	}
}
