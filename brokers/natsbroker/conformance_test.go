package natsbroker

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/brokertest"
	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

// fixture is a stream of its own on a NATS server.
type fixture struct {
	url, stream string
	ackWait     time.Duration
}

func (f *fixture) Topic() string        { return f.stream + ".events" }
func (f *fixture) MissingTopic() string { return "nobody." + f.stream }
func (f *fixture) Oversize() int        { return 1 << 20 }

func (f *fixture) connect(t testing.TB) *nats.Conn {
	t.Helper()
	nc, err := Connect(f.url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

func (f *fixture) source(t testing.TB, c Config) *Source {
	t.Helper()
	s, err := NewSource(f.connect(t), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func (f *fixture) config(group string) Config {
	return Config{Stream: f.stream, Durable: group, AckWait: f.ackWait}
}

func (f *fixture) Source(t testing.TB, group string) brokers.Source {
	return f.source(t, f.config(group))
}

func (f *fixture) Publisher(t testing.TB) brokers.Publisher {
	p, err := NewPublisher(f.connect(t), PublisherConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Revoke keeps the heartbeats back for longer than AckWait.
func (f *fixture) Revoke(t testing.TB, src brokers.Source) {
	s := src.(*Source)
	set := func(mute bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.mute = mute
	}
	set(true)
	testenv.Within(t, 30*time.Second, "the claims run out", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.open) == 0
	})
	set(false)
}

// LoseAcks sends the answers to what src has in hand to nobody.
func (f *fixture) LoseAcks(_ testing.TB, src brokers.Source) {
	s := src.(*Source)
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.open {
		c.msg.Reply = nats.NewInbox()
	}
}

// patient is a fixture on which a delivery is held for three times AckWait.
type patient struct{ *fixture }

func (f patient) HoldFor() time.Duration { return 3 * f.ackWait }

// own is a fixture whose server is this test's.
type own struct {
	*fixture
	server *proc.Server
}

func (f own) Restart(testing.TB) {
	f.server.Kill()
	f.server.Boot()
}

// The cases that want a server of its own.
func TestConformanceRestart(t *testing.T) {
	server := proc.StartNATS(t)
	brokertest.RunRestart(t, func(t testing.TB) brokertest.Fixture { return own{open(t, server.URL), server} })
}

func open(t testing.TB, url string) *fixture {
	t.Helper()
	return openReplicated(t, url, 1)
}

func openReplicated(t testing.TB, url string, replicas int) *fixture {
	t.Helper()
	f := &fixture{url: url, stream: testenv.Name("S"), ackWait: 2 * time.Second}
	js, err := jetstream.New(f.connect(t))
	if err != nil {
		t.Fatal(err)
	}
	_, err = js.CreateStream(t.Context(), jetstream.StreamConfig{Name: f.stream, Subjects: []string{f.stream + ".>"}, Replicas: replicas})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.remove() })
	return f
}

func (f *fixture) remove() {
	nc, err := nats.Connect(f.url)
	if err != nil {
		return // the server of this test alone is gone
	}
	defer nc.Close()
	if js, err := nc.JetStream(); err == nil {
		_ = js.DeleteStream(f.stream)
	}
}

// embedded starts a server inside the test process.
func embedded(t testing.TB) string {
	t.Helper()
	s := run(t, &server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir()})
	return fmt.Sprint("nats://", s.Addr())
}

func TestConformanceEmbedded(t *testing.T) {
	url := embedded(t)
	brokertest.Run(t, func(t testing.TB) brokertest.Fixture { return open(t, url) })
}

func TestConformance(t *testing.T) {
	brokertest.Run(t, func(t testing.TB) brokertest.Fixture { return patient{open(t, testenv.NATS(t))} })
}

// The same on three servers, with streams of three replicas.
func TestConformanceR3(t *testing.T) {
	url := proc.StartNATSCluster(t)[0].URL
	brokertest.Run(t, func(t testing.TB) brokertest.Fixture { return openReplicated(t, url, 3) })
}
