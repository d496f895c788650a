// Package walk prints the way of one message through the code.
package walk

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/sqlitetest"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/sqloutbox"
)

// steps collects and prints what the observers of relay and consumer are told.
type steps struct {
	t    *testing.T
	mu   sync.Mutex
	seen []string
	acks chan struct{}
}

func (s *steps) add(where, what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, what)
	s.t.Logf("%2d  %-30s %s", len(s.seen), what, where)
}

func (s *steps) relay(_ context.Context, e outbox.Event) {
	s.add(map[outbox.Step]string{
		outbox.StepLease:   "outbox.Relay.Step → Store.Acquire",
		outbox.StepRead:    "outbox.Relay.Step → Store.Read",
		outbox.StepPublish: "outbox.Relay.Step → brokers.Publisher.Publish",
		outbox.StepSettle:  "outbox.Relay.Step → Store.Settle",
	}[e.Step], "relay: "+string(e.Step))
}

func (s *steps) consumer(_ context.Context, e consumer.Event) {
	what := "consumer: " + string(e.Step)
	if e.Step == consumer.StepDecide {
		what += ", " + e.Outcome.String()
	}
	s.add(map[consumer.Step]string{
		consumer.StepReceive:  "consumer.Run → brokers.Source.Receive → lane → job.handle",
		consumer.StepIdentify: "consumer.Wrap → envelope.Extractor.Identify, Decode",
		consumer.StepHandle:   "dedupe.Store.Once → TxDriver.Begin has claimed the key → your handler",
		consumer.StepDecide:   "dedupe.Store.Once → TxDriver.Commit, or the record of the winner",
		consumer.StepAck:      "consumer.Run → brokers.Source.Ack",
	}[e.Step]+"  "+e.Position, what)
	if e.Step == consumer.StepAck {
		s.acks <- struct{}{}
	}
}

// TestWalk is what `make walk` runs: one order, told of once, delivered twice.
func TestWalk(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s := &steps{t: t, acks: make(chan struct{}, 2)}

	db := sqlitetest.Open(t)
	if err := sqloutbox.Migrate(ctx, db); err != nil {
		t.Fatal(err)
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	event := &envelope.Message{Source: "/shop", Type: "order.placed", Topic: "orders", Key: []byte("c1"), Body: []byte("{}")}
	if err := sqloutbox.NewWriter(nil).Write(ctx, tx, event); err != nil {
		t.Fatal(err)
	}
	s.add("outbox.Writer.Write, in the business transaction", "app: write")
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	s.add("the business transaction commits", "app: commit")

	broker := membroker.New()
	broker.CreateTopic("orders", 1)
	broker.SetFaults(membroker.Faults{Twice: func(*envelope.Message) bool { return true }})
	relay := outbox.NewRelay(sqloutbox.NewStore(db), broker.Publisher(), &outbox.RelayOptions{Observer: outbox.ObserverFunc(s.relay)})
	if _, err := relay.Step(ctx); err != nil {
		t.Fatal(err)
	}

	handler := consumer.Wrap("billing", memdedupe.NewStore(nil),
		func(context.Context, *memdedupe.Tx, *envelope.Message) error { return nil }, nil)
	done := make(chan error, 1)
	go func() {
		done <- consumer.Run(ctx, broker.Source("orders", "g"), handler, &consumer.RunOptions{
			DeadLetter: consumer.Discard, Observer: consumer.ObserverFunc(s.consumer), Concurrency: 1})
	}()
	for range 2 {
		select {
		case <-s.acks:
		case <-time.After(10 * time.Second):
			t.Fatal("not acknowledged")
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	want := []string{
		"app: write", "app: commit", "relay: lease", "relay: read", "relay: publish", "relay: settle",
		"consumer: receive", "consumer: receive", // the second one waits in the lane
		"consumer: identify", "consumer: handle", "consumer: decide, processed", "consumer: ack",
		"consumer: identify", "consumer: decide, duplicate", "consumer: ack",
	}
	got := slices.Clone(s.seen)
	// When the second copy is received depends on the scheduler.
	for _, steps := range []*[]string{&got, &want} {
		i := slices.Index(*steps, "consumer: receive")
		rest := slices.DeleteFunc((*steps)[i+1:], func(s string) bool { return s == "consumer: receive" })
		*steps = append((*steps)[:i+1], rest...)
	}
	if !slices.Equal(got, want) {
		t.Errorf("the way was\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	fmt.Println("one event, two deliveries, one effect")
}
