package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/segmentio/kafka-go"

	"github.com/unecho/unecho/brokers/kafkabroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
)

const (
	stormMembers    = 3
	stormPartitions = 6
	stormWorkers    = 16
	stormEvery      = 2 * time.Second
)

// storm is a group whose members come and go.
type storm struct {
	t     *testing.T
	addrs []string
	topic string
	pool  *pgxpool.Pool
	store dedupe.Store[pgx.Tx]

	received atomic.Int64
	wg       sync.WaitGroup
	members  []context.CancelFunc
}

// TestKafkaStorm: every two seconds a member joins the group or leaves it, while sixteen
// workers of each work on six partitions in no order. Nothing is lost, everything has
// one effect, and what is committed for the group never covers what is not
// finished, nor goes back.
func TestKafkaStorm(t *testing.T) {
	url := testenv.SchemaURL(t)
	s := &storm{t: t, addrs: testenv.Kafka(t), topic: testenv.Topic(t, stormPartitions), pool: testenv.PoolOf(t, url, 3*stormWorkers)}
	s.store = pgdedupe.NewStore(s.pool, nil)
	if err := pgdedupe.Migrate(t.Context(), s.pool, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := s.pool.Exec(t.Context(), "create table done (id text not null, part int not null, place bigint not null)"); err != nil {
		t.Fatal(err)
	}
	begin, last := time.Now(), full(t, 20*time.Second, time.Minute)
	stop := make(chan struct{})
	published, watched := make(chan int, 1), make(chan int, 1)
	go func() { published <- s.publish(stop) }()
	go func() { watched <- s.watch(stop) }()
	for range stormMembers {
		s.join()
	}
	changes := 0
	for time.Since(begin) < last {
		time.Sleep(stormEvery) // the storm's own pace
		if len(s.members) < stormMembers || len(s.members) == stormMembers && changes%2 == 1 {
			s.join()
		} else {
			s.leave()
		}
		changes++
	}
	close(stop)
	n, commits := <-published, <-watched
	testenv.Within(t, 120*time.Second, "everything has its effect", func() bool { return s.count("select count(distinct id) from done") == n })
	testenv.Within(t, 60*time.Second, "all is committed", func() bool { return kafkaLag(t, s.addrs, s.topic, stormPartitions) == 0 })
	for len(s.members) > 0 {
		s.leave()
	}
	s.wg.Wait()
	if effects := s.count("select count(*) from done"); effects != n {
		t.Errorf("%d effects of %d events", effects, n)
	}
	t.Logf("STORM %s: took=%v changes=%d events=%d effects=%d redeliveries=%d commits_seen=%d", t.Name(), time.Since(begin).Round(time.Second), changes, n,
		s.count("select count(*) from done"), s.received.Load()-int64(n), commits)
}

func (s *storm) count(sql string, args ...any) (n int) {
	if err := s.pool.QueryRow(context.Background(), sql, args...).Scan(&n); err != nil {
		s.t.Errorf("%s: %v", sql, err)
	}
	return n
}

// join starts a member.
func (s *storm) join() {
	src, err := kafkabroker.NewSource(kafkabroker.Config{Brokers: s.addrs, GroupID: s.topic, Topics: []string{s.topic}})
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.members = append(s.members, cancel)
	s.wg.Go(func() {
		err := consumer.Run(ctx, src, consumer.Wrap("storm", s.store, s.handle, nil), &consumer.RunOptions{Concurrency: stormWorkers, Order: consumer.Unordered,
			DeadLetter: func(context.Context, *consumer.Failure) error { return errors.New("there must be no dead letters") },
			Observer: consumer.ObserverFunc(func(_ context.Context, e consumer.Event) {
				if e.Step == consumer.StepReceive {
					s.received.Add(1)
				}
			})})
		if err != nil {
			s.t.Errorf("Run: %v", err)
		}
	})
}

// leave ends the member that has been there for longest.
func (s *storm) leave() {
	s.members[0]()
	s.members = s.members[1:]
}

func (s *storm) handle(ctx context.Context, tx pgx.Tx, m *envelope.Message) error {
	at := strings.Split(m.Position, "/")
	part, _ := strconv.Atoi(at[1])
	place, _ := strconv.Atoi(at[2])
	if _, err := tx.Exec(ctx, "insert into done values ($1, $2, $3)", m.ID, part, place); err != nil {
		return err
	}
	select {
	case <-time.After(rand.N(20 * time.Millisecond)):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// publish sends events until stop, and returns how many.
func (s *storm) publish(stop chan struct{}) (n int) {
	p, err := kafkabroker.NewPublisher(kafkabroker.PublisherConfig{Brokers: s.addrs})
	if err != nil {
		s.t.Error(err)
		return 0
	}
	defer func() { _ = p.Close() }()
	for {
		select {
		case <-stop:
			return n
		case <-time.After(50 * time.Millisecond):
		}
		var ms []*envelope.Message
		for range 15 {
			ms = append(ms, &envelope.Message{ID: strconv.Itoa(n), Source: "/storm", Type: "t", Topic: s.topic, Key: fmt.Append(nil, n%100), Body: []byte("x")})
			n++
		}
		if err := p.Publish(context.Background(), ms).Err(); err != nil {
			s.t.Error(err)
			return n
		}
	}
}

// watch compares what is committed for the group with what is done, again and again, and returns how
// often something more was committed. What is done is looked at later, and only
// grows.
func (s *storm) watch(stop chan struct{}) (commits int) {
	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	c := &kafka.Client{Addr: kafka.TCP(s.addrs...), Transport: tr, Timeout: 10 * time.Second}
	ids := make([]int, stormPartitions)
	for i := range ids {
		ids[i] = i
	}
	before := make(map[int]int64)
	for {
		select {
		case <-stop:
			return commits
		case <-time.After(20 * time.Millisecond):
		}
		res, err := c.OffsetFetch(context.Background(), &kafka.OffsetFetchRequest{GroupID: s.topic, Topics: map[string][]int{s.topic: ids}})
		if err != nil {
			continue
		}
		for _, p := range res.Topics[s.topic] {
			at := p.CommittedOffset
			switch {
			case p.Error != nil || at <= 0:
				continue
			case at < before[p.Partition]:
				s.t.Errorf("partition %d: %d is committed after %d", p.Partition, at, before[p.Partition])
			case at > before[p.Partition]:
				commits++
			}
			before[p.Partition] = at
			if done := s.count("select count(distinct place) from done where part = $1 and place < $2", p.Partition, at); int64(done) != at {
				s.t.Errorf("partition %d: %d is committed, and only %d below it are done", p.Partition, at, done)
			}
		}
	}
}
