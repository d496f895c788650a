package linear

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/redis/go-redis/v9"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/dedupe/redisdedupe"
	"github.com/unecho/unecho/internal/testenv"
)

const (
	clients = 4
	opsEach = 12
	// patience bounds the check of one history. A check that is not done by
	// then has shown nothing, so it is a failure.
	patience = 20 * time.Second
)

// histories is how many are checked for each driver: a few under `go test`,
// more under `make linear`.
func histories(t *testing.T) int {
	n, err := strconv.Atoi(os.Getenv("UNECHO_HISTORIES"))
	if err != nil {
		return 25
	}
	t.Logf("%d histories", n)
	return n
}

func TestLinearMemory(t *testing.T) { check(t, memdedupe.NewLeaseDriver()) }

func TestLinearRedis(t *testing.T) { check(t, redisDriver(t)) }

func redisDriver(t testing.TB) dedupe.LeaseDriver {
	rdb := redis.NewClient(&redis.Options{Addr: testenv.Redis(t), ContextTimeoutEnabled: true})
	t.Cleanup(func() { _ = rdb.Close() })
	d, err := redisdedupe.NewDriver(rdb, &redisdedupe.Options{Prefix: testenv.Name("lin") + ":"})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestLinearPostgres(t *testing.T) {
	pool := testenv.Pool(t, clients)
	if err := pgdedupe.Migrate(t.Context(), pool, nil); err != nil {
		t.Fatal(err)
	}
	check(t, pgdedupe.NewLeaseDriver(pool, nil))
}

// check runs histories, each on a key of its own.
func check(t *testing.T, d dedupe.LeaseDriver) {
	n := histories(t)
	for i := range n {
		if res, ops := history(t, d, uint64(i)); res != porcupine.Ok {
			for _, op := range ops {
				t.Logf("%+v → %+v", op.Input, op.Output)
			}
			t.Fatalf("history %d is %s", i, res)
		}
	}
	t.Logf("LINEAR %s: histories=%d illegal=0", t.Name(), n)
}

// A driver with a bug has an illegal history before long.
func TestPlanted(t *testing.T) {
	for name, d := range map[string]dedupe.LeaseDriver{
		"token unchecked": &anyOwner{LeaseDriver: memdedupe.NewLeaseDriver(), last: map[string]string{}},
		"early expiry":    early{memdedupe.NewLeaseDriver()},
		"two at once":     generous{memdedupe.NewLeaseDriver()},
		"same token":      stuck{memdedupe.NewLeaseDriver()},
	} {
		t.Run(name, func(t *testing.T) {
			for i := range 200 {
				if res, _ := history(t, d, uint64(i)); res == porcupine.Illegal {
					t.Logf("PLANTED linear/%s caught: history %d", name, i)
					return
				}
			}
			t.Errorf("PLANTED linear/%s missed: 200 histories are legal with this bug", name)
		})
	}
}

// anyOwner completes for whoever asks.
type anyOwner struct {
	dedupe.LeaseDriver
	mu    sync.Mutex
	last  map[string]string
	token int64
}

func (d *anyOwner) Acquire(ctx context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	g, r, err := d.LeaseDriver.Acquire(ctx, c, owner, lease)
	if err == nil && r == nil {
		d.last[c.Key.ID], d.token = owner, g.Token
	}
	return g, r, err
}

func (d *anyOwner) Complete(ctx context.Context, c dedupe.Claim, _ string, _ int64, reply []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.LeaseDriver.Complete(ctx, c, d.last[c.Key.ID], d.token, reply)
}

type early struct{ dedupe.LeaseDriver }

func (d early) Acquire(ctx context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	return d.LeaseDriver.Acquire(ctx, c, owner, lease/8)
}

// generous grants what is held.
type generous struct{ dedupe.LeaseDriver }

func (d generous) Acquire(ctx context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	g, r, err := d.LeaseDriver.Acquire(ctx, c, owner, lease)
	if errors.Is(err, dedupe.ErrInProgress) {
		return dedupe.Grant{Token: time.Now().UnixNano(), Attempt: 1}, nil, nil
	}
	return g, r, err
}

// stuck has one token for all owners of a key.
type stuck struct{ dedupe.LeaseDriver }

func (d stuck) Acquire(ctx context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	g, r, err := d.LeaseDriver.Acquire(ctx, c, owner, lease)
	g.Token = 7
	return g, r, err
}

// history lets clients work on one key at once and checks what they saw.
func history(t *testing.T, d dedupe.LeaseDriver, seed uint64) (porcupine.CheckResult, []porcupine.Operation) {
	t.Helper()
	h := &recorder{d: d, start: time.Now(), key: dedupe.Key{Consumer: "linear", Source: t.Name(), ID: fmt.Sprint(seed, "-", testenv.Name(""))}}
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() { h.client(t.Context(), c, rand.New(rand.NewPCG(seed, uint64(c)))) })
	}
	wg.Wait()
	return porcupine.CheckOperationsTimeout(model(), h.ops, patience), h.ops
}

