// Package memharness is the storetest harness around memdedupe. It is apart so
// that the suite's own tests can put broken drivers into it.
package memharness

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/dedupe/storetest"
)

// TxDriver is what can be put into a harness.
type TxDriver = dedupe.TxDriver[*memdedupe.Tx]

// Harness has every power that makes sense without a server.
type Harness struct {
	store  dedupe.Store[*memdedupe.Tx]
	memory *memdedupe.Driver

	broken  atomic.Bool
	mu      sync.Mutex
	counts  map[string]int
	aborted map[*memdedupe.Tx]bool
	cut     func(tx *memdedupe.Tx, commit func() error) error // for the next commit
}

var errAborted = errors.New("memharness: a statement failed")

// Open returns the harness of memdedupe.
func Open(_ testing.TB, s storetest.Settings) storetest.Harness[*memdedupe.Tx] {
	return New(s, func(d TxDriver) dedupe.Store[*memdedupe.Tx] { return dedupe.NewTxStore(d, nil) })
}

// New returns a harness whose store is what build makes of the driver.
func New(s storetest.Settings, build func(d TxDriver) dedupe.Store[*memdedupe.Tx]) *Harness {
	h := &Harness{
		memory:  memdedupe.NewDriver(&memdedupe.Options{Wait: s.Wait}),
		counts:  make(map[string]int),
		aborted: make(map[*memdedupe.Tx]bool),
	}
	h.store = build(driver{h.memory, h})
	return h
}

// Store implements storetest.Harness.
func (h *Harness) Store() dedupe.Store[*memdedupe.Tx] { return h.store }

// Add implements storetest.Harness.
func (h *Harness) Add(_ context.Context, tx *memdedupe.Tx, name string) error {
	if h.broken.Load() {
		return errBroken
	}
	return tx.OnCommit(func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.counts[name]++
	})
}

// Count implements storetest.Harness.
func (h *Harness) Count(_ testing.TB, name string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.counts[name]
}

// Conflicts implements storetest.Harness.
func (h *Harness) Conflicts(testing.TB) int { return len(h.memory.Conflicts()) }

// Admin implements storetest.Administered.
func (h *Harness) Admin() dedupe.Admin { return h.memory.Admin() }

// Break implements storetest.Breaker.
func (h *Harness) Break() { h.broken.Store(true) }

// Mend implements storetest.Breaker.
func (h *Harness) Mend() { h.broken.Store(false) }

var errBroken = fmt.Errorf("memharness: %w", dedupe.ErrUnavailable)

// Lost implements storetest.Retrier.
func (h *Harness) Lost() error { return memdedupe.ErrConflict }

// Abort implements storetest.Aborter, as a database does that refuses to
// commit after a failed statement.
func (h *Harness) Abort(_ context.Context, tx *memdedupe.Tx) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.aborted[tx] = true
	return errAborted
}

// Ends implements storetest.Ender.
func (h *Harness) Ends() []storetest.End[*memdedupe.Tx] {
	return []storetest.End[*memdedupe.Tx]{{
		Name: "rollback", Do: func(ctx context.Context, tx *memdedupe.Tx) error { return h.memory.Rollback(ctx, tx) },
	}}
}

// CutCommit implements storetest.Cutter.
func (h *Harness) CutCommit(applied bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cut = func(tx *memdedupe.Tx, commit func() error) error {
		end := commit
		if !applied {
			end = func() error { return h.memory.Rollback(context.Background(), tx) }
		}
		if err := end(); err != nil {
			return err
		}
		return fmt.Errorf("memharness: the answer is lost: %w", dedupe.ErrUnknownOutcome)
	}
}

// driver is memdedupe's with the faults of the harness.
type driver struct {
	*memdedupe.Driver
	h *Harness
}

func (d driver) Begin(ctx context.Context, c dedupe.Claim) (*memdedupe.Tx, *dedupe.Record, error) {
	if d.h.broken.Load() {
		return nil, nil, errBroken
	}
	return d.Driver.Begin(ctx, c)
}

// Explain implements dedupe.Explainer.
func (d driver) Explain(*memdedupe.Tx) error {
	if d.h.broken.Load() {
		return errBroken
	}
	return nil
}

// Classify implements dedupe.TxDriver.
func (d driver) Classify(err error) dedupe.Class {
	if errors.Is(err, errBroken) {
		return dedupe.ClassUnavailable
	}
	return d.Driver.Classify(err)
}

func (d driver) BeginBatch(ctx context.Context, claims []dedupe.Claim) (*memdedupe.Tx, []*dedupe.Record, error) {
	if d.h.broken.Load() {
		return nil, nil, errBroken
	}
	return d.Driver.BeginBatch(ctx, claims)
}

func (d driver) Commit(ctx context.Context, tx *memdedupe.Tx, c dedupe.Claim, reply []byte) error {
	return d.CommitBatch(ctx, tx, []dedupe.Claim{c}, [][]byte{reply})
}

func (d driver) CommitBatch(ctx context.Context, tx *memdedupe.Tx, claims []dedupe.Claim, replies [][]byte) error {
	return d.end(ctx, tx, func() error { return d.Driver.CommitBatch(ctx, tx, claims, replies) })
}

func (d driver) BeginAt(ctx context.Context, at dedupe.Partition) (*memdedupe.Tx, dedupe.Position, error) {
	if d.h.broken.Load() {
		return nil, dedupe.Position{}, errBroken
	}
	return d.Driver.BeginAt(ctx, at)
}

func (d driver) CommitAt(ctx context.Context, tx *memdedupe.Tx, a dedupe.Advance) error {
	return d.end(ctx, tx, func() error { return d.Driver.CommitAt(ctx, tx, a) })
}

// end commits, as far as the harness lets it.
func (d driver) end(ctx context.Context, tx *memdedupe.Tx, commit func() error) error {
	d.h.mu.Lock()
	aborted, cut := d.h.aborted[tx], d.h.cut
	d.h.cut = nil
	d.h.mu.Unlock()
	switch {
	case aborted:
		return errors.Join(dedupe.ErrScope, d.Rollback(ctx, tx))
	case cut != nil:
		return cut(tx, commit)
	}
	return commit()
}
