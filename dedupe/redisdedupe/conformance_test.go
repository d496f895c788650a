package redisdedupe

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/storetest"
	"github.com/unecho/unecho/internal/planted"
	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type harness struct {
	rdb    redis.UniversalClient
	prefix string
	driver dedupe.LeaseDriver
	redis  *Driver
}

func open(tb testing.TB) *harness {
	tb.Helper()
	return openAt(tb, testenv.Redis(tb))
}

func openAt(tb testing.TB, addr string) *harness {
	tb.Helper()
	return openOn(tb, redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true}))
}

func openOn(tb testing.TB, rdb redis.UniversalClient) *harness {
	tb.Helper()
	tb.Cleanup(func() { _ = rdb.Close() })
	prefix := testenv.Name("t") + ":"
	d, err := NewDriver(rdb, &Options{Prefix: prefix})
	if err != nil {
		tb.Fatal(err)
	}
	return &harness{rdb: rdb, prefix: prefix, driver: d, redis: d}
}

func (h *harness) Driver() dedupe.LeaseDriver { return h.driver }

func (h *harness) Admin() dedupe.Admin { return h.redis.Admin() }

// Forget drops what this test has stored, as a failover to an empty replica does.
func (h *harness) Forget(tb testing.TB) {
	tb.Helper()
	for _, name := range h.keys(tb) {
		if err := h.rdb.Del(context.Background(), name).Err(); err != nil {
			tb.Fatal(err)
		}
	}
	h.each(tb, func(n redis.Cmdable) error { return n.ScriptFlush(context.Background()).Err() })
}

// each does something on every server that has keys.
func (h *harness) each(tb testing.TB, f func(n redis.Cmdable) error) {
	tb.Helper()
	nodes, err := h.redis.nodes(context.Background())
	if err != nil {
		tb.Fatal(err)
	}
	for _, n := range nodes {
		if err := f(n); err != nil {
			tb.Fatal(err)
		}
	}
}

func (h *harness) keys(tb testing.TB) (names []string) {
	tb.Helper()
	h.each(tb, func(n redis.Cmdable) error {
		some, err := n.Keys(context.Background(), h.prefix+"*").Result()
		names = append(names, some...)
		return err
	})
	return names
}

func TestConformance(t *testing.T) {
	storetest.RunLease(t, func(tb testing.TB) storetest.LeaseHarness { return open(tb) })
}

// Every key has a time to live, whatever state it is in.
func TestB50EveryKeyExpires(t *testing.T) {
	for _, c := range storetest.LeaseCases() {
		h := open(t)
		c.Func(t, h)
		for _, name := range h.keys(t) {
			if ttl, err := h.rdb.PTTL(t.Context(), name).Result(); err != nil || ttl <= 0 {
				t.Errorf("%s leaves a key with the time to live %v (%v)", c.Name, ttl, err)
			}
		}
	}
}

// Redis is gone: no handler runs, and it is an outage.
func TestFailsClosed(t *testing.T) {
	server := proc.StartRedis(t)
	h := openAt(t, server.Addr)
	server.Kill()
	st := dedupe.NewLeaseStore(h.driver, &dedupe.LeaseOptions{Lease: time.Second})
	claim := dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: "1"}}
	_, err := st.Once(t.Context(), claim, func(context.Context, *dedupe.Lease) ([]byte, error) {
		t.Error("the handler ran although Redis is gone")
		return nil, nil
	})
	if !errors.Is(err, dedupe.ErrUnavailable) {
		t.Errorf("%v, want ErrUnavailable", err)
	}
	server.Restart()
	if _, err := st.Once(t.Context(), claim, func(context.Context, *dedupe.Lease) ([]byte, error) { return nil, nil }); err != nil {
		t.Errorf("after the restart: %v", err)
	}
}

// B31: out of memory is a refusal, not a duplicate; and whoever holds a claim
// can bring it to its end.
func TestB31OutOfMemoryFailsClosed(t *testing.T) {
	server := proc.StartRedis(t)
	h := openAt(t, server.Addr)
	limit := func(v string) {
		t.Helper()
		if err := h.rdb.ConfigSet(t.Context(), "maxmemory", v).Err(); err != nil {
			t.Fatal(err)
		}
	}
	st, runs := dedupe.NewLeaseStore(h.driver, nil), 0
	for id, after := range map[string]error{"held": nil, "new": dedupe.ErrUnavailable} {
		if after != nil {
			limit("1")
		}
		_, err := st.Once(t.Context(), dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: id}}, func(context.Context, *dedupe.Lease) ([]byte, error) {
			runs++
			limit("1")
			return []byte("reply"), nil
		})
		if !errors.Is(err, after) {
			t.Errorf("%s: %v, want %v", id, err, after)
		}
		limit("0")
	}
	if runs != 1 {
		t.Errorf("%d runs, want none of the claim that was refused", runs)
	}
}

