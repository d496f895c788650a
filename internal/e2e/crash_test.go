package e2e

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/kafkabroker"
	"github.com/unecho/unecho/brokers/natsbroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/pgoutbox"

	"github.com/nats-io/nats.go/jetstream"
)

// backWithin is how soon after the broker serves again the first effect must be
// there.
const backWithin = 3 * time.Second

// crashes are how often a broker is killed: three times, and in `make brokers` ten
// times, or thirty where that takes no longer.
func crashes(t testing.TB, many int) int { return full(t, 3, many) }

// TestKafkaCrash kills the broker under load. Nothing may be lost or doubled,
// and consumption must be back soon after the broker is, not one session
// time-out later.
func TestKafkaCrash(t *testing.T) { crashKafka(t, proc.StartKafka(t)) }

// TestKafkaClusterCrash kills one of three brokers after the other: routing faults do
// not show on one. Consumption goes on with the two that are left.
func TestKafkaClusterCrash(t *testing.T) { crashKafka(t, proc.StartKafkaCluster(t)...) }

func crashKafka(t *testing.T, nodes ...*proc.Server) {
	addrs := proc.Addrs(nodes)
	topic := testenv.TopicAt(t, addrs, 4, len(nodes))
	pub, err := kafkabroker.NewPublisher(kafkabroker.PublisherConfig{Brokers: addrs})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pub.Close() })
	src, err := kafkabroker.NewSource(kafkabroker.Config{Brokers: addrs, GroupID: "crash", Topics: []string{topic}})
	if err != nil {
		t.Fatal(err)
	}
	crash(t, crashes(t, 10), nodes, topic, pub, src)
}

// TestNATSCrash is the same on NATS.
func TestNATSCrash(t *testing.T) { crashNATS(t, proc.StartNATS(t)) }

// TestNATSClusterCrash kills one of three servers after the other, with a stream of
// three replicas.
func TestNATSClusterCrash(t *testing.T) { crashNATS(t, proc.StartNATSCluster(t)...) }

func crashNATS(t *testing.T, nodes ...*proc.Server) {
	nc, err := natsbroker.Connect(nodes[0].URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	testenv.Within(t, 30*time.Second, "there is a stream", func() bool { // a cluster has to find a leader first
		_, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}, MaxAge: time.Hour, Replicas: len(nodes)})
		return err == nil
	})
	pub, err := natsbroker.NewPublisher(nc, natsbroker.PublisherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	src, err := natsbroker.NewSource(nc, natsbroker.Config{Stream: "S", Durable: "crash", AckWait: time.Second, MaxAckPending: 1})
	if err != nil {
		t.Fatal(err)
	}
	crash(t, crashes(t, 30), nodes, "s.orders", pub, src)
}

func crash(t *testing.T, kills int, nodes []*proc.Server, topic string, pub brokers.Publisher, src brokers.Source) {
	s := openShop(t, topic)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	relayed, consumed := make(chan error, 1), make(chan error, 1)
	go func() { relayed <- outbox.NewRelay(pgoutbox.NewStore(s.pool, nil), pub, nil).Run(ctx) }()
	h := consumer.Wrap("crash", pgdedupe.NewStore(s.pool, nil), effect, nil)
	go func() {
		consumed <- consumer.Run(ctx, src, h, &consumer.RunOptions{DeadLetter: func(context.Context, *consumer.Failure) error {
			return errors.New("there must be no dead letters")
		}})
	}()
	orders := 0
	var backs, gaps []time.Duration
	for round := range kills {
		before := s.effects()
		produced := make(chan error, 1)
		go func() { produced <- s.produce(ctx, crashBatch) }()
		testenv.Within(t, 60*time.Second, "consumption goes on", func() bool { return s.effects() > before })
		pause(200 * time.Millisecond)
		victim := nodes[round%len(nodes)]
		victim.Kill()
		killed := time.Now()
		if err := <-produced; err != nil { // the outbox takes them without the broker
			t.Fatal(err)
		}
		orders += crashBatch
		if len(nodes) > 1 { // the others go on
			testenv.Within(t, 30*time.Second, "the others have done all", func() bool { return s.effects() >= orders })
			gaps = append(gaps, time.Since(killed))
		}
		down := s.standstill()
		victim.Restart()
		back := time.Now()
		if err := s.produce(ctx, 1); err != nil { // in case all was consumed before the crash
			t.Fatal(err)
		}
		orders++
		testenv.Within(t, 30*time.Second, "consumption is back", func() bool { return s.effects() > down })
		backs = append(backs, time.Since(back))
	}
	testenv.Within(t, 60*time.Second, "all effects are there", func() bool { return s.effects() >= orders })
	testenv.Within(t, 30*time.Second, "no row is held", func() bool { return s.count("select count(*) from unecho_outbox_held") == 0 })
	cancel()
	if err := errors.Join(<-relayed, <-consumed); err != nil {
		t.Error(err)
	}
	s.check(orders)
	p50, p99 := quantiles(backs)
	t.Logf("CRASH %s: kills=%d orders=%d, consumption back after the broker p50=%v p99=%v", t.Name(), kills, orders, p50, p99)
	if p99 > backWithin {
		t.Errorf("consumption was back %v after the broker, want within %v", p99, backWithin)
	}
	if len(gaps) > 0 {
		p50, p99 := quantiles(gaps)
		t.Logf("CRASH %s: all done without the one that was killed p50=%v p99=%v", t.Name(), p50, p99)
	}
}

// crashBatch is how many orders are placed around a kill.
const crashBatch = 400

// quantiles of few values: the middle, and the greatest.
func quantiles(ds []time.Duration) (p50, p99 time.Duration) {
	slices.Sort(ds)
	return ds[len(ds)/2].Round(time.Millisecond), ds[len(ds)-1].Round(time.Millisecond)
}

// standstill waits until what was in hand when the broker died is worked off:
// only an effect after that shows that the broker is being consumed again.
func (s *shop) standstill() int {
	n, since := s.effects(), time.Now()
	testenv.Within(s.t, 30*time.Second, "effects come to a standstill", func() bool {
		if now := s.effects(); now != n {
			n, since = now, time.Now()
		}
		return time.Since(since) > 500*time.Millisecond
	})
	return n
}

// effect is what the worker's handler does.
func effect(ctx context.Context, tx pgx.Tx, m *envelope.Message) error {
	_, err := tx.Exec(ctx, `with o as (select $1::jsonb as o),
		b as (update customers set balance = balance + 1 where id = (select (o->>'customer')::int from o))
		insert into effects (order_id, customer, seq) select o->>'id', (o->>'customer')::int, (o->>'seq')::int from o`, string(m.Body))
	return err
}