type recorder struct {
	d     dedupe.LeaseDriver
	key   dedupe.Key
	start time.Time

	mu  sync.Mutex
	ops []porcupine.Operation
}

// client claims, extends, completes late and early, gives up, and loses answers.
func (h *recorder) client(ctx context.Context, id int, rnd *rand.Rand) {
	owner, token, claims := "", int64(0), 0
	for range opsEach {
		time.Sleep(time.Duration(rnd.IntN(3000)) * time.Microsecond)
		lease := time.Duration(2+rnd.IntN(15)) * time.Millisecond
		if owner == "" || rnd.IntN(4) == 0 {
			if owner == "" || rnd.IntN(3) > 0 { // else the same claim is sent again
				claims++
				owner, token = fmt.Sprintf("%d.%d", id, claims), 0
			}
			out := h.do(ctx, id, rnd, input{op: 'a', owner: owner, lease: lease})
			if out.answer == 'g' {
				token = out.token
			}
			continue
		}
		op := []byte("eeccr")[rnd.IntN(5)]
		h.do(ctx, id, rnd, input{op: op, owner: owner, token: token, lease: lease, reply: fmt.Sprint(owner, "/", token)})
		if op == 'r' {
			owner = ""
		}
	}
}

// do does one operation and records it. Every twelfth answer gets lost: the
// client does not hear it, and the history does not know.
func (h *recorder) do(ctx context.Context, client int, rnd *rand.Rand, in input) output {
	in.called = time.Since(h.start)
	out := h.ask(ctx, in)
	out.returned = time.Since(h.start)
	op := porcupine.Operation{ClientId: client, Input: in, Call: int64(in.called), Output: out, Return: int64(out.returned)}
	if rnd.IntN(12) == 0 || out.answer == 'u' {
		out = output{answer: 'u', returned: never}
		op.Output, op.Return = out, int64(never)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	op.ClientId = len(h.ops) // an operation without an answer must not block its client's next
	h.ops = append(h.ops, op)
	return out
}

func (h *recorder) ask(ctx context.Context, in input) output {
	c := dedupe.Claim{Key: h.key, Retain: time.Hour}
	var err error
	switch in.op {
	case 'a':
		g, r, err := h.d.Acquire(ctx, c, in.owner, in.lease)
		switch {
		case err == nil && r != nil:
			return output{answer: 'd', reply: string(r.Reply)}
		case err == nil:
			return output{answer: 'g', token: g.Token}
		case errors.Is(err, dedupe.ErrInProgress):
			return output{answer: 'b'}
		}
		return output{answer: 'u'}
	case 'e':
		err = h.d.Extend(ctx, c.Key, in.owner, in.token, in.lease)
	case 'c':
		err = h.d.Complete(ctx, c, in.owner, in.token, []byte(in.reply))
	case 'r':
		err = h.d.Release(ctx, c.Key, in.owner, in.token, dedupe.StateFree)
	}
	switch {
	case err == nil:
		return output{answer: 'o'}
	case errors.Is(err, dedupe.ErrLeaseLost):
		return output{answer: 'l'}
	}
	return output{answer: 'u'}
}
