// Package brokertest is the conformance suite of broker adapters: [Run] shows
// that a source and a publisher keep the contracts of package brokers.
package brokertest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

// Fixture is a broker with one empty topic.
type Fixture interface {
	// Topic is the topic (or subject) that sources receive from.
	Topic() string
	// Source returns a source in a consumer group. It closes with the test.
	Source(t testing.TB, group string) brokers.Source
	// Publisher returns a publisher. It closes with the test.
	Publisher(t testing.TB) brokers.Publisher
}

// MissingTopic is an optional power of a [Fixture]: a topic that does not exist.
type MissingTopic interface{ MissingTopic() string }

// Oversize is an optional power of a [Fixture]: the least body that the broker
// refuses.
type Oversize interface{ Oversize() int }

// NullBody is an optional power of a [Fixture]: the broker tells a null body
// or key from an empty one.
type NullBody interface{ NullBody() }

// Revoker is an optional power of a [Fixture]: claims of src's deliveries can
// be taken away, as a rebalance or the end of AckWait does. It returns when
// the deliveries that are unsettled are lost.
type Revoker interface {
	Revoke(t testing.TB, src brokers.Source)
}

// Slow is an optional power of a [Fixture]: how long a delivery is held to show that
// signs of life keep it, such as three times that after which the broker gives it to
// another source if there are none.
type Slow interface{ HoldFor() time.Duration }

// AckLoser is an optional power of a [Fixture]: from now on the broker does not
// hear of what is acknowledged by src, and src does not know that.
type AckLoser interface {
	LoseAcks(t testing.TB, src brokers.Source)
}

// Restarter is an optional power of a [Fixture]: the broker is killed, without a
// chance to say or write anything, and started again with what it had written. It is back, or coming
// back, when Restart returns.
type Restarter interface{ Restart(t testing.TB) }

// Stopper is an optional power of a [Fixture] whose broker is its own: it stops to
// serve, for good.
type Stopper interface{ Stop(t testing.TB) }

// Widener is an optional power of a [Fixture] of a broker with lanes: it returns
// a topic of so many of them.
type Widener interface {
	Widen(t testing.TB, lanes int) Fixture
}

// Case is one case of the suite.
type Case struct {
	Name string
	Func func(t testing.TB, f Fixture)

	kills bool // needs a Restarter
}

// Run runs every case on a broker of its own.
func Run(t *testing.T, open func(t testing.TB) Fixture) {
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) { c.Func(t, open(t)) })
	}
}

// RunRestart runs the cases that need a [Restarter], each on what open returns. It
// is for a suite whose broker is shared, and so must not be killed for one case.
func RunRestart(t *testing.T, open func(t testing.TB) Fixture) {
	for _, c := range Cases() {
		if c.kills {
			t.Run(c.Name, func(t *testing.T) { c.Func(t, open(t)) })
		}
	}
}

// Cases returns the cases of the suite.
func Cases() []Case {
	return []Case{
		{Name: "what is published is received", Func: roundTrip},
		{Name: "headers keep order, case and repetition", Func: headers},
		{Name: "null and empty are kept apart", Func: nullBody},
		{Name: "a body of almost 1 MiB passes", Func: largeBody},
		{Name: "what is acknowledged does not come back", Func: ackedStays},
		{Name: "what is not settled comes back", Func: unsettledComesBack},
		{Name: "what is returned comes back", Func: returnedComesBack},
		{Name: "a failed one comes back after the wait", Func: nackedComesBack},
		{Name: "B16 a later ack does not cover an earlier delivery", Func: laterAck},
		{Name: "every event is received, in the order of its key", Func: manyInOrder},
		{Name: "two sources of a group share the work", Func: sharing},
		{Name: "two groups get everything", Func: groups},
		{Name: "receive ends with its context", Func: receiveContext},
		{Name: "receive after close", Func: receiveAfterClose},
		{Name: "close with deliveries in hand", Func: closeBusy},
		{Name: "B21 a lost delivery is not settled", Func: lost},
		{Name: "B20 a slow handler keeps its delivery", Func: slow},
		{Name: "B22 an acknowledgement that gets lost", Func: lostAck},
		{Name: "a broker that is killed loses nothing", Func: restart, kills: true},
		{Name: "prefetch is bounded", Func: prefetch},
		{Name: "lanes that are held leave the others theirs", Func: heldLanes},
		{Name: "B40 an oversized message harms nobody else", Func: oversized},
		{Name: "a missing topic is told", Func: missingTopic},
		{Name: "what follows a failed message of its key is not sent", Func: blocked},
		{Name: "publish after close", Func: publishAfterClose},
		{Name: "a publisher that can be asked says that the broker serves", Func: probe},
		{Name: "publish with a context that is done", Func: publishDone},
	}
}

