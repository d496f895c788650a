package redisdedupe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/storetest"
	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

func cluster(t *testing.T) (*redis.ClusterClient, []*proc.Server) {
	t.Helper()
	nodes := proc.StartRedisCluster(t)
	addrs := make([]string, len(nodes))
	for i, n := range nodes {
		addrs[i] = n.Addr
	}
	return redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs, ContextTimeoutEnabled: true}), nodes
}

func TestConformanceCluster(t *testing.T) {
	c, nodes := cluster(t)
	defer func() { _ = c.Close() }()
	addrs := c.Options().Addrs
	storetest.RunLease(t, func(tb testing.TB) storetest.LeaseHarness {
		return openOn(tb, redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs, ContextTimeoutEnabled: true}))
	})
	t.Run("keys are spread, and lists see all", func(t *testing.T) {
		h := openOn(t, redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs, ContextTimeoutEnabled: true}))
		want := map[dedupe.KeyID]bool{}
		for i := range 60 {
			cl := dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: fmt.Sprintf("{same}%d", i)}, Retain: time.Hour}
			if _, _, err := h.driver.Acquire(t.Context(), cl, "a", time.Minute); err != nil {
				t.Fatal(err)
			}
			want[cl.Key.Stored()] = true
		}
		used := 0
		h.each(t, func(n redis.Cmdable) error {
			some, err := n.Keys(t.Context(), h.prefix+"*").Result()
			if len(some) > 0 {
				used++
			}
			return err
		})
		if used != len(nodes) {
			t.Errorf("60 keys are on %d of %d servers: an id decides the slot", used, len(nodes))
		}
		for f := (dedupe.Filter{State: dedupe.StateRunning, Limit: 10}); ; {
			page, err := h.Admin().List(t.Context(), f)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range page.Entries {
				delete(want, e.ID)
			}
			if f.After = page.Next; f.After == "" {
				break
			}
		}
		if len(want) > 0 {
			t.Errorf("%d keys are in no list", len(want))
		}
	})
	t.Run("check asks every master", func(t *testing.T) {
		h := openOn(t, redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs, ContextTimeoutEnabled: true}))
		if err := h.redis.Check(t.Context()); err != nil {
			t.Errorf("a cluster that keeps keys: %v", err)
		}
		last := redis.NewClient(&redis.Options{Addr: addrs[2]})
		defer func() { _ = last.Close() }()
		if err := last.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lfu").Err(); err != nil {
			t.Fatal(err)
		}
		_, port, _ := net.SplitHostPort(addrs[2])
		if err := h.redis.Check(t.Context()); !errors.Is(err, ErrEvicts) || !strings.Contains(err.Error(), port) {
			t.Errorf("with one master that evicts: %v, want ErrEvicts that names the port %s", err, port)
		}
	})
	t.Run("a slot moves", func(t *testing.T) { slotMoves(t, c) })
}

