package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

// B54: 50 messages, 8 workers, handlers of half a second, and SIGTERM in the middle. What
// runs is finished and acknowledged, the rest is handed back, and the next
// process runs just that: 50 runs in all.
func TestB54Shutdown(t *testing.T) {
	onBrokers(t, func(t *testing.T, l *line) {
		const orders = 50
		s := openShop(t, l.topic)
		program, env := proc.Build(t, "./internal/e2e/worker"), l.worker(s.url, "WORKER_ORDER=none", "WORKER_SLOW=500ms")
		l.place(t, orders)
		first := proc.Start(t, env, program)
		testenv.Within(t, 60*time.Second, "some are done", func() bool { return s.effects() >= 5 })
		if err := first.Term(10 * time.Second); err != nil {
			t.Errorf("after SIGTERM: %v\n%s", err, first.Output())
		}
		if done := s.effects(); done >= orders {
			t.Fatalf("all %d were done before the signal: nothing was shown", done)
		}
		second := proc.Start(t, env, program)
		testenv.Within(t, 60*time.Second, "all effects are there", func() bool { return s.effects() >= orders })
		testenv.Within(t, 30*time.Second, "all is acknowledged", func() bool { return l.unsettled() == 0 })
		if err := second.Term(10 * time.Second); err != nil {
			t.Errorf("after SIGTERM: %v", err)
		}
		if runs := strings.Count(first.Output()+second.Output(), "ran order-"); runs != orders {
			t.Errorf("%d runs of the handler, want %d", runs, orders)
		}
		s.each(orders)
	})
}

// B54: a second signal ends the process at once, and the message comes again.
func TestB54SecondSignal(t *testing.T) {
	l := natsLine(t)
	s := openShop(t, l.topic)
	program, env := proc.Build(t, "./internal/e2e/worker"), l.worker(s.url)
	l.place(t, 1)
	worker := proc.Start(t, append(env, "WORKER_SLOW=30s"), program)
	worker.WaitFor(t, "ran order-0", 60*time.Second)
	if err := worker.Term(time.Millisecond); err == nil {
		t.Fatal("the first signal has ended the process in the middle of a handler")
	}
	worker.WaitFor(t, "worker drains", 30*time.Second)
	if err := worker.Term(5 * time.Second); err == nil || !strings.Contains(err.Error(), "terminated") {
		t.Errorf("after the second signal: %v, want the end by it", err)
	}
	again := proc.Start(t, env, program)
	testenv.Within(t, 30*time.Second, "it is done by the next one", func() bool { return s.effects() == 1 })
	testenv.Within(t, 15*time.Second, "it is acknowledged", func() bool { return l.unsettled() == 0 })
	if err := again.Term(10 * time.Second); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	s.each(1)
}
