package kafkabroker

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/brokertest"
	"github.com/unecho/unecho/internal/planted"
	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

// fixture is a topic of a real or an emulated Kafka.
type fixture struct {
	brokers []string
	topic   string
}

func (f *fixture) Topic() string        { return f.topic }
func (f *fixture) MissingTopic() string { return "missing-" + f.topic }
func (f *fixture) Oversize() int        { return 1 << 20 }
func (f *fixture) NullBody()            {}

func (f *fixture) config(group string) Config {
	return Config{Brokers: f.brokers, GroupID: f.topic + group, Topics: []string{f.topic}, SessionTimeout: 6 * time.Second,
		HeartbeatInterval: 200 * time.Millisecond, CommitInterval: 20 * time.Millisecond}
}

func (f *fixture) source(t testing.TB, c Config) *Source {
	t.Helper()
	s, err := NewSource(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// Widen returns another topic of the same broker.
func (f *fixture) Widen(t testing.TB, lanes int) brokertest.Fixture {
	topic := testenv.TopicAt(t, f.brokers, lanes, 1)
	return &fixture{brokers: f.brokers, topic: topic}
}

func (f *fixture) Source(t testing.TB, group string) brokers.Source {
	return f.source(t, f.config(group))
}

func (f *fixture) Publisher(t testing.TB) brokers.Publisher {
	p, err := NewPublisher(PublisherConfig{Brokers: f.brokers})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// Revoke ends src's generation by a second member, which leaves again. The
// unsettled deliveries are lost when the bound of the drain is over.
func (f *fixture) Revoke(t testing.TB, src brokers.Source) {
	s := src.(*Source)
	s.mu.Lock()
	lost := s.gen.lost
	s.mu.Unlock()
	second := f.source(t, s.c)
	select {
	case <-lost:
	case <-time.After(30 * time.Second):
		t.Fatal("the generation does not end")
	}
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
}

// LoseAcks has commits of src's generation reach nobody.
func (f *fixture) LoseAcks(_ testing.TB, src brokers.Source) {
	s := src.(*Source)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gen.k = deaf{}
}

type deaf struct{}

func (deaf) CommitOffsets(map[string]map[int]int64) error { return nil }

// patient is a fixture on which a delivery is held for three sessions.
type patient struct{ *fixture }

func (f patient) HoldFor() time.Duration { return 3 * f.config("").SessionTimeout }

// own is a fixture whose broker is this test's.
type own struct {
	*fixture
	server *proc.Server
}

func (f own) Restart(testing.TB) {
	f.server.Kill()
	f.server.Boot()
}

// fake is a fixture whose emulated broker can be stopped.
type fake struct {
	*fixture
	cluster *kfake.Cluster
}

func (f fake) Stop(testing.TB) { f.cluster.Close() }

func openFake(t testing.TB, partitions int) *fixture {
	t.Helper()
	topic := testenv.Name("t-")
	c, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(int32(partitions), topic))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return &fixture{brokers: c.ListenAddrs(), topic: topic}
}

func openReal(t testing.TB, partitions int) *fixture {
	t.Helper()
	return &fixture{brokers: testenv.Kafka(t), topic: testenv.Topic(t, partitions)}
}

// Where the emulated Kafka is known to differ from the real one: it answers a fetch of
// offsets for a group that does not exist with GROUP_ID_NOT_FOUND, where the real one
// says that there are none; it compacts nothing, keeps one replica, and serves at
// once. What depends on that runs on the real one alone.
func TestConformanceEmulated(t *testing.T) {
	brokertest.Run(t, func(t testing.TB) brokertest.Fixture {
		topic := testenv.Name("t-")
		c, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(4, topic))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		return fake{&fixture{brokers: c.ListenAddrs(), topic: topic}, c}
	})
}

func TestConformance(t *testing.T) {
	brokertest.Run(t, func(t testing.TB) brokertest.Fixture { return patient{openReal(t, 4)} })
}

// The cases that want a broker of its own.
func TestConformanceRestart(t *testing.T) {
	server := proc.StartKafka(t)
	addrs := []string{server.Addr}
	brokertest.RunRestart(t, func(t testing.TB) brokertest.Fixture {
		return own{&fixture{brokers: addrs, topic: testenv.TopicAt(t, addrs, 4, 1)}, server}
	})
}

// The same on three brokers: that a request goes to the right one does not show on
// one.
func TestConformanceCluster(t *testing.T) {
	addrs := proc.Addrs(proc.StartKafkaCluster(t))
	brokertest.Run(t, func(t testing.TB) brokertest.Fixture {
		return &fixture{brokers: addrs, topic: testenv.TopicAt(t, addrs, 4, 3)}
	})
}

// What became of the messages behind a stuck one is only seen after a restart:
// a source that commits the highest settled offset loses the stuck one.
func TestPlanted(t *testing.T) {
	brokertest.SetPatience(3 * time.Second)
	defer brokertest.SetPatience(30 * time.Second)
	var runs []func(testing.TB)
	for _, c := range brokertest.Cases() {
		if strings.Contains(c.Name, "B16") {
			runs = append(runs, func(t testing.TB) { c.Func(t, &highest{openFake(t, 1)}) })
		}
	}
	planted.Caught(t, "kafkabroker/highest offset committed", runs...)
}

type highest struct{ *fixture }

func (f *highest) Source(t testing.TB, group string) brokers.Source {
	return &commitsHighest{f.source(t, f.config(group))}
}

type commitsHighest struct{ *Source }

// Ack settles whatever is open below d as well, as a plain offset commit does.
func (s *commitsHighest) Ack(ctx context.Context, d *brokers.Delivery) error {
	s.mu.Lock()
	h := d.Handle.(handle)
	for e := h.p.track.first; e != nil && e.offset < h.e.offset; e = h.p.track.first {
		h.p.track.done(e)
	}
	s.mu.Unlock()
	return s.Source.Ack(ctx, d)
}

func TestConfigErrors(t *testing.T) {
	good := Config{Brokers: []string{"x"}, GroupID: "g", Topics: []string{"t"}}
	for want, change := range map[string]func(*Config){
		"Brokers":           func(c *Config) { c.Brokers = nil },
		"GroupID":           func(c *Config) { c.GroupID = "" },
		"Topics":            func(c *Config) { c.Topics = nil },
		"HeartbeatInterval": func(c *Config) { c.HeartbeatInterval = time.Minute },
	} {
		c := good
		change(&c)
		if _, err := NewSource(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one that names %s", err, want)
		}
	}
}