func TestCheckSaysWhatEndangersKeys(t *testing.T) {
	server := proc.StartRedis(t)
	h := openAt(t, server.Addr)
	if err := h.redis.Check(t.Context()); err != nil {
		t.Errorf("a server that keeps keys: %v", err)
	}
	for name, value := range map[string]string{"maxmemory-policy": "allkeys-lru", "appendonly": "no"} {
		if err := h.rdb.ConfigSet(t.Context(), name, value).Err(); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.redis.Check(t.Context()); !errors.Is(err, ErrEvicts) || !errors.Is(err, ErrVolatile) || !strings.Contains(err.Error(), "allkeys-lru") {
		t.Errorf("%v, want ErrEvicts and ErrVolatile", err)
	}
}

func TestClientsThatCannotKeepDeadlinesAreRefused(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer func() { _ = rdb.Close() }()
	if _, err := NewStore(rdb, nil); err == nil || !strings.Contains(err.Error(), "ContextTimeoutEnabled") {
		t.Errorf("%v", err)
	}
	if _, err := NewStore(nil, nil); err == nil {
		t.Error("no client is no error")
	}
	ok := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", ContextTimeoutEnabled: true})
	defer func() { _ = ok.Close() }()
	if _, err := NewStore(ok, &Options{Prefix: "a{b}"}); err == nil {
		t.Error("a prefix with braces is no error")
	}
}

// Each of these was shipped by somebody.
func TestPlanted(t *testing.T) {
	for name, bug := range map[string]func(dedupe.LeaseDriver) dedupe.LeaseDriver{
		"token unchecked":             func(d dedupe.LeaseDriver) dedupe.LeaseDriver { return &lastOwner{LeaseDriver: d} },
		"early expiry":                func(d dedupe.LeaseDriver) dedupe.LeaseDriver { return early{d} },
		"token reset with Redis":      func(d dedupe.LeaseDriver) dedupe.LeaseDriver { return counts{d} },
		"own claim taken for another": func(d dedupe.LeaseDriver) dedupe.LeaseDriver { return &forgetful{LeaseDriver: d} },
		"unknown taken for new":       func(d dedupe.LeaseDriver) dedupe.LeaseDriver { return blind{d} },
		"conflict not recorded":       func(d dedupe.LeaseDriver) dedupe.LeaseDriver { return silent{d} },
		"extension does nothing":      func(d dedupe.LeaseDriver) dedupe.LeaseDriver { return lazy{d} },
	} {
		t.Run(name, func(t *testing.T) {
			var runs []func(testing.TB)
			for _, c := range storetest.LeaseCases() {
				runs = append(runs, func(tb testing.TB) {
					h := open(tb)
					h.driver = bug(h.driver)
					c.Func(tb, h)
				})
			}
			planted.Caught(t, "storetest/lease: "+name, runs...)
		})
	}
}

// lastOwner acts for whoever holds the key now.
type lastOwner struct {
	dedupe.LeaseDriver
	owner string
	token int64
}

func (d *lastOwner) Acquire(ctx context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	g, r, err := d.LeaseDriver.Acquire(ctx, c, owner, lease)
	if err == nil && r == nil {
		d.owner, d.token = owner, g.Token
	}
	return g, r, err
}

func (d *lastOwner) Complete(ctx context.Context, c dedupe.Claim, _ string, _ int64, reply []byte) error {
	return d.LeaseDriver.Complete(ctx, c, d.owner, d.token, reply)
}

type early struct{ dedupe.LeaseDriver }

func (d early) Acquire(ctx context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	return d.LeaseDriver.Acquire(ctx, c, owner, max(lease/100, time.Millisecond))
}

// counts gives attempts for tokens, as a counter in Redis would.
type counts struct{ dedupe.LeaseDriver }

func (d counts) Acquire(ctx context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	g, r, err := d.LeaseDriver.Acquire(ctx, c, owner, lease)
	g.Token = int64(g.Attempt)
	return g, r, err
}

// forgetful uses another name for each try of one claim.
type forgetful struct {
	dedupe.LeaseDriver
	n int
}

func (d *forgetful) Acquire(ctx context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	d.n++
	return d.LeaseDriver.Acquire(ctx, c, owner+strings.Repeat("x", d.n), lease)
}

type blind struct{ dedupe.LeaseDriver }

func (d blind) Acquire(ctx context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	g, r, err := d.LeaseDriver.Acquire(ctx, c, owner, lease)
	g.Unknown = false
	return g, r, err
}

type silent struct{ dedupe.LeaseDriver }

func (silent) Conflict(context.Context, dedupe.ConflictRecord) error { return nil }

type lazy struct{ dedupe.LeaseDriver }

func (lazy) Extend(context.Context, dedupe.Key, string, int64, time.Duration) error { return nil }
