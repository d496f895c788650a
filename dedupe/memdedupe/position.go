package memdedupe

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/unecho/unecho/dedupe"
)

// position is what is known about one partition.
type position struct {
	at     dedupe.Position // MovedAt is zero before the first commit
	holder *Tx             // nil if nobody is at work on it
	free   chan struct{}   // closed when the holder ends
}

// leave ends the hold of a transaction, if it has one. The caller holds mu.
func (p *position) leave() {
	if p != nil {
		p.holder = nil
		close(p.free)
	}
}

// move is leave for a transaction that commits.
func (p *position) move(to dedupe.Position) {
	if p != nil {
		p.at = to
		p.at.MovedAt = time.Now()
		p.leave()
	}
}

// BeginAt implements [dedupe.PlaceDriver].
func (d *Driver) BeginAt(ctx context.Context, at dedupe.Partition) (*Tx, dedupe.Position, error) {
	tx := &Tx{driver: d, begun: time.Now()}
	err := d.await(ctx, func() (busy <-chan struct{}) { return d.hold(tx, at) })
	if err != nil {
		return nil, dedupe.Position{}, err
	}
	return tx, tx.place.at, nil
}

// hold makes tx the holder of a partition, or returns the channel that is closed
// when the present one ends.
func (d *Driver) hold(tx *Tx, at dedupe.Partition) (busy <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.positions[at]
	if p == nil {
		p = &position{at: dedupe.Position{Partition: at}}
		d.positions[at] = p
	}
	if p.holder != nil {
		return p.free
	}
	p.holder, p.free = tx, make(chan struct{})
	tx.place = p
	return nil
}

// ClaimAt implements [dedupe.PlaceDriver].
func (d *Driver) ClaimAt(ctx context.Context, tx *Tx, claims []dedupe.Claim) (priors []*dedupe.Record, err error) {
	err = d.await(ctx, func() (busy <-chan struct{}) {
		priors, busy = d.claimIn(tx, claims)
		return busy
	})
	return priors, err
}

// CommitAt implements [dedupe.PlaceDriver].
func (d *Driver) CommitAt(_ context.Context, tx *Tx, a dedupe.Advance) error { return d.commit(tx, a) }

// Positions implements [dedupe.PositionAdmin].
func (a txAdmin) Positions(context.Context) (all []dedupe.Position, _ error) {
	a.d.mu.Lock()
	defer a.d.mu.Unlock()
	for _, p := range a.d.positions {
		if !p.at.MovedAt.IsZero() {
			all = append(all, p.at)
		}
	}
	slices.SortFunc(all, func(x, y dedupe.Position) int {
		p, q := x.Partition, y.Partition
		return cmp.Or(cmp.Compare(p.Consumer, q.Consumer), cmp.Compare(p.Topic, q.Topic), cmp.Compare(p.Number, q.Number), cmp.Compare(p.Tenant, q.Tenant))
	})
	return all[:min(len(all), dedupe.CountCap)], nil
}

// ResetPosition implements [dedupe.PositionAdmin].
func (a txAdmin) ResetPosition(ctx context.Context, at dedupe.Partition, next int64) error {
	if err := dedupe.CheckReset(at, next); err != nil {
		return fmt.Errorf("memdedupe: reset a position: %w", err)
	}
	tx, _, err := a.d.BeginAt(ctx, at)
	if err != nil {
		return err
	}
	return a.d.CommitAt(ctx, tx, dedupe.Advance{To: dedupe.Position{Partition: at, Next: next}})
}

// txAdmin is the admin of a Driver, which has positions, too.
type txAdmin struct {
	admin
	d *Driver
}