// slotMoves gives a claim's slot to another master while the claim is held: the
// client follows, and the claim is the same.
func slotMoves(t *testing.T, c *redis.ClusterClient) {
	ctx := t.Context()
	h := openOn(t, redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Options().Addrs, ContextTimeoutEnabled: true}))
	cl := dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: "moved"}, Retain: time.Hour}
	g, _, err := h.driver.Acquire(ctx, cl, "a", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	name := h.redis.name(cl.Key.Stored())
	slot, err := c.ClusterKeySlot(ctx, name).Result()
	if err != nil {
		t.Fatal(err)
	}
	from, err := c.MasterForKey(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	var to *redis.Client
	for _, addr := range c.Options().Addrs {
		if addr != from.Options().Addr {
			to = redis.NewClient(&redis.Options{Addr: addr})
			defer func() { _ = to.Close() }()
			break
		}
	}
	id := func(n *redis.Client) string { return n.Do(ctx, "CLUSTER", "MYID").Val().(string) }
	host, port, _ := net.SplitHostPort(to.Options().Addr)
	for _, step := range []struct {
		on   *redis.Client
		args []any
	}{
		{to, []any{"CLUSTER", "SETSLOT", slot, "IMPORTING", id(from)}},
		{from, []any{"CLUSTER", "SETSLOT", slot, "MIGRATING", id(to)}},
		{from, []any{"MIGRATE", host, port, name, 0, 5000}},
	} {
		if err := step.on.Do(ctx, step.args...).Err(); err != nil {
			t.Fatalf("%v: %v", step.args, err)
		}
	}
	if err := h.driver.Extend(ctx, cl.Key, "a", g.Token, time.Minute); err != nil { // by ASK
		t.Errorf("extend while the slot moves: %v", err)
	}
	for _, n := range []*redis.Client{to, from} {
		if err := n.Do(ctx, "CLUSTER", "SETSLOT", slot, "NODE", id(to)).Err(); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.driver.Complete(ctx, cl, "a", g.Token, []byte("reply")); err != nil { // by MOVED
		t.Errorf("complete after the slot has moved: %v", err)
	}
	if _, r, err := h.driver.Acquire(ctx, cl, "b", time.Minute); err != nil || r == nil || string(r.Reply) != "reply" {
		t.Errorf("the next claim: %+v, %v", r, err)
	}
}

func TestConformanceSentinel(t *testing.T) {
	s := proc.StartRedisSentinel(t)
	o := redis.FailoverOptions{MasterName: s.Name, SentinelAddrs: []string{s.Sentinel.Addr}, ContextTimeoutEnabled: true}
	storetest.RunLease(t, func(tb testing.TB) storetest.LeaseHarness {
		c := o
		return openOn(tb, redis.NewFailoverClient(&c))
	})
}

// L2: a failover to a replica that has not got a claim forgets it. The event may
// be handled again then, but under a greater token, and the old owner can do
// nothing any more.
func TestTokensRiseOverAFailoverThatForgets(t *testing.T) {
	for range 3 {
		if failoverForgets(t) || t.Failed() {
			return
		}
		t.Log("the replica was back before the master was gone; once more")
	}
	t.Error("no failover has forgotten a claim")
}

// failoverForgets reports whether the failover has forgotten the claim. The
// replica is cut off and takes up to a second to come back, in which the claim
// is made and the master killed.
func failoverForgets(t *testing.T) bool {
	s := proc.StartRedisSentinel(t)
	c := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: s.Name, SentinelAddrs: []string{s.Sentinel.Addr}, ContextTimeoutEnabled: true})
	h := openOn(t, c)
	ctx := t.Context()
	kept := dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: "kept"}, Retain: time.Hour}
	lost := dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: "lost"}, Retain: time.Hour}
	first, _, err := h.driver.Acquire(ctx, kept, "a", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := c.Wait(ctx, 1, 5*time.Second).Result(); err != nil || n != 1 {
		t.Fatalf("the replica has not got the first claim: %d, %v", n, err)
	}
	if err := c.ClientKillByFilter(ctx, "TYPE", "replica").Err(); err != nil {
		t.Fatal(err)
	}
	old, _, err := h.driver.Acquire(ctx, lost, "a", time.Minute)
	s.Master.Kill()
	if err != nil {
		t.Fatal(err)
	}
	var next dedupe.Grant
	testenv.Within(t, 60*time.Second, "the replica is the master", func() bool {
		one, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		next, _, err = h.driver.Acquire(one, lost, "b", time.Minute)
		return err == nil || errors.Is(err, dedupe.ErrInProgress)
	})
	if err != nil || next.Attempt != 1 {
		return false
	}
	if next.Token <= old.Token {
		t.Errorf("token %d after %d", next.Token, old.Token)
	}
	if err := h.driver.Complete(ctx, lost, "a", old.Token, nil); !errors.Is(err, dedupe.ErrLeaseLost) {
		t.Errorf("the forgotten owner completes: %v, want ErrLeaseLost", err)
	}
	if err := h.driver.Complete(ctx, kept, "a", first.Token, nil); err != nil {
		t.Errorf("the owner that was not forgotten completes: %v", err)
	}
	return true
}

