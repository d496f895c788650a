package natsbroker

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

// ledger is what a load knows: the events that the server has acknowledged, and
// those that were received, with the time of the latest receipt.
type ledger struct {
	mu       sync.Mutex
	accepted map[string]bool
	received map[string]int
	latest   time.Time
}

func (l *ledger) accept(msgs []*envelope.Message, res brokers.Results) (open []*envelope.Message) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, m := range msgs {
		if res[i] != nil {
			open = append(open, m)
			continue
		}
		l.accepted[m.ID] = true
	}
	return open
}

func (l *ledger) receive(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.received[id]++
	l.latest = time.Now()
}

func (l *ledger) missing() (n, of int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id := range l.accepted {
		if l.received[id] == 0 {
			n++
		}
	}
	return n, len(l.accepted)
}

func (l *ledger) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.received)
}

func (l *ledger) after(at time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.latest.After(at)
}

// publish publishes event after event, and what failed again, until ctx is done.
func (l *ledger) publish(ctx context.Context, p brokers.Publisher, topic string) {
	n := 0
	var batch []*envelope.Message
	for ctx.Err() == nil {
		for len(batch) < 20 {
			batch = append(batch, &envelope.Message{ID: fmt.Sprint(n), Source: "/load", Type: "load.event", Topic: topic})
			n++
		}
		attempt, cancel := context.WithTimeout(ctx, 2*time.Second)
		res := p.Publish(attempt, batch)
		cancel()
		if batch = l.accept(batch, res); len(batch) > 0 {
			select {
			case <-ctx.Done():
			case <-time.After(20 * time.Millisecond): // back-off
			}
		}
	}
}

// consume acknowledges what comes until ctx is done.
func (l *ledger) consume(ctx context.Context, t testing.TB, s *Source) {
	for {
		d, err := s.Receive(ctx)
		if err != nil {
			if ctx.Err() == nil {
				t.Errorf("receive: %v", err)
			}
			return
		}
		m, err := envelope.Decode(d.Message)
		if err != nil {
			t.Errorf("decode: %v", err)
			return
		}
		l.receive(m.ID)
		_ = s.Ack(ctx, d) // an acknowledgement that got lost brings it back
	}
}

// A server that is killed and started again under load loses nothing that it
// acknowledged, and consumption is back within 3 s.
func TestServerKilledUnderLoad(t *testing.T) {
	server := proc.StartNATS(t)
	f := open(t, server.URL)
	l := &ledger{accepted: map[string]bool{}, received: map[string]int{}}
	s := f.source(t, f.config("g"))
	p := f.Publisher(t)
	publishing, stop := context.WithCancel(t.Context())
	consuming, end := context.WithCancel(t.Context())
	var publisher, consumer sync.WaitGroup
	defer func() { stop(); end(); publisher.Wait(); consumer.Wait() }()
	publisher.Go(func() { l.publish(publishing, p, f.Topic()) })
	consumer.Go(func() { l.consume(consuming, t, s) })
	for i := range 3 {
		before := l.count()
		testenv.Within(t, 20*time.Second, "load flows", func() bool { return l.count() > before+200 })
		server.Kill()
		server.Restart()
		serves := time.Now()
		testenv.Within(t, 20*time.Second, "consumption is back", func() bool { return l.after(serves) })
		took := time.Since(serves)
		t.Logf("restart %d: consumption back after %v", i+1, took.Round(time.Millisecond))
		if took > 3*time.Second {
			t.Errorf("restart %d: consumption back after %v, want at most 3 s", i+1, took)
		}
	}
	stop()
	publisher.Wait()
	testenv.Within(t, 20*time.Second, "every acknowledged event is received", func() bool { n, _ := l.missing(); return n == 0 })
	_, of := l.missing()
	t.Logf("%d events acknowledged, %d received", of, l.count())
}
