package natsbroker

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"pgregory.net/rapid"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/brokertest"
	"github.com/unecho/unecho/envelope"
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

// B45: a subject that no stream listens to is told, also when somebody else
// does or answers.
func TestB45NoStreamListens(t *testing.T) {
	f := open(t, embedded(t))
	p, err := NewPublisher(f.connect(t), PublisherConfig{Timeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	nc := f.connect(t)
	for subject, answer := range map[string]string{"nobody.x": "", "listens.x": "-", "answers.x": "{}", "lies.x": `{"stream":"x","seq":0}`} {
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
	for _, subject := range []string{"", f.stream + ".a b", f.stream + "..x", f.stream + ".*", f.stream + ".>", "." + f.stream, f.stream + "."} {
		if err := p.Publish(t.Context(), []*envelope.Message{brokertest.Event(subject, "k", 1)}).Err(); !errors.Is(err, brokers.ErrRejected) {
			t.Errorf("%q: %v, want ErrRejected", subject, err)
		}
	}
	if n := f.stored(t); n != 0 {
		t.Errorf("%d messages stored", n)
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
