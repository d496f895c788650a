package e2e

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/segmentio/kafka-go"

	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

// What is asked of the end-to-end run: 5,000 orders in ten rounds, in each of
// which relay and consumer are killed once with SIGKILL while they work.
const (
	rounds = 10
	batch  = 500
)

// TestKafka and TestNATS run the whole way with real processes: business
// transactions in PostgreSQL, the shipped relay, a real broker, a consumer.
// Every fifth event is written twice, and both processes are killed at random.
func TestKafka(t *testing.T) { tormentKafka(t) }

// TestKafkaGroups is TestKafka with a consumer that commits in groups.
func TestKafkaGroups(t *testing.T) { tormentKafka(t, "WORKER_BATCH=50") }

// TestKafkaKeys is the same with the keys of a partition handled at once: the
// order of a customer's events is kept, and offsets are committed past none
// that is not done.
func TestKafkaKeys(t *testing.T) { tormentKafka(t, "WORKER_ORDER=key") }

func tormentKafka(t *testing.T, worker ...string) {
	brokers := testenv.Kafka(t)
	topic := testenv.Topic(t, 6)
	torment(t, topic,
		[]string{"UNECHO_RELAY_BROKER=kafka", "UNECHO_RELAY_KAFKA_BROKERS=" + strings.Join(brokers, ",")},
		append(worker, "WORKER_KAFKA="+strings.Join(brokers, ","), "WORKER_TOPIC="+topic),
		func() bool { return kafkaLag(t, brokers, topic, 6) == 0 })
}

func TestNATS(t *testing.T) {
	url := testenv.NATS(t)
	stream := testenv.Name("E")
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	// The server's own window is as short as it can be: the duplicates are to
	// reach the consumer.
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: stream, Subjects: []string{stream + ".>"}, Duplicates: 100 * time.Millisecond, MaxAge: time.Hour}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = js.DeleteStream(context.Background(), stream) })
	torment(t, stream+".orders",
		[]string{"UNECHO_RELAY_BROKER=nats", "UNECHO_RELAY_NATS_URL=" + url},
		[]string{"WORKER_NATS=" + url, "WORKER_TOPIC=" + stream},
		func() bool {
			c, err := js.Consumer(t.Context(), stream, "e2e")
			if err != nil {
				t.Fatal(err)
			}
			i := c.CachedInfo()
			return i.NumPending == 0 && i.NumAckPending == 0
		})
}

func torment(t *testing.T, topic string, relayEnv, workerEnv []string, settled func() bool) {
	s := openShop(t, topic)
	relayProgram, workerProgram := proc.Build(t, "./cmd/relay"), proc.Build(t, "./internal/e2e/worker")
	relayEnv = append(relayEnv, "UNECHO_RELAY_DATABASE_URL="+s.url)
	workerEnv = append(workerEnv, "WORKER_DATABASE="+s.url)
	startRelay := func() *proc.Process { return proc.Start(t, relayEnv, relayProgram, "run") }
	startWorker := func() *proc.Process { return proc.Start(t, workerEnv, workerProgram) }
	relay, worker := startRelay(), startWorker()
	begin := time.Now()
	for round := range rounds {
		// Taken before the first order of the round: on a quick machine all of
		// them may have had their effect by the time the relay was killed.
		before := s.effects()
		produced := make(chan error, 1)
		go func() { produced <- s.produce(t.Context(), batch) }()
		pause(700 * time.Millisecond)
		relay.Kill()
		relay = startRelay()
		// The consumer is killed while it works: after the first effect of
		// this round, at a random moment.
		testenv.Within(t, 60*time.Second, "the consumer makes progress", func() bool { return s.effects() > before })
		pause(150 * time.Millisecond)
		worker.Kill()
		worker = startWorker()
		if err := <-produced; err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
	}
	orders := rounds * batch
	testenv.Within(t, 120*time.Second, "all effects are there", func() bool { return s.effects() >= orders })
	testenv.Within(t, 60*time.Second, "the outbox is empty and all is acknowledged", func() bool {
		return s.count("select count(*) from unecho_outbox_held") == 0 && settled()
	})
	relay.WaitFor(t, "relay starts", 30*time.Second) // before that SIGTERM has its default meaning
	worker.WaitFor(t, "worker runs", 30*time.Second)
	for name, p := range map[string]*proc.Process{"relay": relay, "worker": worker} {
		if err := p.Term(30 * time.Second); err != nil {
			t.Errorf("%s after SIGTERM: %v", name, err)
		}
	}
	s.check(orders)
	t.Logf("E2E %s: orders=%d effects=%d written_twice=%d relay_kills=%d consumer_kills=%d took=%v",
		t.Name(), s.orders.Load(), s.effects(), s.duplicates.Load(), rounds, rounds, time.Since(begin).Round(time.Second))
}

// kafkaLag is how far the group's committed offsets are from the ends.
func kafkaLag(t testing.TB, brokers []string, topic string, partitions int) int64 {
	t.Helper()
	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	c := &kafka.Client{Addr: kafka.TCP(brokers...), Transport: tr, Timeout: 10 * time.Second}
	var ids []int
	var ends []kafka.OffsetRequest
	for i := range partitions {
		ids, ends = append(ids, i), append(ends, kafka.LastOffsetOf(i))
	}
	committed, err := c.OffsetFetch(t.Context(), &kafka.OffsetFetchRequest{GroupID: topic, Topics: map[string][]int{topic: ids}})
	if err != nil {
		t.Logf("fetch offsets: %v", err)
		return 1
	}
	last, err := c.ListOffsets(t.Context(), &kafka.ListOffsetsRequest{Topics: map[string][]kafka.OffsetRequest{topic: ends}})
	if err != nil {
		t.Logf("list offsets: %v", err)
		return 1
	}
	var lag int64
	for _, p := range last.Topics[topic] {
		at := int64(0)
		for _, q := range committed.Topics[topic] {
			if q.Partition == p.Partition {
				at = max(q.CommittedOffset, 0)
			}
		}
		if at > p.LastOffset {
			t.Fatalf("partition %d: offset %d is committed, %d is the end", p.Partition, at, p.LastOffset)
		}
		lag += p.LastOffset - at
	}
	return lag
}
