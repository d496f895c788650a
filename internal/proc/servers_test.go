package proc_test

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/unecho/unecho/internal/proc"
)

// Every server must survive a SIGKILL on the same port with the same data.
func TestServersSurviveKill(t *testing.T) {
	for name, start := range map[string]func(testing.TB) *proc.Server{
		"nats": proc.StartNATS, "redis": func(t testing.TB) *proc.Server { return proc.StartRedis(t) }, "postgres": proc.StartPostgres, "kafka": proc.StartKafka,
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t)
			s.Kill()
			if c, err := net.DialTimeout("tcp", s.Addr, time.Second); err == nil {
				_ = c.Close()
				t.Error("it still listens after Kill")
			}
			s.Restart()
		})
	}
}

// A node of a cluster that was killed comes back to it.
func TestClustersSurviveKill(t *testing.T) {
	for name, start := range map[string]func(testing.TB) []*proc.Server{"nats": proc.StartNATSCluster, "kafka": proc.StartKafkaCluster} {
		t.Run(name, func(t *testing.T) {
			nodes := start(t)
			nodes[1].Kill()
			nodes[0].Ready()
			nodes[1].Restart()
		})
	}
}

func TestPostgresKeepsItsData(t *testing.T) {
	s := proc.StartPostgres(t)
	do := func(sql string) {
		t.Helper()
		conn, err := pgx.Connect(t.Context(), s.URL)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close(context.Background()) }()
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	do("create table kept (x int)")
	s.Kill()
	s.Restart()
	do("insert into kept values (1)")
}

func TestStopFreezes(t *testing.T) {
	p := proc.Start(t, nil, "sh", "-c", "while :; do echo tick; sleep 0.01; done")
	p.WaitFor(t, "tick", 5*time.Second)
	p.Stop()
	p.Cont()
	if err := p.Term(5 * time.Second); err == nil {
		t.Error("a shell that was ended by a signal reports success")
	}
}