// patience is how long a case waits for what must come.
var patience = 30 * time.Second

// SetPatience replaces how long the cases wait for what must come, 30 s. It is
// for tests of the suite itself, in which what must come never does.
func SetPatience(d time.Duration) { patience = d }

// Event returns message number n of a key, for topic.
func Event(topic, key string, n int) *envelope.Message {
	m := &envelope.Message{ID: fmt.Sprintf("%s-%d", key, n), Source: "/brokertest", Type: "test.event", Topic: topic,
		ContentType: "text/plain", Body: fmt.Appendf(nil, "%s-%d", key, n)}
	if key != "" {
		m.Key = []byte(key)
	}
	return m
}

func publish(t testing.TB, p brokers.Publisher, msgs ...*envelope.Message) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := p.Publish(ctx, msgs).Err(); err != nil {
		t.Fatalf("publish: %v", err)
	}
}

// events publishes n events, round robin over keys.
func events(t testing.TB, f Fixture, n int, keys ...string) {
	t.Helper()
	var msgs []*envelope.Message
	for i := range n {
		msgs = append(msgs, Event(f.Topic(), keys[i%len(keys)], i/len(keys)))
	}
	publish(t, f.Publisher(t), msgs...)
}

// next receives one delivery.
func next(t testing.TB, src brokers.Source) *brokers.Delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	d, err := src.Receive(ctx)
	if err != nil {
		t.Fatalf("receive: %v", err)
	}
	return d
}

// none fails the test if a delivery comes within d.
func none(t testing.TB, src brokers.Source, d time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	got, err := src.Receive(ctx)
	if err == nil {
		t.Errorf("received %s, which should not come", id(t, got))
	} else if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("receive: %v, want the context's error", err)
	}
}

func ack(t testing.TB, src brokers.Source, d *brokers.Delivery) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := src.Ack(ctx, d); err != nil {
		t.Fatalf("ack %s: %v", d.Message.Position, err)
	}
}

func closeSource(t testing.TB, src brokers.Source) {
	t.Helper()
	if err := src.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
}

// id is the id of the event that a delivery carries.
func id(t testing.TB, d *brokers.Delivery) string {
	t.Helper()
	m, err := envelope.Decode(d.Message)
	if err != nil {
		t.Fatalf("decode %s: %v", d.Message.Position, err)
	}
	return m.ID
}

// settledOnce acknowledges deliveries from several sources until want events
// have been seen, and returns the ids in the order of first receipt, by source.
func settledOnce(t testing.TB, want int, srcs ...brokers.Source) [][]string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var mu sync.Mutex
	seen := map[string]bool{}
	out := make([][]string, len(srcs))
	var wg sync.WaitGroup
	for i, src := range srcs {
		wg.Go(func() {
			for {
				d, err := src.Receive(ctx)
				if err != nil {
					return
				}
				m, err := envelope.Decode(d.Message)
				if err != nil {
					t.Errorf("decode: %v", err)
					return
				}
				if err := src.Ack(ctx, d); err != nil && !errors.Is(err, brokers.ErrLost) && ctx.Err() == nil {
					t.Errorf("ack: %v", err)
				}
				mu.Lock()
				if !seen[m.ID] {
					seen[m.ID] = true
					out[i] = append(out[i], m.ID)
				}
				done := len(seen) == want
				mu.Unlock()
				if done {
					cancel()
				}
			}
		})
	}
	wg.Wait()
	if len(seen) != want {
		t.Fatalf("%d events received within %v, want %d", len(seen), patience, want)
	}
	return out
}
