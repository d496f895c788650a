package memdedupe

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/unecho/unecho/dedupe"
)

// Admin returns a view for people, which is a [dedupe.PositionAdmin]. It looks at
// everything each time.
func (d *Driver) Admin() dedupe.Admin { return txAdmin{admin{d}, d} }

// Admin returns a view for people. It looks at everything each time.
func (d *LeaseDriver) Admin() dedupe.Admin { return admin{d} }

// looked is what an admin needs of a driver.
type looked interface {
	entries() []dedupe.Entry
	Conflicts() []dedupe.ConflictRecord
	// free makes an unknown or parked key free, and reports whether it was one.
	free(k dedupe.Key) bool
	// forget drops the conflicts of a key and, if all, the key as well. It
	// reports whether the key was there.
	forget(k dedupe.Key, all bool) bool
}

type admin struct{ d looked }

// all returns the entries in the order of their ids, with their conflicts.
func (a admin) all() []dedupe.Entry {
	entries := a.d.entries()
	for _, r := range a.d.Conflicts() {
		for i := range entries {
			if entries[i].Key == r.Key {
				entries[i].Conflicts++
			}
		}
	}
	slices.SortFunc(entries, func(x, y dedupe.Entry) int { return bytes.Compare(x.ID[:], y.ID[:]) })
	return entries
}

// Find implements dedupe.Admin.
func (a admin) Find(_ context.Context, id dedupe.KeyID) (dedupe.Entry, error) {
	for _, e := range a.all() {
		if e.ID == id {
			return e, nil
		}
	}
	return dedupe.Entry{}, fmt.Errorf("memdedupe: %w: %v", dedupe.ErrNotFound, id)
}

// List implements dedupe.Admin.
func (a admin) List(_ context.Context, f dedupe.Filter) (page dedupe.Page, err error) {
	if err := f.Check(); err != nil {
		return page, fmt.Errorf("memdedupe: list: %w", err)
	}
	for _, e := range a.all() {
		if e.ID.String() <= f.After || e.State != f.State && !f.InConflict || f.InConflict && e.Conflicts == 0 {
			continue
		}
		if len(page.Entries) == f.PageSize() {
			page.Next = page.Entries[len(page.Entries)-1].ID.String()
			break
		}
		page.Entries = append(page.Entries, e)
	}
	return page, nil
}

// Release implements dedupe.Admin.
func (a admin) Release(ctx context.Context, id dedupe.KeyID) error {
	e, err := a.Find(ctx, id)
	switch {
	case err != nil:
		return err
	case !a.d.free(e.Key):
		return fmt.Errorf("memdedupe: release: %w: it is %v, only one that is unknown or parked can be released", dedupe.ErrWrongState, e.State)
	}
	return nil
}

// Evict implements dedupe.Admin.
func (a admin) Evict(ctx context.Context, id dedupe.KeyID) error {
	e, err := a.Find(ctx, id)
	if err == nil && !a.d.forget(e.Key, true) {
		err = fmt.Errorf("memdedupe: %w: %v", dedupe.ErrNotFound, id) // another one was faster
	}
	return err
}

// Conflicts implements dedupe.Admin.
func (a admin) Conflicts(_ context.Context, id dedupe.KeyID) ([]dedupe.ConflictRecord, error) {
	var found []dedupe.ConflictRecord
	for _, r := range a.d.Conflicts() {
		if r.Key.Stored() == id {
			found = append(found, r)
		}
	}
	slices.SortFunc(found, func(x, y dedupe.ConflictRecord) int {
		return cmp.Or(x.SeenAt.Compare(y.SeenAt), bytes.Compare(x.Fingerprint[:], y.Fingerprint[:]))
	})
	return found, nil
}

// Settle implements dedupe.Admin.
func (a admin) Settle(_ context.Context, id dedupe.KeyID) error {
	for _, e := range a.all() {
		if e.ID == id {
			a.d.forget(e.Key, false)
		}
	}
	return nil
}

// Counts implements dedupe.Admin.
func (a admin) Counts(context.Context) (c dedupe.Counts, _ error) {
	for _, e := range a.all() {
		switch e.State {
		case dedupe.StateDone:
			c.Done++
		case dedupe.StateRunning:
			c.Running++
		case dedupe.StateFree:
			c.Free++
		case dedupe.StateUnknown:
			c.Unknown++
		case dedupe.StateParked:
			c.Parked++
		}
	}
	c.Conflicts = int64(len(a.d.Conflicts()))
	return c, nil
}

// done describes a key that is done.
func done(k dedupe.Key, r dedupe.Record, expires time.Time) dedupe.Entry {
	return dedupe.Entry{ID: k.Stored(), Key: k, State: dedupe.StateDone, Fingerprint: r.Fingerprint,
		DoneAt: r.DoneAt, ExpiresAt: expires, ReplySize: size(r.Reply)}
}

// size is the length of a reply, or -1.
func size(reply []byte) int {
	if reply == nil {
		return -1
	}
	return len(reply)
}

// entries implements looked. What an open transaction has claimed is invisible,
// as in a database.
func (d *Driver) entries() (all []dedupe.Entry) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.expire(time.Now())
	for k, s := range d.slots {
		if s.record != nil {
			all = append(all, done(k, *s.record, s.expires))
		}
	}
	return all
}

func (d *Driver) free(dedupe.Key) bool { return false } // no key of a transaction is unknown

func (d *Driver) forget(k dedupe.Key, all bool) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for id := range d.conflicts {
		if id.key == k {
			delete(d.conflicts, id)
		}
	}
	s := d.slots[k]
	there := s != nil && s.record != nil
	if all && there {
		d.expiry.remove(s)
		delete(d.slots, k)
	}
	return there
}

// entries implements looked.
func (d *LeaseDriver) entries() (all []dedupe.Entry) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	for k, l := range d.keys {
		if l.done == nil || now.Before(l.expires) {
			all = append(all, l.entry(k, now))
		}
	}
	return all
}

func (l *leased) entry(k dedupe.Key, now time.Time) dedupe.Entry {
	e := dedupe.Entry{ID: k.Stored(), Key: k, Fingerprint: l.claimed.Fingerprint, LeaseUntil: l.until, ReplySize: -1}
	if l.done != nil {
		e = done(k, *l.done, l.expires)
	} else {
		e.State = l.state(now)
	}
	e.Attempt, e.Token, e.Holder = l.grant.Attempt, l.grant.Token, l.owner
	return e
}

// state is that of a key that is not done.
func (l *leased) state(now time.Time) dedupe.State {
	switch {
	case l.parked:
		return dedupe.StateParked
	case now.Before(l.until):
		return dedupe.StateRunning
	case l.unknown():
		return dedupe.StateUnknown
	}
	return dedupe.StateFree
}

func (d *LeaseDriver) free(k dedupe.Key) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.keys[k]
	if l == nil || l.done != nil || !l.unknown() || time.Now().Before(l.until) {
		return false
	}
	l.until, l.parked, l.grant.Unknown = time.Time{}, false, false
	return true
}

func (d *LeaseDriver) forget(k dedupe.Key, all bool) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.conflicts, k)
	l := d.keys[k]
	there := l != nil && (l.done == nil || time.Now().Before(l.expires))
	if all {
		delete(d.keys, k)
	}
	return there
}

// Conflicts returns what was recorded of claims that met their key with another
// fingerprint, one for each key and fingerprint, in no order.
func (d *LeaseDriver) Conflicts() (all []dedupe.ConflictRecord) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, of := range d.conflicts {
		for _, r := range of {
			all = append(all, r)
		}
	}
	return all
}
