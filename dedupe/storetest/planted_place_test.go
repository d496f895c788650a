package storetest_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
)

// placing is a driver with the power that is broken here.
type placing interface {
	driver
	dedupe.PlaceDriver[tx]
}

// placePlants are the bugs about positions that the suite has to catch.
var placePlants = []struct {
	bug, by string
	build   func(d placing) store
}{
	{"position moved before the handler, in a transaction of its own", "position: what fails leaves it where it was", moveFirst},
	{"position moved after the effect, in a transaction of its own", "position: B33 commit lost on its way", moveLast},
	{"the next offset taken for done", "position: new, done and gaps", at1(func(d placing) placing { return shifted{d, 1} })},
	{"the last offset taken for new", "position: new, done and gaps", at1(func(d placing) placing { return shifted{d, -1} })},
	{"greatest time not kept", "position: a replaced log is later", moves(func(a *dedupe.Advance) { a.To.MaxTime = dedupe.Position{}.MaxTime })},
	{"last record not kept", "position: a replaced log holds another record", moves(func(a *dedupe.Advance) { a.To.Last = [32]byte{} })},
	{"position not moved past duplicates of a key", "position: keys, too", moves(func(a *dedupe.Advance) {
		if len(a.Claims) == 0 {
			a.To.Next--
		}
	})},
	{"conflicts not recorded", "position: keys, too", moves(func(a *dedupe.Advance) { a.Conflicts = nil })},
	{"no lock", "position: two at once", at1(func(d placing) placing {
		return &lockless{placing: d, at: map[dedupe.Partition]dedupe.Position{}, of: map[tx]dedupe.Partition{}}
	})},
	{"tenant missing from the position", "position: consumers, tenants, topics and partitions are independent", elsewhere(func(p *dedupe.Partition) { p.Tenant = "" })},
	{"consumer missing from the position", "position: consumers, tenants, topics and partitions are independent", elsewhere(func(p *dedupe.Partition) { p.Consumer = "c" })},
	{"topic missing from the position", "position: consumers, tenants, topics and partitions are independent", elsewhere(func(p *dedupe.Partition) { p.Topic = "t" })},
	{"number missing from the position", "position: consumers, tenants, topics and partitions are independent", elsewhere(func(p *dedupe.Partition) { p.Number = 0 })},
	{"offsets of 32 bits", "position: offsets at the bounds", moves(func(a *dedupe.Advance) { a.To.Next = int64(int32(a.To.Next)) })}, //nolint:gosec // that is the bug
	{"a wait taken for done", "position: a wait for it is bounded", waitIsDone},
}

func TestPlantedPositions(t *testing.T) {
	for _, p := range placePlants {
		caught(t, p.bug, p.by, func(d driver) store { return p.build(d.(placing)) })
	}
}

// at1 puts a broken driver behind the real state machine.
func at1(broken func(d placing) placing) func(d placing) store {
	return func(d placing) store { return dedupe.NewTxStore[tx](broken(d), nil) }
}

type onceAt = func(ctx context.Context, p dedupe.Partition, at []dedupe.Place, claims []dedupe.Claim,
	fn func(context.Context, tx, []int) ([][]byte, error)) ([]dedupe.Answer, error)

// atFunc is a store that does OnceAt by a function.
type atFunc struct {
	store
	at onceAt
}

func (f atFunc) OnceAt(ctx context.Context, p dedupe.Partition, at []dedupe.Place, claims []dedupe.Claim,
	fn func(context.Context, tx, []int) ([][]byte, error)) ([]dedupe.Answer, error) {
	return f.at(ctx, p, at, claims, fn)
}

func nothing(context.Context, tx, []int) ([][]byte, error) { return nil, nil }

