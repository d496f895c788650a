package proc

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/unecho/unecho/internal/testenv"
)

// Server is a server of a test's own, on a port and in a data folder that
// stay when it is killed and started again.
type Server struct {
	// Addr is host:port; URL is what a client wants.
	Addr, URL string
	*Process
	start func() *Process
	probe func(context.Context) error
	t     testing.TB
}

// Restart starts the server again after Kill, and waits until it serves.
func (s *Server) Restart() {
	s.t.Helper()
	s.Process = s.start()
	s.Ready()
}

// Boot starts the server again after Kill, and does not wait.
func (s *Server) Boot() { s.Process = s.start() }

// Ready waits until the server serves.
func (s *Server) Ready() {
	s.t.Helper()
	ready(s.t, s.Process, 60*time.Second, s.probe)
}

// freePort is a port that nobody listens on. It is below those that the kernel
// gives to outgoing connections: one of them could have it by the time that the server
// is started, or while it is down.
func freePort(t testing.TB) int {
	t.Helper()
	for range 100 {
		port := 20000 + rand.N(12000)
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue
		}
		_ = l.Close()
		return port
	}
	t.Fatal("there is no free port")
	return 0
}

// postgresDir is a folder that the user postgres can reach, which one below the
// test's folder need not be, and the words that make a command run as that user.
func postgresDir(t testing.TB) (dir string, as []string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "unecho-pg-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir, postgresUser(t, dir)
}

// StartPostgres starts a PostgreSQL server with a database of its own.
func StartPostgres(t testing.TB) *Server {
	t.Helper()
	dir, as := postgresDir(t)
	data := filepath.Join(dir, "data")
	run(t, as[0], append(as[1:], filepath.Join(testenv.Get(t, "UNECHO_PG_BIN"), "initdb"), "-D", data, "-U", "unecho", "--auth=trust", "-E", "UTF8", "--locale=C", "--no-sync")...)
	return startPostgres(t, as, data)
}

// StartStandby starts a standby of a server that StartPostgres has started. It
// follows until `select pg_promote()`.
func StartStandby(t testing.TB, primary *Server) *Server {
	t.Helper()
	dir, as := postgresDir(t)
	data := filepath.Join(dir, "data")
	run(t, as[0], append(as[1:], filepath.Join(testenv.Get(t, "UNECHO_PG_BIN"), "pg_basebackup"), "-d", primary.URL, "-D", data, "-R", "-X", "stream", "-c", "fast")...)
	return startPostgres(t, as, data)
}

