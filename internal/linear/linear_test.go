package linear

import (
	"context"
	"errors"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/dedupe/storetest"
	"github.com/unecho/unecho/internal/planted"
)

// histories is how many are checked for each store: a few under `go test`, more
// under `make linear`.
func histories(t *testing.T) int {
	n, err := strconv.Atoi(os.Getenv("UNECHO_HISTORIES"))
	if err != nil {
		return 25
	}
	return n
}

func TestLinear(t *testing.T) {
	each(t, func(t *testing.T, s store) {
		n := histories(t)
		s.linear(t, n)
		if !t.Failed() {
			t.Logf("LINEAR %s: histories=%d illegal=0", s.name, n)
		}
	})
}

// TestMachine: random sequences; -rapid.checks and -rapid.steps make more.
func TestMachine(t *testing.T) {
	each(t, func(t *testing.T, s store) { s.machine(t) })
}

// A driver with a bug has an illegal history before long.
func TestPlanted(t *testing.T) {
	for name, plant := range map[string]func(d *memdedupe.LeaseDriver) dedupe.LeaseDriver{
		"token unchecked": func(d *memdedupe.LeaseDriver) dedupe.LeaseDriver {
			return &anyOwner{LeaseDriver: d, last: map[string]string{}}
		},
		"early expiry":          func(d *memdedupe.LeaseDriver) dedupe.LeaseDriver { return early{d} },
		"two at once":           func(d *memdedupe.LeaseDriver) dedupe.LeaseDriver { return generous{d} },
		"same token":            func(d *memdedupe.LeaseDriver) dedupe.LeaseDriver { return stuck{d} },
		"other content granted": func(d *memdedupe.LeaseDriver) dedupe.LeaseDriver { return anyContent{d} },
		"unknown taken for new": func(d *memdedupe.LeaseDriver) dedupe.LeaseDriver { return blind{d} },
	} {
		t.Run(name, func(t *testing.T) {
			d := memdedupe.NewLeaseDriver()
			planted.Caught(t, "linear/"+name, func(tb testing.TB) {
				storetest.RunLeaseLinear(tb, leases{plant(d), d.Admin()}, 200)
			})
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
	return d.LeaseDriver.Acquire(ctx, c, owner, max(lease/8, time.Millisecond))
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
	if err == nil && r == nil {
		g.Token = 7
	}
	return g, r, err
}

// anyContent looks at no fingerprint.
type anyContent struct{ dedupe.LeaseDriver }

func (d anyContent) Acquire(ctx context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	c.Fingerprint = [32]byte{}
	return d.LeaseDriver.Acquire(ctx, c, owner, lease)
}

// blind does not say that an owner has vanished.
type blind struct{ dedupe.LeaseDriver }

func (d blind) Acquire(ctx context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	g, r, err := d.LeaseDriver.Acquire(ctx, c, owner, lease)
	g.Unknown = false
	return g, r, err
}