// L2: and over a crash of a server that keeps nothing.
func TestTokensRiseOverACrashThatForgets(t *testing.T) {
	server := proc.StartRedis(t, "--appendonly", "no", "--save", "")
	h := openAt(t, server.Addr)
	c := dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: "1"}, Retain: time.Hour}
	var last int64
	for i := range 3 {
		var g dedupe.Grant
		testenv.Within(t, 30*time.Second, "the server is back", func() bool {
			var err error
			g, _, err = h.driver.Acquire(t.Context(), c, fmt.Sprint(i), time.Minute)
			return err == nil
		})
		if g.Token <= last || g.Attempt != 1 {
			t.Errorf("granted %+v after the token %d", g, last)
		}
		last = g.Token
		server.Kill()
		server.Restart()
	}
	if err := h.redis.Check(t.Context()); !errors.Is(err, ErrVolatile) {
		t.Errorf("Check: %v, want ErrVolatile", err)
	}
}

func TestCheckWhereItMayNotAsk(t *testing.T) {
	server := proc.StartRedis(t)
	root := redis.NewClient(&redis.Options{Addr: server.Addr})
	defer func() { _ = root.Close() }()
	if err := root.ConfigSet(t.Context(), "appendfsync", "no").Err(); err != nil {
		t.Fatal(err)
	}
	for user, rules := range map[string][]any{
		"noconfig": {"ACL", "SETUSER", "noconfig", "on", "nopass", "~*", "+@all", "-config"},
		"noinfo":   {"ACL", "SETUSER", "noinfo", "on", "nopass", "~*", "+@all", "-info"},
	} {
		if err := root.Do(t.Context(), rules...).Err(); err != nil {
			t.Fatal(err)
		}
		d := openOn(t, redis.NewClient(&redis.Options{Addr: server.Addr, Username: user, Password: "x", ContextTimeoutEnabled: true}))
		err := d.redis.Check(t.Context())
		switch user {
		case "noconfig":
			if err != nil {
				t.Errorf("where CONFIG is forbidden: %v, want what INFO says", err)
			}
		default:
			if err == nil || !strings.Contains(err.Error(), "NOPERM") {
				t.Errorf("where INFO is forbidden: %v, want an error that says so", err)
			}
		}
	}
	if err := openAt(t, server.Addr).redis.Check(t.Context()); !errors.Is(err, ErrVolatile) || !strings.Contains(err.Error(), "appendfsync") {
		t.Errorf("with appendfsync no: %v", err)
	}
}

// B31: scripts that were flushed come back by themselves, in the middle of a
// claim as well.
func TestB31ScriptsAreFlushed(t *testing.T) {
	server := proc.StartRedis(t) // the others' scripts are theirs
	h := openAt(t, server.Addr)
	flush := func() {
		t.Helper()
		if err := h.rdb.ScriptFlush(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
	}
	st := dedupe.NewLeaseStore(h.driver, nil)
	for i := range 3 {
		flush()
		res, err := st.Once(t.Context(), dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: fmt.Sprint(i)}}, func(context.Context, *dedupe.Lease) ([]byte, error) {
			flush()
			return nil, nil
		})
		if err != nil || res.Outcome != dedupe.Processed {
			t.Errorf("claim %d: %v, %v", i, res.Outcome, err)
		}
	}
}

// losing is a proxy that passes requests on, and cuts before the first answers.
func losing(t *testing.T, target string, answers int) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() {
		_ = ln.Close()
		<-done
	})
	go func() {
		defer close(done)
		for n := 0; ; n++ {
			client, err := ln.Accept()
			if err != nil {
				return
			}
			relay(client, target, n < answers)
		}
	}()
	return ln.Addr().String()
}

// relay serves one connection; if it loses, it cuts at the answer to a script.
func relay(client net.Conn, target string, lose bool) {
	defer func() { _ = client.Close() }()
	server, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	buf := make([]byte, 1<<16)
	for {
		n, err := client.Read(buf)
		if err != nil {
			return
		}
		script := strings.Contains(strings.ToLower(string(buf[:n])), "eval")
		if _, err := server.Write(buf[:n]); err != nil {
			return
		}
		if n, err = server.Read(buf); err != nil || script && lose && !strings.Contains(string(buf[:n]), "NOSCRIPT") {
			return // Redis has done it, and nobody hears
		}
		if _, err := client.Write(buf[:n]); err != nil {
			return
		}
	}
}

