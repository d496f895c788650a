package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/segmentio/kafka-go"

	"github.com/unecho/unecho/brokers/kafkabroker"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

// TestKafkaWatermark is TestKafka with a consumer that keeps positions, and keys
// for what is written twice.
func TestKafkaWatermark(t *testing.T) {
	tormentKafka(t, "WORKER_WATERMARK=keys", "WORKER_BATCH=50")
}

const (
	recordPartitions = 3
	recordRounds     = 6
	recordBatch      = 600
)

// records is a topic of records without an identity, and what came of them.
type records struct {
	t     *testing.T
	topic string
	pool  *pgxpool.Pool
	env   []string
	n     int
}

func openRecords(t *testing.T) *records {
	t.Helper()
	brokers, url := testenv.Kafka(t), testenv.SchemaURL(t)
	r := &records{t: t, topic: testenv.Topic(t, recordPartitions), pool: testenv.PoolOf(t, url, 4)}
	r.env = []string{"WORKER_WATERMARK=alone", "WORKER_DATABASE=" + url, "WORKER_KAFKA=" + strings.Join(brokers, ","), "WORKER_TOPIC=" + r.topic, "WORKER_BATCH=20"}
	if err := pgdedupe.Migrate(t.Context(), r.pool, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := r.pool.Exec(t.Context(), "create table records (n bigserial, position text not null, body text not null)"); err != nil {
		t.Fatal(err)
	}
	return r
}

// produce writes n records, by one batch after the other.
func (r *records) produce(n int) error {
	p, err := kafkabroker.NewPublisher(kafkabroker.PublisherConfig{Brokers: testenv.Kafka(r.t)})
	if err != nil {
		return err
	}
	defer func() { _ = p.Close() }()
	for range n / 20 {
		var ms []*envelope.Message
		for range 20 {
			ms = append(ms, &envelope.Message{Topic: r.topic, Key: fmt.Append(nil, r.n%30), Body: fmt.Append(nil, r.n)})
			r.n++
		}
		if err := p.Publish(r.t.Context(), ms).Err(); err != nil {
			return err
		}
	}
	return nil
}

func (r *records) count(sql string, args ...any) (n int) {
	r.t.Helper()
	if err := r.pool.QueryRow(context.Background(), sql, args...).Scan(&n); err != nil {
		r.t.Fatal(err)
	}
	return n
}

func (r *records) effects() int { return r.count("select count(*) from records") }

// check demands one effect for each record, in the order of each partition.
func (r *records) check() {
	r.t.Helper()
	const placed = "select n, body, split_part(position, '/', 2)::int as part, split_part(position, '/', 3)::bigint as place from records"
	for what, sql := range map[string]string{
		"places with effects":              "select count(distinct (part, place)) from (" + placed + ") r",
		"bodies with effects":              "select count(distinct body) from (" + placed + ") r",
		"effects":                          "select count(*) from records",
		"effects in the order of the log":  "select count(*) from (select place > lag(place, 1, -1::bigint) over (partition by part order by n) as ok from (" + placed + ") r) d where ok",
		"offsets that the positions count": "select sum(next_offset) from unecho_position",
	} {
		if n := r.count(sql); n != r.n {
			r.t.Errorf("%s: %d, want %d", what, n, r.n)
		}
	}
}

// Two consumers by positions alone, on a real Kafka: one of them is killed in the
// middle of its work, again and again, which is a rebalance each time it dies
// and each time it comes back, with what it had not acknowledged. Then the topic
// is deleted and made anew, and nobody takes its records for duplicates.
func TestKafkaPositions(t *testing.T) {
	r := openRecords(t)
	program := proc.Build(t, "./internal/e2e/worker")
	start := func() *proc.Process { return proc.Start(t, r.env, program) }
	steady, victim := start(), start()
	begin, kills := time.Now(), 0
	for range recordRounds {
		before := r.effects()
		produced := make(chan error, 1)
		go func() { produced <- r.produce(recordBatch) }()
		testenv.Within(t, 60*time.Second, "the consumers make progress", func() bool { return r.effects() > before })
		pause(300 * time.Millisecond)
		victim.Kill()
		kills++
		victim = start()
		if err := <-produced; err != nil {
			t.Fatal(err)
		}
	}
	testenv.Within(t, 120*time.Second, "all effects are there", func() bool { return r.effects() >= r.n })
	testenv.Within(t, 60*time.Second, "all is acknowledged", func() bool {
		return kafkaLag(t, testenv.Kafka(t), r.topic, recordPartitions) == 0
	})
	for _, p := range []*proc.Process{steady, victim} {
		p.WaitFor(t, "worker runs", 30*time.Second)
		if err := p.Term(30 * time.Second); err != nil {
			t.Errorf("after SIGTERM: %v", err)
		}
	}
	r.check()
	t.Logf("E2E %s: records=%d effects=%d consumer_kills=%d took=%v", t.Name(), r.n, r.effects(), kills, time.Since(begin).Round(time.Second))
	r.replaced(start)
}

// replaced deletes the topic, makes it anew, and writes to it.
func (r *records) replaced(start func() *proc.Process) {
	r.recreate()
	before := r.effects()
	if err := r.produce(recordBatch); err != nil {
		r.t.Fatal(err)
	}
	worker := start()
	worker.WaitFor(r.t, "the log was replaced", 60*time.Second)
	if n := r.effects(); n != before {
		r.t.Errorf("%d effects of the new log before anybody has looked at it", n-before)
	}
	admin := pgdedupe.NewAdmin(r.pool, nil).(dedupe.PositionAdmin)
	all, err := admin.Positions(r.t.Context())
	if err != nil || len(all) != recordPartitions {
		r.t.Fatalf("the positions are %v, %v", all, err)
	}
	for _, p := range all {
		if err := admin.ResetPosition(r.t.Context(), p.Partition, 0); err != nil {
			r.t.Fatal(err)
		}
	}
	testenv.Within(r.t, 60*time.Second, "the new log has its effects", func() bool { return r.effects() == before+recordBatch })
	if err := worker.Term(30 * time.Second); err != nil {
		r.t.Errorf("after SIGTERM: %v", err)
	}
	if n := r.count("select count(distinct body) from records"); n != r.n {
		r.t.Errorf("%d records have an effect, want %d", n, r.n)
	}
}

// recreate deletes the topic and makes another one of its name.
func (r *records) recreate() {
	r.t.Helper()
	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	c := &kafka.Client{Addr: kafka.TCP(testenv.Kafka(r.t)...), Transport: tr, Timeout: 10 * time.Second}
	if _, err := c.DeleteTopics(r.t.Context(), &kafka.DeleteTopicsRequest{Topics: []string{r.topic}}); err != nil {
		r.t.Fatal(err)
	}
	testenv.Within(r.t, 60*time.Second, "the topic is made anew", func() bool {
		res, err := c.CreateTopics(r.t.Context(), &kafka.CreateTopicsRequest{
			Topics: []kafka.TopicConfig{{Topic: r.topic, NumPartitions: recordPartitions, ReplicationFactor: 1}}})
		return err == nil && res.Errors[r.topic] == nil
	})
}
