package natsbroker

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"pgregory.net/rapid"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/brokertest"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
)

func (f *fixture) stored(t testing.TB) uint64 {
	t.Helper()
	s, err := f.js(t).Stream(t.Context(), f.stream)
	if err != nil {
		t.Fatal(err)
	}
	return s.CachedInfo().State.Msgs
}

// B44: the server's window is for the stream. One event on two subjects of it
// is two messages, the same one again is none, and an id that somebody else
// holds must not pass for ours.
func TestB44DuplicatesAreVerified(t *testing.T) {
	f := open(t, embedded(t))
	p := f.Publisher(t).(*Publisher)
	here, there := brokertest.Event(f.stream+".here", "k", 1), brokertest.Event(f.stream+".there", "k", 1)
	if err := p.Publish(t.Context(), []*envelope.Message{here, there}).Err(); err != nil {
		t.Fatal(err)
	}
	if n := f.stored(t); n != 2 {
		t.Errorf("%d messages stored, want one for each subject", n)
	}
	if err := p.Publish(t.Context(), []*envelope.Message{here}).Err(); err != nil {
		t.Errorf("the same event again: %v", err)
	}
	if n := f.stored(t); n != 2 || p.Duplicates() != 1 {
		t.Errorf("%d stored, %d duplicates, want 2 and 1", n, p.Duplicates())
	}
	other := brokertest.Event(f.stream+".here", "k", 2)
	m := &nats.Msg{Subject: f.stream + ".here", Data: []byte("another"), Header: nats.Header{nats.MsgIdHdr: {messageID(other)}}}
	if _, err := f.js(t).PublishMsg(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(t.Context(), []*envelope.Message{other}).Err(); !errors.Is(err, brokers.ErrRejected) {
		t.Errorf("an id that another message holds: %v, want ErrRejected", err)
	}
}

// A duplicate is looked up where it is, also behind a transform of subjects, and
// also when a replica that lags could be asked; one that was deleted was stored.
func TestDuplicatesAreFound(t *testing.T) {
	f := open(t, embedded(t))
	p := f.Publisher(t).(*Publisher)
	again := func(what string) {
		t.Helper()
		before := p.Duplicates()
		for range 2 {
			if err := p.Publish(t.Context(), []*envelope.Message{brokertest.Event(f.Topic(), what, 1)}).Err(); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		if n := p.Duplicates() - before; n != 1 {
			t.Errorf("%s: %d duplicates, want 1", what, n)
		}
	}
	again("plain")
	_, err := f.js(t).UpdateStream(t.Context(), jetstream.StreamConfig{Name: f.stream, Subjects: []string{f.stream + ".>"}, AllowDirect: true,
		SubjectTransform: &jetstream.SubjectTransformConfig{Source: f.stream + ".>", Destination: "moved.>"}})
	if err != nil {
		t.Fatal(err)
	}
	again("transformed")
	gone := brokertest.Event(f.Topic(), "gone", 1)
	if err := p.Publish(t.Context(), []*envelope.Message{gone}).Err(); err != nil {
		t.Fatal(err)
	}
	stream, err := f.js(t).Stream(t.Context(), f.stream)
	if err == nil {
		err = stream.Purge(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(t.Context(), []*envelope.Message{gone}).Err(); err != nil {
		t.Errorf("a duplicate of what was deleted since: %v", err)
	}
}

// Many duplicates are looked at together, not one after the other.
func TestManyDuplicates(t *testing.T) {
	f := open(t, embedded(t))
	p := f.Publisher(t).(*Publisher)
	var msgs []*envelope.Message
	for i := range 1000 {
		msgs = append(msgs, brokertest.Event(f.Topic(), "", i))
	}
	for range 2 {
		if err := p.Publish(t.Context(), msgs).Err(); err != nil {
			t.Fatal(err)
		}
	}
	if n := p.Duplicates(); n != 1000 || f.stored(t) != 1000 {
		t.Errorf("%d duplicates, %d stored", n, f.stored(t))
	}
}

// B45: a subject that no stream listens to is told, also when somebody else
// does or answers.
func TestB45NoStreamListens(t *testing.T) {
	f := open(t, embedded(t))
	p, err := NewPublisher(f.connect(t), PublisherConfig{Timeout: time.Second, Streams: []string{f.stream}})
	if err != nil {
		t.Fatal(err)
	}
	nc := f.connect(t)
	if err := p.Publish(t.Context(), []*envelope.Message{brokertest.Event(f.Topic(), "k", 1)}).Err(); err != nil {
		t.Errorf("a stream that listens: %v", err)
	}
	for subject, answer := range map[string]string{"nobody.x": "", "listens.x": "-", "answers.x": "{}", "lies.x": `{"stream":"x","seq":0}`, "impostor.x": `{"stream":"x","seq":7}`} {
		if answer != "" {
			sub, err := nc.Subscribe(subject, func(m *nats.Msg) {
				if answer != "-" {
					_ = m.Respond([]byte(answer))
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = sub.Unsubscribe() }()
		}
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
		got := p.Publish(t.Context(), []*envelope.Message{brokertest.Event(subject, "k", 1)}).Err()
		want := brokers.ErrUnknown
		if subject == "nobody.x" {
			want = brokers.ErrNoRoute
		}
		if !errors.Is(got, want) {
			t.Errorf("%s: %v, want %v", subject, got, want)
		}
	}
}

func TestSubjectsThatAreNone(t *testing.T) {
	f := open(t, embedded(t))
	p := f.Publisher(t)
	for _, subject := range []string{"", f.stream + ".a b", f.stream + "..x", f.stream + ".*", f.stream + ".>", "." + f.stream, f.stream + ".", "$JS.API.STREAM.PURGE." + f.stream} {
		if err := p.Publish(t.Context(), []*envelope.Message{brokertest.Event(subject, "k", 1)}).Err(); !errors.Is(err, brokers.ErrRejected) {
			t.Errorf("%q: %v, want ErrRejected", subject, err)
		}
	}
	if n := f.stored(t); n != 0 {
		t.Errorf("%d messages stored", n)
	}
}

// What could not be sent is unavailable, and is not sent later; what was sent
// and not answered is unknown, and is a duplicate when it is sent again.
func TestPublishBehindABrokenNetwork(t *testing.T) {
	f := open(t, embedded(t))
	net := startProxy(t, f.url)
	far := *f
	far.url = net.url
	nc := far.connect(t)
	p, err := NewPublisher(nc, PublisherConfig{Timeout: 300 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	back := func() {
		t.Helper()
		testenv.Within(t, 10*time.Second, "the client is back", func() bool { return nc.IsConnected() && nc.Flush() == nil })
	}
	event := func(n int) []*envelope.Message { return []*envelope.Message{brokertest.Event(f.Topic(), "k", n)} }
	publish := func(n int, want error, stored uint64) {
		t.Helper()
		if err := p.Publish(t.Context(), event(n)).Err(); !errors.Is(err, want) {
			t.Errorf("event %d: %v, want %v", n, err, want)
		}
		if got := f.stored(t); got != stored {
			t.Errorf("event %d: %d stored, want %d", n, got, stored)
		}
	}
	publish(1, nil, 1)
	net.cut()
	testenv.Within(t, 10*time.Second, "the client notices", func() bool { return !nc.IsConnected() })
	publish(2, brokers.ErrUnavailable, 1)
	net.mend()
	back()
	publish(3, nil, 2) // and nothing of 2
	net.hold()
	publish(4, brokers.ErrUnknown, 3)
	net.pass()
	back()
	publish(4, nil, 3)
	if n := p.Duplicates(); n != 1 {
		t.Errorf("%d duplicates, want 1", n)
	}
}

// Close lets a call send nothing more, and leaves nothing on the connection.
func TestCloseUnderWay(t *testing.T) {
	f := open(t, embedded(t))
	net := startProxy(t, f.url)
	far := *f
	far.url = net.url
	nc := far.connect(t)
	before := nc.NumSubscriptions()
	p, err := NewPublisher(nc, PublisherConfig{Timeout: time.Second, Window: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(t.Context(), []*envelope.Message{brokertest.Event(f.Topic(), "", 0)}).Err(); err != nil {
		t.Fatal(err)
	}
	net.hold()
	results := make(chan brokers.Results, 1)
	go func() {
		results <- p.Publish(context.Background(), []*envelope.Message{brokertest.Event(f.Topic(), "", 1), brokertest.Event(f.Topic(), "", 2)})
	}()
	testenv.Within(t, 10*time.Second, "the first is sent", func() bool { return f.stored(t) == 2 })
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	res := <-results
	if !errors.Is(res[0], brokers.ErrUnknown) || !errors.Is(res[1], brokers.ErrClosed) {
		t.Errorf("results %v, want unknown and closed", res)
	}
	net.pass()
	if n := nc.NumSubscriptions(); n != before {
		t.Errorf("%d subscriptions after Close, %d before", n, before)
	}
}

// B13: spaces and line breaks in an id: refused, or received as they were.
func TestB13IdsPassUnchangedOrNotAtAll(t *testing.T) {
	f := open(t, embedded(t))
	accepted := 0
	for _, mode := range []envelope.Mode{envelope.Binary, envelope.Structured} {
		p, err := NewPublisher(f.connect(t), PublisherConfig{Mode: mode})
		if err != nil {
			t.Fatal(err)
		}
		s := f.source(t, f.config(fmt.Sprint("g", mode)))
		s.Demand(1)
		for _, id := range []string{" a", "a ", "a", "a\nb", "a b", "a\tb", "a\r\nEvil: 1", "\u00e4", "%20", "a%0Ab", "\"a\""} {
			m := brokertest.Event(f.Topic(), "k", 1)
			m.ID, m.Source = id, fmt.Sprint("/mode/", mode)
			err := p.Publish(t.Context(), []*envelope.Message{m}).Err()
			if errors.Is(err, brokers.ErrRejected) {
				continue
			}
			if err != nil {
				t.Errorf("%v %q: %v", mode, id, err)
				continue
			}
			accepted++
			for {
				d := next(t, s)
				got, err := envelope.Decode(d.Message)
				if err != nil || s.Ack(t.Context(), d) != nil {
					t.Fatalf("%v %q: %v", mode, id, err)
				}
				if got.Source != m.Source {
					continue // of the mode before
				}
				if got.ID != id {
					t.Errorf("%v %q arrived as %q", mode, id, got.ID)
				}
				break
			}
		}
		if p.Duplicates() != 0 {
			t.Errorf("%v: %d ids were taken for another", mode, p.Duplicates())
		}
	}
	if accepted < 8 {
		t.Errorf("only %d ids were accepted", accepted)
	}
}

// A dead letter that is published again must not bring instructions to the
// server with it.
func TestReservedHeadersStayBehind(t *testing.T) {
	f := open(t, embedded(t))
	p := f.Publisher(t)
	keep := brokertest.Event(f.Topic(), "k", 1)
	rollup := &envelope.Message{Topic: f.Topic(), Body: []byte("x")}
	rollup.Header.Add("Nats-Rollup", []byte("all"))
	rollup.Header.Add("nats-expected-last-sequence", []byte("77"))
	if err := p.Publish(t.Context(), []*envelope.Message{keep, rollup}).Err(); err != nil {
		t.Fatal(err)
	}
	if n := f.stored(t); n != 2 {
		t.Errorf("%d messages stored, want 2", n)
	}
}

func TestRounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		keys := rapid.SliceOfN(rapid.SampledFrom([]string{"", "a", "b", "c"}), 0, 40).Draw(t, "keys")
		window := rapid.IntRange(1, 10).Draw(t, "window")
		msgs := make([]*envelope.Message, len(keys))
		for i, k := range keys {
			msgs[i] = &envelope.Message{Topic: "t"}
			if k != "" {
				msgs[i].Key = []byte(k)
			}
		}
		seen, last := 0, map[string]int{}
		for _, round := range rounds(msgs, window) {
			if len(round) == 0 || len(round) > window {
				t.Fatalf("a round of %d, the window is %d", len(round), window)
			}
			inRound := map[string]bool{}
			for _, s := range round {
				seen++
				k := keys[s.i]
				if k == "" {
					continue
				}
				before, ok := last[k]
				if inRound[k] || ok && (before > s.i || s.before != before) || !ok && s.before != -1 {
					t.Fatalf("key %s: message %d behind %d (said: %d)", k, s.i, before, s.before)
				}
				inRound[k], last[k] = true, s.i
			}
		}
		if seen != len(msgs) {
			t.Fatalf("%d of %d messages", seen, len(msgs))
		}
	})
}

func TestMessageIDIsInjective(t *testing.T) {
	seen := map[string]string{}
	for _, parts := range [][3]string{{"a", "b:c", "t"}, {"a:b", "c", "t"}, {"ab", "c", "t"}, {"a", "bc", "t"}, {"a", "b", "ct"}, {"a", "b", "c.t"}} {
		id := messageID(&envelope.Message{Source: parts[0], ID: parts[1], Topic: parts[2]})
		if was, ok := seen[id]; ok {
			t.Errorf("%v and %s have one message id", parts, was)
		}
		seen[id] = strings.Join(parts[:], " ")
	}
	if messageID(&envelope.Message{Source: "s", Topic: "t"}) != "" {
		t.Error("a message without an identity has a message id")
	}
}

// What is too large is told as that, whoever refuses it: the stream, which may
// allow less than the server, or the server.
func TestTooLarge(t *testing.T) {
	f := open(t, embedded(t))
	js, err := jetstream.New(f.connect(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "SMALL", Subjects: []string{"small.>"}, MaxMsgSize: 1000}); err != nil {
		t.Fatal(err)
	}
	p := f.Publisher(t)
	for topic, n := range map[string]int{"small.x": 2000, f.Topic(): 1 << 20} {
		m := brokertest.Event(topic, "k", 1)
		m.Body = make([]byte, n)
		if err := p.Publish(t.Context(), []*envelope.Message{m}).Err(); !errors.Is(err, brokers.ErrTooLarge) {
			t.Errorf("%d bytes to %s: %v, want ErrTooLarge", n, topic, err)
		}
	}
}

// JetStream that is away is told, also where the connection is not lost.
func TestProbe(t *testing.T) {
	s := run(t, &server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir()})
	f := open(t, fmt.Sprint("nats://", s.Addr()))
	p := f.Publisher(t).(*Publisher)
	if err := p.Probe(t.Context()); err != nil {
		t.Errorf("probe: %v", err)
	}
	if err := s.DisableJetStream(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := p.Probe(ctx); !errors.Is(err, brokers.ErrUnavailable) {
		t.Errorf("probe without JetStream: %v, want ErrUnavailable", err)
	}
}
