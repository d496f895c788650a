// Package outboxtest is the conformance suite of outbox stores: [Run] shows
// that a store, with a relay on it, keeps the promises of package outbox.
package outboxtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox"
)

// Fixture is one empty outbox in a real database.
type Fixture interface {
	// Store returns the relay's side, a value of its own at each call.
	Store(t testing.TB) outbox.Store
	// Begin opens a business transaction.
	Begin(t testing.TB) Tx
}

// Tx is a business transaction.
type Tx interface {
	Write(msgs ...*envelope.Message) error
	Commit() error
	Rollback() error
}

// Overlapping is an optional power of a [Fixture]: write transactions can be
// open side by side.
type Overlapping interface {
	// TakeID makes tx a writing transaction in the eyes of the database,
	// without touching the outbox.
	TakeID(t testing.TB, tx Tx)
	// Lock takes a lock that serialises the transactions which take it.
	Lock(t testing.TB, tx Tx)
}

// Case is one case of the suite.
type Case struct {
	Name string
	Func func(t testing.TB, f Fixture)
}

// Run runs every case on an outbox of its own.
func Run(t *testing.T, open func(t testing.TB) Fixture) {
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) { c.Func(t, open(t)) })
	}
}

// Cases returns the cases of the suite.
func Cases() []Case {
	return []Case{
		{"committed rows are published once", committedOnce},
		{"rolled-back rows never are", rolledBack},
		{"B07 B14 every byte arrives", fidelity},
		{"order of a key is kept", orderOfKey},
		{"B39 a failed head blocks its key only", failedHead},
		{"rows without a key block nothing", unkeyed},
		{"B40 a rejected row is parked at once", rejected},
		{"a parked head blocks its key until it is requeued", parkedHead},
		{"a parked head can be dropped", droppedHead},
		{"a parked head can be passed", skippedHead},
		{"a passed row comes back to its place", requeuedInPlace},
		{"a passed row comes back in front of a parked one", requeuedBeforeParked},
		{"a row goes with its head", goesWithItsHead},
		{"B06 a key of any length keeps its order", longKeys},
		{"an empty key is a key", emptyKey},
		{"a refused row is parked when its attempts are spent", attemptsSpent},
		{"B42 an outage spends no attempts", outageSpendsNothing},
		{"a missing topic holds its own rows", missingTopic},
		{"a topic that is down leaves the others theirs", downTopic},
		{"held rows that stay due leave room for the others", heldLeaveRoom},
		{"a lost answer is published again", lostAnswer},
		{"a batch is bounded in bytes", bytesBounded},
		{"the lease is renewed during a read", renewDuringRead},
		{"B43 a crash before settle repeats and loses nothing", crashBeforeSettle},
		{"B43 one lease, rising epochs, no mark by the old holder", lease},
		{"a stopped relay gives its lease up", release},
		{"stopping makes no duplicate", stopping},
		{"pruning spares what is not settled", pruning},
		{"any history keeps its promises", histories},
		{"a backlog drains", backlog},
		{"B36 a late commit is published late", lateCommit},
		{"B46 pruning spares a late commit", pruneLateCommit},
		{"B38 a long writer elsewhere stalls nothing", longWriter},
		{"a writer that began first and wrote second stays second", beganFirst},
	}
}

// Broker is a publisher that remembers what it took, and fails on demand. It
// keeps the contract of brokers.Publisher.
type Broker struct {
	mu sync.Mutex
	// Answer decides about a message; nil takes everything. It is called in
	// order, under a lock.
	Answer func(m *envelope.Message) error
	taken  []*envelope.Message
}

// Publish implements brokers.Publisher.
func (b *Broker) Publish(ctx context.Context, msgs []*envelope.Message) brokers.Results {
	b.mu.Lock()
	defer b.mu.Unlock()
	res := make(brokers.Results, len(msgs))
	failed := map[string]bool{}
	for i, m := range msgs {
		key := m.Topic + "\x00" + string(m.Key)
		switch {
		case ctx.Err() != nil:
			res[i] = brokers.ErrUnknown
		case m.Key != nil && failed[key]:
			res[i] = brokers.ErrBlocked
		case b.Answer != nil:
			res[i] = b.Answer(m)
		}
		if res[i] == nil {
			b.taken = append(b.taken, m.Clone())
		}
		failed[key] = failed[key] || m.Key != nil && res[i] != nil
	}
	return res
}

// Close implements brokers.Publisher.
func (b *Broker) Close() error { return nil }

// IDs returns the ids of what was taken, in order.
func (b *Broker) IDs() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	ids := make([]string, len(b.taken))
	for i, m := range b.taken {
		ids[i] = m.ID
	}
	return ids
}

// SetAnswer replaces Answer.
func (b *Broker) SetAnswer(f func(m *envelope.Message) error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.Answer = f
}

// Event returns a message to topic t.
func Event(id, key string) *envelope.Message {
	m := &envelope.Message{ID: id, Source: "/test", Type: "test", Topic: "t", Body: []byte(id), Time: time.Unix(1700000000, 0)}
	if key != "" {
		m.Key = []byte(key)
	}
	return m
}

// commit writes msgs in a transaction of their own.
func commit(t testing.TB, f Fixture, msgs ...*envelope.Message) {
	t.Helper()
	tx := f.Begin(t)
	if err := tx.Write(msgs...); err != nil {
		t.Fatalf("write: %v", err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatalf("commit: %v", err)
	}
}

// quick are options under which a held row is due again at once.
func quick() *outbox.RelayOptions {
	return &outbox.RelayOptions{Backoff: time.Millisecond, MaxBackoff: time.Millisecond, Lease: 30 * time.Second}
}

// until steps until ok, and fails the test if that takes too long. Errors of
// a step are expected: the broker fails on purpose.
func until(t testing.TB, r *outbox.Relay, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(5 * time.Second)
	var last error
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not reached: %s (last error: %v)", what, last)
		}
		if _, err := r.Step(context.Background()); err != nil {
			last = err
		}
	}
}

// drain steps until a step has nothing to do.
func drain(t testing.TB, r *outbox.Relay) {
	t.Helper()
	for range 1000 {
		n, err := r.Step(context.Background())
		if err != nil {
			t.Fatalf("step: %v", err)
		}
		if n == 0 {
			return
		}
	}
	t.Fatal("1000 steps, and there are still rows to settle")
}

func expect(t testing.TB, b *Broker, want ...string) {
	t.Helper()
	if got := b.IDs(); !slices.Equal(got, want) {
		t.Errorf("published %q, want %q", got, want)
	}
}

// firsts returns the ids without their repetitions.
func firsts(ids []string) []string {
	var out []string
	for _, id := range ids {
		if !slices.Contains(out, id) {
			out = append(out, id)
		}
	}
	return out
}

// ofKey returns the ids that begin with a prefix.
func ofKey(ids []string, prefix string) []string {
	return slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return len(id) < len(prefix) || id[:len(prefix)] != prefix })
}

var errRefused = errors.New("refused for a reason that no class covers")

func names(prefix string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("%s%d", prefix, i)
	}
	return out
}