func startPostgres(t testing.TB, as []string, data string) *Server {
	t.Helper()
	bin, port := testenv.Get(t, "UNECHO_PG_BIN"), freePort(t)
	s := &Server{t: t, Addr: fmt.Sprint("127.0.0.1:", port), URL: fmt.Sprintf("postgres://unecho@127.0.0.1:%d/postgres?sslmode=disable", port)}
	s.start = func() *Process {
		return Start(t, nil, as[0], append(as[1:], filepath.Join(bin, "postgres"), "-D", data, "-p", strconv.Itoa(port),
			"-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "max_prepared_transactions=5", "-c", "max_connections=100")...)
	}
	s.probe = s.probePostgres
	s.Restart()
	return s
}

// probePostgres reports whether what speaks PostgreSQL's protocol at URL serves.
func (s *Server) probePostgres(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, s.URL)
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

// postgresUser returns the words in front of a command that make it run as an
// unprivileged user: PostgreSQL refuses root. setpriv, unlike su, stays the
// same process, so that signals reach the server.
func postgresUser(t testing.TB, dir string) []string {
	t.Helper()
	if os.Getuid() != 0 {
		return []string{"env"}
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		t.Fatalf("running as root and there is no user postgres: %v", err)
	}
	uid, _ := strconv.Atoi(u.Uid)
	gid, _ := strconv.Atoi(u.Gid)
	if err := os.Chown(dir, uid, gid); err != nil {
		t.Fatal(err)
	}
	return []string{"setpriv", "--pdeathsig=KILL", "--reuid=" + u.Uid, "--regid=" + u.Gid, "--clear-groups", "--"}
}

// StartPgBouncer starts a PgBouncer in transaction mode in front of the server
// that a URL names. Its URL leads to the same database; any other one of the
// server can be named instead.
func StartPgBouncer(t testing.TB, server string) *Server {
	t.Helper()
	program, port := testenv.Get(t, "UNECHO_PGBOUNCER"), freePort(t)
	dir, as := postgresDir(t)
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	ini := filepath.Join(dir, "pgbouncer.ini")
	write(t, ini, fmt.Sprintf(`[databases]
* = host=%s port=%s user=%s
[pgbouncer]
listen_addr=127.0.0.1
listen_port=%d
unix_socket_dir=
auth_type=any
pool_mode=transaction
default_pool_size=5
ignore_startup_parameters=extra_float_digits
`, u.Hostname(), u.Port(), u.User.Username(), port))
	s := &Server{t: t, Addr: fmt.Sprint("127.0.0.1:", port)}
	u.Host = s.Addr
	s.URL = u.String()
	s.start = func() *Process { return Start(t, nil, as[0], append(as[1:], program, ini)...) }
	s.probe = s.probePostgres
	s.Restart()
	return s
}

// StartRedis starts a redis-server with an append-only file. args come after its
// own, and win.
func StartRedis(t testing.TB, args ...string) *Server {
	t.Helper()
	port, dir := freePort(t), t.TempDir()
	own := []string{"--port", strconv.Itoa(port), "--bind", "127.0.0.1", "--dir", dir,
		"--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction"}
	return startRedis(t, port, append(own, args...)...)
}

// StartRedisCluster starts three masters that share the slots.
func StartRedisCluster(t testing.TB) []*Server {
	t.Helper()
	nodes, buses := make([]*Server, 3), make([]string, 3) // the nodes talk to each other by ports of their own
	for i := range nodes {
		buses[i] = strconv.Itoa(freePort(t))
		nodes[i] = StartRedis(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port", buses[i])
		first, last := i*16384/3, (i+1)*16384/3-1
		redisDo(t, nodes[i].Addr, "CLUSTER", "ADDSLOTSRANGE", strconv.Itoa(first), strconv.Itoa(last))
		if host, port, err := net.SplitHostPort(nodes[0].Addr); i > 0 {
			if err != nil {
				t.Fatal(err)
			}
			redisDo(t, nodes[i].Addr, "CLUSTER", "MEET", host, port, buses[0])
		}
	}
	for _, n := range nodes {
		testenv.Within(t, 60*time.Second, "the cluster serves", func() bool {
			info := redisDo(t, n.Addr, "CLUSTER", "INFO")
			return strings.Contains(info, "cluster_state:ok") && strings.Contains(info, "cluster_known_nodes:3")
		})
	}
	return nodes
}

// Sentinels are a master, its replica, and who watches them.
type Sentinels struct {
	Master, Replica, Sentinel *Server
	// Name is the master's at the sentinel.
	Name string
}

// StartRedisSentinel starts a master, a replica and one sentinel, which takes a
// master for dead after half a second.
func StartRedisSentinel(t testing.TB) *Sentinels {
	t.Helper()
	s := &Sentinels{Name: "unecho", Master: StartRedis(t)}
	host, port, err := net.SplitHostPort(s.Master.Addr)
	if err != nil {
		t.Fatal(err)
	}
	s.Replica = StartRedis(t, "--replicaof", host, port)
	testenv.Within(t, 30*time.Second, "the replica follows", func() bool {
		return strings.Contains(redisDo(t, s.Replica.Addr, "INFO", "replication"), "master_link_status:up")
	})
	file, at := filepath.Join(t.TempDir(), "sentinel.conf"), freePort(t)
	write(t, file, fmt.Sprintf("port %d\nbind 127.0.0.1\nsentinel monitor %s %s %s 1\nsentinel down-after-milliseconds %s 500\nsentinel failover-timeout %s 5000\n",
		at, s.Name, host, port, s.Name, s.Name))
	s.Sentinel = startRedis(t, at, file, "--sentinel")
	testenv.Within(t, 30*time.Second, "the sentinel knows the replica", func() bool {
		return strings.Contains(redisDo(t, s.Sentinel.Addr, "INFO", "sentinel"), "slaves=1")
	})
	return s
}

// redisDo sends one command, and returns the answer as text.
func redisDo(t testing.TB, addr string, args ...any) string {
	t.Helper()
	c := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	defer func() { _ = c.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	v, err := c.Do(ctx, args...).Result()
	if err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	return fmt.Sprint(v)
}

func startRedis(t testing.TB, port int, args ...string) *Server {
	t.Helper()
	program := testenv.Get(t, "UNECHO_REDIS_SERVER")
	s := &Server{t: t, Addr: fmt.Sprint("127.0.0.1:", port)}
	s.URL = "redis://" + s.Addr
	s.start = func() *Process { return Start(t, nil, program, args...) }
	s.probe = func(ctx context.Context) error {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.Addr)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		_ = conn.SetDeadline(time.Now().Add(time.Second))
		if _, err := conn.Write([]byte("PING\r\n")); err != nil {
			return err
		}
		answer := make([]byte, 5)
		if _, err := conn.Read(answer); err != nil || string(answer) != "+PONG" {
			return fmt.Errorf("PING: %q, %w", answer, err)
		}
		return nil
	}
	s.Restart()
	return s
}

// Build compiles a main package of this module and returns the program.
func Build(t testing.TB, pkg string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), filepath.Base(pkg))
	cmd := exec.Command("go", "build", "-o", out, pkg)
	cmd.Dir = testenv.Root()
	if msg, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build %s: %v\n%s", pkg, err, msg)
	}
	return out
}

func run(t testing.TB, program string, args ...string) string {
	t.Helper()
	return runIn(t, nil, program, args...)
}

// runIn is run with more in the environment.
func runIn(t testing.TB, env []string, program string, args ...string) string {
	t.Helper()
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.Env = "/", append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", program, args, err, out)
	}
	return string(out)
}

func write(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
