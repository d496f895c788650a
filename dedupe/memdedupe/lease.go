package memdedupe

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/unecho/unecho/dedupe"
)

// NewLeaseStore returns a store of leases that holds no keys. o may be nil.
func NewLeaseStore(o *dedupe.LeaseOptions) dedupe.Store[*dedupe.Lease] {
	return dedupe.NewLeaseStore(NewLeaseDriver(), o)
}

// NewLeaseDriver returns the driver behind [NewLeaseStore], for those who want
// to look into it or to build on it.
func NewLeaseDriver() *LeaseDriver {
	return &LeaseDriver{keys: make(map[dedupe.Key]*leased), conflicts: make(map[dedupe.Key]map[[32]byte]bool)}
}

// LeaseDriver implements dedupe.LeaseDriver. It is safe for concurrent use.
type LeaseDriver struct {
	mu        sync.Mutex
	keys      map[dedupe.Key]*leased
	conflicts map[dedupe.Key]map[[32]byte]bool
	token     int64 // the last one, over all keys
}

// leased is a key that was claimed at some time.
type leased struct {
	owner   string
	grant   dedupe.Grant
	until   time.Time      // of the lease; zero when the key was given up
	done    *dedupe.Record // nil until it is
	expires time.Time      // of done
}

// Acquire implements dedupe.LeaseDriver.
func (d *LeaseDriver) Acquire(_ context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now, l := time.Now(), d.keys[c.Key]
	switch {
	case l == nil || l.done != nil && !now.Before(l.expires):
		l = &leased{}
	case l.done != nil:
		r := *l.done
		r.Reply = bytes.Clone(r.Reply)
		return dedupe.Grant{}, &r, nil
	case l.owner == owner && !l.until.IsZero():
		return l.grant, nil, nil // the same claim, whose answer was lost
	case now.Before(l.until):
		return dedupe.Grant{}, nil, dedupe.ErrInProgress
	}
	d.token++
	next := &leased{owner: owner, until: now.Add(lease)}
	next.grant = dedupe.Grant{Token: d.token, Attempt: l.grant.Attempt + 1, Unknown: l.grant.Unknown || !l.until.IsZero()}
	d.keys[c.Key] = next
	return next.grant, nil, nil
}

// ours returns the claim if it is still the caller's. d.mu is held.
func (d *LeaseDriver) ours(k dedupe.Key, owner string, token int64) (*leased, error) {
	l := d.keys[k]
	if l == nil || l.owner != owner || l.grant.Token != token || l.done == nil && l.until.IsZero() {
		return nil, fmt.Errorf("%w: another owner has the key, or nobody", dedupe.ErrLeaseLost)
	}
	return l, nil
}

// Extend implements dedupe.LeaseDriver.
func (d *LeaseDriver) Extend(_ context.Context, k dedupe.Key, owner string, token int64, lease time.Duration) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	l, err := d.ours(k, owner, token)
	if err == nil && l.done != nil {
		err = fmt.Errorf("%w: the key is done", dedupe.ErrLeaseLost)
	}
	if err == nil {
		l.until = time.Now().Add(lease)
	}
	return err
}

// Complete implements dedupe.LeaseDriver.
func (d *LeaseDriver) Complete(_ context.Context, c dedupe.Claim, owner string, token int64, reply []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	l, err := d.ours(c.Key, owner, token)
	if err == nil && l.done == nil {
		now := time.Now()
		l.done = &dedupe.Record{Fingerprint: c.Fingerprint, Reply: bytes.Clone(reply), DoneAt: now}
		l.expires = now.Add(c.Retain)
	}
	return err
}

// Release implements dedupe.LeaseDriver.
func (d *LeaseDriver) Release(_ context.Context, k dedupe.Key, owner string, token int64, unknown bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	l, err := d.ours(k, owner, token)
	if err == nil && l.done != nil {
		err = fmt.Errorf("%w: the key is done", dedupe.ErrLeaseLost)
	}
	if err == nil {
		l.until, l.grant.Unknown = time.Time{}, unknown
	}
	return err
}

// Conflict implements dedupe.LeaseDriver.
func (d *LeaseDriver) Conflict(_ context.Context, c dedupe.Claim, _ dedupe.Record) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.conflicts[c.Key] == nil {
		d.conflicts[c.Key] = make(map[[32]byte]bool)
	}
	d.conflicts[c.Key][c.Fingerprint] = true
	return nil
}

// Conflicts returns how many other contents than the first have been seen for
// a key.
func (d *LeaseDriver) Conflicts(k dedupe.Key) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.conflicts[k])
}