// B30: the answer to a claim is lost. Its repetition finds its own claim, and
// the event is handled now, not when the lease has run out.
func TestB30LostAnswerIsNoOtherOwner(t *testing.T) {
	addr := testenv.Redis(t)
	for _, retries := range []int{-1, 3} { // ours alone, and the client's as well
		rdb := redis.NewClient(&redis.Options{Addr: losing(t, addr, 1), ContextTimeoutEnabled: true, MaxRetries: retries, Protocol: 2, DisableIdentity: true})
		h := openOn(t, rdb)
		st := dedupe.NewLeaseStore(h.driver, &dedupe.LeaseOptions{Lease: time.Hour, Timeout: 5 * time.Second})
		runs := 0
		res, err := st.Once(t.Context(), dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: "1"}}, func(_ context.Context, l *dedupe.Lease) ([]byte, error) {
			runs++
			if l.Attempt != 1 || l.Unknown {
				t.Errorf("the lease is %+v, want the first attempt", l)
			}
			return nil, nil
		})
		if err != nil || res.Outcome != dedupe.Processed || runs != 1 {
			t.Errorf("%d retries of the client: %v, %v after %d runs", retries, res.Outcome, err, runs)
		}
		_ = rdb.Close()
	}
}

// B28: a process that is stopped for longer than its lease finds, when it goes
// on, that it can neither extend nor complete nor release, and that its handler
// was cancelled.
func TestB28StoppedOwnerCanDoNothing(t *testing.T) {
	if addr := os.Getenv("STOPPED_OWNER"); addr != "" {
		stoppedOwner(addr, os.Getenv("STOPPED_PREFIX"))
		return
	}
	addr := testenv.Redis(t)
	h := openAt(t, addr)
	c, err := stoppedClaim.Normal() // as the store hands it to the driver
	if err != nil {
		t.Fatal(err)
	}
	p := proc.Start(t, append(os.Environ(), "STOPPED_OWNER="+addr, "STOPPED_PREFIX="+h.prefix), os.Args[0], "-test.run=^TestB28StoppedOwnerCanDoNothing$", "-test.v")
	p.WaitFor(t, "HANDLER RUNS", 30*time.Second)
	p.Stop()
	var g dedupe.Grant
	testenv.Within(t, 30*time.Second, "the lease of a stopped owner runs out", func() bool {
		var r *dedupe.Record
		var err error
		g, r, err = h.driver.Acquire(t.Context(), c, "b", time.Minute)
		return err == nil && r == nil
	})
	if !g.Unknown || g.Attempt != 2 {
		t.Errorf("granted %+v", g)
	}
	p.Cont()
	p.WaitFor(t, "ONCE .*the lease is lost", 30*time.Second)
	if err := p.Wait(30 * time.Second); err != nil {
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signaled() {
			t.Errorf("the owner: %v", err)
		}
	}
	if !strings.Contains(p.Output(), "CANCELLED") {
		t.Errorf("the handler was not cancelled:\n%s", p.Output())
	}
	if err := h.driver.Complete(t.Context(), c, "b", g.Token, []byte("mine")); err != nil {
		t.Errorf("the new owner completes: %v", err)
	}
}

var stoppedClaim = dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: "stopped"}, Retain: time.Hour}

// stoppedOwner is the other process.
func stoppedOwner(addr, prefix string) {
	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
	defer func() { _ = rdb.Close() }()
	st, err := NewStore(rdb, &Options{Prefix: prefix, Lease: dedupe.LeaseOptions{Lease: time.Second}})
	if err != nil {
		panic(err)
	}
	_, err = st.Once(context.Background(), stoppedClaim, func(ctx context.Context, _ *dedupe.Lease) ([]byte, error) {
		fmt.Println("HANDLER RUNS")
		<-ctx.Done()
		fmt.Println("CANCELLED", context.Cause(ctx))
		return []byte("too late"), nil // a handler that does not look
	})
	fmt.Println("ONCE", err)
}
