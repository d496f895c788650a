package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

// B15: PostgreSQL is killed while messages wait, and the worker as well. Nothing is
// acknowledged as long as it is away, nobody's attempts are spent, and when it is
// back every message has its effect once.
func TestB15StoreIsAway(t *testing.T) {
	onBrokers(t, func(t *testing.T, l *line) {
		const orders = 20
		server := proc.StartPostgres(t)
		s := openShopAt(t, server.URL, l.topic)
		program, env := proc.Build(t, "./internal/e2e/worker"), l.worker(server.URL, "WORKER_ORDER=none")
		server.Kill()
		l.place(t, orders)
		worker := proc.Start(t, env, program)
		worker.WaitFor(t, "worker: pause", 60*time.Second)
		worker.Kill()
		if n := l.unsettled(); n != orders {
			t.Errorf("%d messages are not settled while the store is away, want %d", n, orders)
		}
		worker = proc.Start(t, env, program)
		worker.WaitFor(t, "worker: pause", 60*time.Second)
		if n := l.unsettled(); n != orders {
			t.Errorf("%d messages are not settled while the store is away, want %d", n, orders)
		}
		server.Restart()
		testenv.Within(t, 60*time.Second, "all effects are there", func() bool { return s.effects() >= orders })
		testenv.Within(t, 30*time.Second, "all is acknowledged", func() bool { return l.unsettled() == 0 })
		if err := worker.Term(30 * time.Second); err != nil {
			t.Errorf("after SIGTERM: %v", err)
		}
		if out := worker.Output(); strings.Contains(out, "dead letter") {
			t.Errorf("an outage has made dead letters:\n%s", out)
		}
		s.each(orders)
	})
}

// B23: the worker is killed in the middle of a handler that takes half a minute.
// Another one has the message as soon as the heartbeats are missed, and the key as
// soon as the database has noticed: at once if the transaction was idle, and
// after client_connection_check_interval if a statement was running.
func TestB23KilledInASlowHandler(t *testing.T) {
	for name, c := range map[string]struct{ settings, env string }{
		"in the process": {"", "WORKER_SLOW_STATEMENT="},
		"in a statement": {"&client_connection_check_interval=500", "WORKER_SLOW_STATEMENT=yes"},
	} {
		t.Run(name, func(t *testing.T) {
			l := natsLine(t)
			s := openShop(t, l.topic)
			program, env := proc.Build(t, "./internal/e2e/worker"), l.worker(s.url+c.settings, c.env)
			l.place(t, 1)
			slow := proc.Start(t, append(env, "WORKER_SLOW=30s"), program)
			slow.WaitFor(t, "ran order-0", 60*time.Second)
			other := proc.Start(t, env, program)
			other.WaitFor(t, "worker runs", 60*time.Second)
			slow.Kill()
			testenv.Within(t, 15*time.Second, "the other worker has done it", func() bool { return s.effects() == 1 })
			testenv.Within(t, 15*time.Second, "it is acknowledged", func() bool { return l.unsettled() == 0 })
			s.each(1)
		})
	}
}
