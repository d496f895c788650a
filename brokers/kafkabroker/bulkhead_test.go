package kafkabroker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/brokertest"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
)

func (f *fixture) client(t testing.TB) *kafka.Client {
	t.Helper()
	tr := &kafka.Transport{MetadataTTL: 100 * time.Millisecond}
	t.Cleanup(tr.CloseIdleConnections)
	return &kafka.Client{Addr: kafka.TCP(f.brokers...), Transport: tr, Timeout: 10 * time.Second}
}

// A topic that is not there leaves the others theirs, also when the group is shared
// out anew: the client gives nobody anything then.
func TestMissingTopicBesideOthers(t *testing.T) {
	both(t, 2, func(t *testing.T, f *fixture) {
		later := testenv.Name("later-")
		c := f.config("g")
		c.Topics, c.RefreshInterval = []string{later, f.topic}, 200*time.Millisecond
		one := f.source(t, c)
		f.put(t, f.topic, 0, "a")
		f.put(t, f.topic, 1, "b")
		got := bodies(t, one, 2)
		if slices.Sort(got); !slices.Equal(got, []string{"a", "b"}) {
			t.Errorf("received %q", got)
		}
		two := f.source(t, c)
		f.put(t, f.topic, 0, "c")
		f.put(t, f.topic, 1, "d")
		if got := either(t, 2, one, two); !slices.Equal(got, []string{"c", "d"}) {
			t.Errorf("received %q", got)
		}
		f.create(t, later)
		f.put(t, later, 0, "x")
		if got := either(t, 1, one, two); !slices.Equal(got, []string{"x"}) {
			t.Errorf("received %q", got)
		}
	})
}

// A topic that somebody deletes leaves the others theirs.
func TestDeletedTopicBesideOthers(t *testing.T) {
	both(t, 1, func(t *testing.T, f *fixture) {
		gone := testenv.Name("gone-")
		f.create(t, gone)
		c := f.config("g")
		c.Topics, c.RefreshInterval = []string{gone, f.topic}, 200*time.Millisecond
		one := f.source(t, c)
		f.put(t, gone, 0, "x")
		f.put(t, f.topic, 0, "a")
		bodies(t, one, 2)
		if res, err := f.client(t).DeleteTopics(t.Context(), &kafka.DeleteTopicsRequest{Topics: []string{gone}}); err != nil || res.Errors[gone] != nil {
			t.Fatal(err, res)
		}
		two := f.source(t, c)
		f.put(t, f.topic, 0, "b")
		if got := either(t, 1, one, two); !slices.Equal(got, []string{"b"}) {
			t.Errorf("received %q", got)
		}
	})
}

// either receives and acknowledges n messages from any of the sources.
func either(t testing.TB, n int, from ...*Source) (got []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	all := make(chan string)
	for _, s := range from {
		go func() {
			for {
				d, err := s.Receive(ctx)
				if err != nil {
					return
				}
				body := string(d.Message.Body)
				if err := s.Ack(ctx, d); err == nil {
					select {
					case all <- body:
					case <-ctx.Done():
						return
					}
				}
			}
		}()
	}
	for range n {
		select {
		case body := <-all:
			got = append(got, body)
		case <-ctx.Done():
			t.Fatalf("received %q, want %d", got, n)
		}
	}
	slices.Sort(got)
	return got
}

// A partition without a leader holds up the others of one call for a second, and
// those of the calls that follow for nothing; alone it is waited for, and when it
// serves again it is published to.
func TestPartitionWithoutLeaderBesideOthers(t *testing.T) {
	topic := testenv.Name("t-")
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(4, topic))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	f := &fixture{brokers: cluster.ListenAddrs(), topic: topic}
	var down atomic.Bool
	down.Store(true)
	cluster.ControlKey(int16(kmsg.Produce), func(r kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		req := r.(*kmsg.ProduceRequest)
		if !down.Load() || req.Topics[0].Partitions[0].Partition != 1 {
			return nil, nil, false
		}
		res := req.ResponseKind().(*kmsg.ProduceResponse)
		p := kmsg.NewProduceResponseTopicPartition()
		p.Partition, p.ErrorCode = 1, kerr.NotLeaderForPartition.Code
		rt := kmsg.NewProduceResponseTopic()
		rt.Topic, rt.TopicID, rt.Partitions = req.Topics[0].Topic, req.Topics[0].TopicID, []kmsg.ProduceResponseTopicPartition{p}
		res.Topics = append(res.Topics, rt)
		return res, nil, true
	})
	pub := f.Publisher(t).(*Publisher)
	var msgs, alone []*envelope.Message
	on := make([]bool, 40)
	for i := range on {
		m := brokertest.Event(topic, fmt.Sprint("k", i), 1)
		msgs = append(msgs, m)
		if on[i] = pub.partitionOf(topic, m.Key, []int{0, 1, 2, 3}) == 1; on[i] {
			alone = append(alone, m)
		}
	}
	began := time.Now()
	for range 20 {
		for i, err := range pub.Publish(t.Context(), msgs) {
			if on[i] != errors.Is(err, brokers.ErrUnavailable) || !on[i] && err != nil {
				t.Fatalf("message %d, to the partition that is down %v: %v", i, on[i], err)
			}
		}
	}
	if took := time.Since(began); took > 5*time.Second { // 20 s and more, if each waited a second
		t.Errorf("20 calls took %v", took)
	}
	var unkeyed []*envelope.Message
	for i := range 20 {
		unkeyed = append(unkeyed, brokertest.Event(topic, "", i))
	}
	if n := failures(pub.Publish(t.Context(), unkeyed)); n > 5 { // those that try it once its rest is over
		t.Errorf("%d of 20 messages without a key went to the partition that is down", n)
	}
	if to := pub.Destination(alone[0]); to != topic+"/1" {
		t.Errorf("destination %q", to)
	}
	time.AfterFunc(3*time.Second, func() { down.Store(false) })
	if err := pub.Publish(t.Context(), alone).Err(); err != nil {
		t.Errorf("alone, to a partition that serves again after 3 s: %v", err)
	}
	if err := pub.Publish(t.Context(), msgs).Err(); err != nil {
		t.Errorf("when all serve again: %v", err)
	}
}

