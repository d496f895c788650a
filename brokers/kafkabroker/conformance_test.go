package kafkabroker

import (
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/brokertest"
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

func TestConformanceEmulated(t *testing.T) {
	brokertest.Run(t, func(t testing.TB) brokertest.Fixture { return openFake(t, 4) })
}

func TestConformance(t *testing.T) {
	brokertest.Run(t, func(t testing.TB) brokertest.Fixture { return openReal(t, 4) })
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
