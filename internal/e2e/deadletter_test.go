package e2e

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
)

// B52: the dead-letter topic is not there when it is needed. The message stays where it is and
// its handler is not run again, until somebody has made the topic; then it has one
// copy with the original bytes, and is acknowledged.
func TestB52DeadLettersWaitForTheirTopic(t *testing.T) {
	onBrokers(t, func(t *testing.T, l *line) {
		s := openShop(t, l.topic)
		l.place(t, 3)
		var runs, refused atomic.Int64
		h := consumer.Wrap("e2e", pgdedupe.NewStore(s.pool, nil), func(ctx context.Context, tx pgx.Tx, m *envelope.Message) error {
			if m.ID == "order-1" {
				runs.Add(1)
				return consumer.Permanent(fmt.Errorf("no such customer"))
			}
			return effect(ctx, tx, m)
		}, nil)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		consumed := make(chan error, 1)
		go func() {
			consumed <- consumer.Run(ctx, l.source(t), h, &consumer.RunOptions{DeadLetter: consumer.DeadLetterTo(l.pub, l.graves), AcceptShortRetention: true,
				Observer: consumer.ObserverFunc(func(_ context.Context, e consumer.Event) {
					if e.Step == consumer.StepDeadLetter && e.Err != nil {
						refused.Add(1)
					}
				})})
		}()
		testenv.Within(t, 60*time.Second, "the others are done, and the dead letter was refused", func() bool { return s.effects() == 2 && refused.Load() >= 2 })
		if n := l.unsettled(); n == 0 {
			t.Error("all is acknowledged, and there is no dead letter")
		}
		l.create(t)
		testenv.Within(t, 60*time.Second, "all is acknowledged", func() bool { return l.unsettled() == 0 })
		cancel()
		if err := <-consumed; err != nil {
			t.Error(err)
		}
		if n := runs.Load(); n != 1 {
			t.Errorf("the handler has run %d times, want once", n)
		}
		l.wantDead(t)
	})
}

// wantDead demands one dead letter, whole and with its reason.
func (l *line) wantDead(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	src := l.reader(t)
	d, err := src.Receive(ctx)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{consumer.HeaderDeadReason: "permanent", consumer.HeaderDeadError: "no such customer", consumer.HeaderDeadAttempts: "1", "id": "order-1"}
	m, err := envelope.Decode(d.Message)
	if err != nil {
		t.Fatalf("the dead letter is no event any more: %v", err)
	}
	for name, value := range want {
		got := m.ID
		if name != "id" {
			v, _ := d.Message.Header.Get(name)
			got = string(v)
		}
		if got != value {
			t.Errorf("%s is %q, want %q", name, got, value)
		}
	}
	if string(m.Body) != `{"customer":1,"id":"order-1","seq":1}` {
		t.Errorf("the body is %s", m.Body)
	}
	if err := src.Ack(ctx, d); err != nil {
		t.Error(err)
	}
	short, end := context.WithTimeout(ctx, 500*time.Millisecond)
	defer end()
	if d, err := src.Receive(short); err == nil {
		t.Errorf("a second dead letter: %s", d.Message.Body)
	}
}