func failures(res brokers.Results) (n int) {
	for _, err := range res {
		if err != nil {
			n++
		}
	}
	return n
}

// A topic of dead letters that takes as much as the one that is consumed does not
// take all that comes from it, because a dead letter says why it is there.
func TestDeadLetterTopicsAreCompared(t *testing.T) {
	f := openReal(t, 1)
	same, larger := testenv.Name("dead-"), testenv.Name("dead-")
	res, err := f.client(t).CreateTopics(t.Context(), &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{
		{Topic: same, NumPartitions: 1, ReplicationFactor: 1},
		{Topic: larger, NumPartitions: 1, ReplicationFactor: 1, ConfigEntries: []kafka.ConfigEntry{{ConfigName: "max.message.bytes", ConfigValue: "2000000"}}}}})
	if err := errors.Join(err, res.Errors[same], res.Errors[larger]); err != nil {
		t.Fatal(err)
	}
	told := make(chan error, 10)
	c := f.config("g")
	c.DeadLetterTopics, c.OnError = []string{same, larger}, func(err error) { told <- err }
	s := f.source(t, c)
	select {
	case err := <-told:
		if !errors.Is(err, ErrDeadLetterLimit) || !strings.Contains(err.Error(), same) || strings.Contains(err.Error(), larger) {
			t.Errorf("told %v, want ErrDeadLetterLimit about %s", err, same)
		}
	case <-time.After(20 * time.Second):
		t.Error("nothing was told")
	}
	f.put(t, f.topic, 0, "a")
	bodies(t, s, 1)
	_ = s.Close()
	for len(told) > 0 {
		t.Errorf("told as well: %v", <-told)
	}
}

// Close returns when the connections have ended, also that of a fetch that the
// broker still holds.
func TestCloseEndsConnections(t *testing.T) {
	both(t, 2, func(t *testing.T, f *fixture) {
		s := f.source(t, f.config("g"))
		f.put(t, f.topic, 0, "a")
		bodies(t, s, 1)
		p := f.Publisher(t).(*Publisher)
		if err := p.Publish(t.Context(), []*envelope.Message{brokertest.Event(f.topic, "k", 1)}).Err(); err != nil {
			t.Fatal(err)
		}
		for name, c := range map[string]struct {
			of    *connections
			close func() error
		}{"source": {&s.conns, s.Close}, "publisher": {&p.conns, p.Close}} {
			var open []net.Conn
			c.of.mu.Lock()
			for conn := range c.of.open {
				open = append(open, conn)
			}
			c.of.mu.Unlock()
			if err := c.close(); err != nil || len(open) == 0 {
				t.Errorf("%s: close with %d connections: %v", name, len(open), err)
			}
			for _, conn := range open {
				if _, err := conn.Write([]byte{0}); !errors.Is(err, net.ErrClosed) {
					t.Errorf("%s: a connection is open after Close: %v", name, err)
				}
			}
			if _, err := c.of.dial(t.Context(), "tcp", f.brokers[0]); !errors.Is(err, net.ErrClosed) {
				t.Errorf("%s: a connection is made after Close: %v", name, err)
			}
		}
	})
}

// What is too large is told as that, whoever refuses it; and what the broker just
// takes is not refused before.
func TestTooLarge(t *testing.T) {
	f := openReal(t, 1)
	const limit = 1_048_588
	m := brokertest.Event(f.topic, "k", 1)
	wire, err := envelope.Kafka.Encode(m, envelope.Binary)
	if err != nil {
		t.Fatal(err)
	}
	body := limit - size(wire) + len(wire.Body) - 2*(varint(limit)-1) // two lengths grow with the body
	for name, most := range map[string]int{"by the publisher": 0, "by the broker": 2 << 20} {
		t.Run(name, func(t *testing.T) {
			p, err := NewPublisher(PublisherConfig{Brokers: f.brokers, MaxMessageBytes: most})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = p.Close() }()
			for _, c := range []struct {
				n   int
				err error
			}{{body, nil}, {body + 20, brokers.ErrTooLarge}} {
				m.Body = []byte(strings.Repeat("x", c.n))
				if err := p.Publish(t.Context(), []*envelope.Message{m}).Err(); !errors.Is(err, c.err) {
					t.Errorf("a body of %d bytes: %v, want %v", c.n, err, c.err)
				}
			}
		})
	}
}