func moveFirst(d placing) store {
	st := dedupe.NewTxStore[tx](d, nil)
	return atFunc{st, func(ctx context.Context, p dedupe.Partition, at []dedupe.Place, claims []dedupe.Claim,
		fn func(context.Context, tx, []int) ([][]byte, error)) ([]dedupe.Answer, error) {
		answers, err := st.(dedupe.Placer[tx]).OnceAt(ctx, p, at, claims, nothing)
		if err != nil || answers[len(answers)-1].Outcome != dedupe.Processed {
			return answers, err
		}
		p.Consumer += " effects"
		return st.(dedupe.Placer[tx]).OnceAt(ctx, p, at, claims, fn)
	}}
}

// moveLast has the effect committed when the position may be lost.
func moveLast(d placing) store {
	effects := dedupe.NewTxStore(memdedupe.NewDriver(nil), nil) // whose commit nobody cuts
	st := dedupe.NewTxStore[tx](d, nil)
	var n counter
	return atFunc{st, func(ctx context.Context, p dedupe.Partition, at []dedupe.Place, claims []dedupe.Claim,
		fn func(context.Context, tx, []int) ([][]byte, error)) ([]dedupe.Answer, error) {
		return st.(dedupe.Placer[tx]).OnceAt(ctx, p, at, claims, func(ctx context.Context, _ tx, fresh []int) (replies [][]byte, err error) {
			c := dedupe.Claim{Key: dedupe.Key{Consumer: "effects", ID: n.next()}}
			_, err = effects.Once(ctx, c, func(ctx context.Context, scope tx) ([]byte, error) {
				replies, err = fn(ctx, scope, fresh)
				return nil, err
			})
			return replies, err
		})
	}}
}

// shifted is off by some.
type shifted struct {
	placing
	by int64
}

func (d shifted) BeginAt(ctx context.Context, p dedupe.Partition) (tx, dedupe.Position, error) {
	scope, at, err := d.placing.BeginAt(ctx, p)
	at.Next += d.by
	return scope, at, err
}

// moves changes what is committed.
func moves(change func(a *dedupe.Advance)) func(d placing) store {
	return at1(func(d placing) placing { return moved{d, change} })
}

type moved struct {
	placing
	change func(a *dedupe.Advance)
}

func (d moved) CommitAt(ctx context.Context, scope tx, a dedupe.Advance) error {
	d.change(&a)
	return d.placing.CommitAt(ctx, scope, a)
}

// elsewhere keeps the position of another partition.
func elsewhere(change func(p *dedupe.Partition)) func(d placing) store {
	return at1(func(d placing) placing { return misplaced{d, change} })
}

type misplaced struct {
	placing
	change func(p *dedupe.Partition)
}

func (d misplaced) BeginAt(ctx context.Context, p dedupe.Partition) (tx, dedupe.Position, error) {
	d.change(&p)
	return d.placing.BeginAt(ctx, p)
}

// lockless reads the position, and writes it at the end.
type lockless struct {
	placing
	n  counter
	mu sync.Mutex
	at map[dedupe.Partition]dedupe.Position
	of map[tx]dedupe.Partition
}

func (d *lockless) BeginAt(ctx context.Context, p dedupe.Partition) (tx, dedupe.Position, error) {
	scope, _, err := d.placing.BeginAt(ctx, dedupe.Partition{Consumer: d.n.next(), Topic: "any"})
	d.mu.Lock()
	defer d.mu.Unlock()
	d.of[scope] = p
	return scope, d.at[p], err
}

func (d *lockless) CommitAt(ctx context.Context, scope tx, a dedupe.Advance) error {
	if err := d.placing.CommitAt(ctx, scope, a); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.at[d.of[scope]] = a.To
	return nil
}

func waitIsDone(d placing) store {
	st := dedupe.NewTxStore[tx](d, nil)
	return atFunc{st, func(ctx context.Context, p dedupe.Partition, at []dedupe.Place, claims []dedupe.Claim,
		fn func(context.Context, tx, []int) ([][]byte, error)) ([]dedupe.Answer, error) {
		answers, err := st.(dedupe.Placer[tx]).OnceAt(ctx, p, at, claims, fn)
		if errors.Is(err, dedupe.ErrInProgress) {
			return make([]dedupe.Answer, len(at)), nil
		}
		return answers, err
	}}
}
