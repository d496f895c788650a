package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/pgparking"
	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

const (
	loopOrders = 60
	loopFatal  = "order-20"
	loopStarts = 3 // CrashLoop.Max, by default
)

// One order ends the consumer's process by SIGKILL whenever it is handled, in the
// middle of its transaction and beside others. Whoever starts the process again and again
// gets all the others done once, and that one parked after three deaths.
func TestKafkaCrashLoop(t *testing.T) {
	crashLoop(t, kafkaLine(t, 2))
}

// TestNATSCrashLoop is the same without any order.
func TestNATSCrashLoop(t *testing.T) {
	crashLoop(t, natsLine(t), "WORKER_ORDER=none")
}

// TestNATSCrashLoopGroups is the same in groups: those that share the
// transaction with the culprit die with it.
func TestNATSCrashLoopGroups(t *testing.T) {
	crashLoop(t, natsLine(t), "WORKER_ORDER=none", "WORKER_BATCH=8")
}

func crashLoop(t *testing.T, l *line, env ...string) {
	s := openShop(t, l.topic)
	if err := pgparking.Migrate(t.Context(), s.pool, nil); err != nil {
		t.Fatal(err)
	}
	l.place(t, loopOrders)
	program := proc.Build(t, "./internal/e2e/worker")
	env = l.worker(s.url, append(env, "WORKER_FATAL="+loopFatal)...)
	lot := pgparking.NewLot(s.pool, nil)
	parked := func() []*consumer.Parked {
		page, err := lot.List(t.Context(), consumer.ParkedFilter{})
		if err != nil {
			t.Fatal(err)
		}
		return page.Records
	}
	deaths := 0
	worker := proc.Start(t, env, program)
	testenv.Within(t, 120*time.Second, "all is done or parked", func() bool {
		select {
		case <-worker.Exited():
			if n := len(parked()); n != 0 {
				t.Fatalf("the process ended with %d messages parked", n)
			}
			deaths++
			worker = proc.Start(t, env, program)
		default:
		}
		return len(parked()) > 0 && s.effects() >= loopOrders-1
	})
	if err := worker.Term(30 * time.Second); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	if p := parked(); deaths != loopStarts || len(p) != 1 || p[0].Reason != consumer.ReasonCrashLoop {
		t.Errorf("%d deaths, want %d; parked %+v, want one, for %s", deaths, loopStarts, p, consumer.ReasonCrashLoop)
	} else if p, err := lot.Find(t.Context(), p[0].ID); err != nil || !strings.Contains(string(p.Message.Body), `"`+loopFatal+`"`) {
		t.Errorf("parked %+v, %v, want %s", p, err, loopFatal)
	}
	for what, sql := range map[string]string{
		"orders with an effect":     "select count(distinct order_id) from effects where order_id <> '" + loopFatal + "'",
		"effects":                   "select count(*) from effects",
		"balances of the customers": "select sum(balance) from customers",
	} {
		if n := s.count(sql); n != loopOrders-1 {
			t.Errorf("%s: %d, want %d", what, n, loopOrders-1)
		}
	}
	if n := s.count("select count(*) from unecho_start"); n != 0 {
		t.Errorf("%d starts have no end, though all is settled", n)
	}
	t.Logf("CRASHLOOP %s: orders=%d effects=%d deaths=%d", t.Name(), loopOrders, s.effects(), deaths)
}
