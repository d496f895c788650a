package consumertest

import (
	"hash/fnv"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/envelope"
)

// Chaos says what goes wrong in a broker in memory, and how often: chances are
// from 0, never, to 1, and the zero value is a broker where nothing does.
//
// What happens to a message is drawn from the seed, its position, and how often
// that has come up. So it does not depend on which goroutine comes first: equal
// seeds make equal faults, and with RunOptions.Concurrency 1 equal runs.
type Chaos struct {
	// Seed makes a run again. 0 draws one, and a test that fails prints it.
	Seed uint64
	// Duplicate is the chance that a message is stored twice.
	Duplicate float64
	// LoseAck is the chance that an acknowledgement gets lost: the delivery
	// comes again, and what was received behind it in its partition as well.
	LoseAck float64
	// Crash is the chance that the consumer's process ends when it has received
	// a delivery, and again when it is about to acknowledge it. All claims are
	// lost then: handlers that run are cancelled, Ack answers brokers.ErrLost,
	// and what was not acknowledged comes again, after up to Forget deliveries of
	// each partition that were.
	Crash float64
	// Forget defaults to 3; negative is none.
	Forget int
	// Late delays each delivery by a random time up to it.
	Late time.Duration
	// Reorder reads the partitions in random order instead of by turns. The order
	// within a partition stays, but for what comes again.
	Reorder bool
}

// maxHits bounds how often one fault of one kind meets one message, so that
// every run comes to an end, whatever the chances.
const maxHits = 3

const defaultForget = 3

// Faults returns the faults, for membroker.Broker.SetFaults of one broker. If tb
// fails, it is told the seed.
func (c Chaos) Faults(tb testing.TB) membroker.Faults {
	tb.Helper()
	if c.Seed == 0 {
		c.Seed = rand.Uint64() | 1
	}
	switch {
	case c.Forget == 0:
		c.Forget = defaultForget
	case c.Forget < 0:
		c.Forget = 0
	}
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("consumertest: Chaos.Seed: %d brings the same faults again", c.Seed)
		}
	})
	d := &dice{Chaos: c, met: map[place]int{}, hits: map[place]int{}}
	f := membroker.Faults{
		DropAck: func(dl *brokers.Delivery) bool { return d.hit("ack", dl.Message.Position, c.LoseAck) },
		Twice:   func(*envelope.Message) bool { return d.hit("twice", "", c.Duplicate) },
		Crash:   d.crash,
	}
	if c.Late > 0 {
		f.Late = func(m *envelope.Message) time.Duration {
			return time.Duration(d.roll("late", m.Position).Int64N(int64(c.Late) + 1))
		}
	}
	if c.Reorder {
		f.Turn = func(partitions []int) int { return d.roll("turn", "").IntN(len(partitions)) }
	}
	return f
}

// dice draws what happens.
type dice struct {
	Chaos
	mu   sync.Mutex
	met  map[place]int // how often a place was come by
	hits map[place]int // how often something happened there
}

// place is where a fault of one kind may happen.
type place struct{ kind, position string }

// roll returns the numbers of one more visit of a place.
func (d *dice) roll(kind, position string) *rand.Rand {
	d.mu.Lock()
	defer d.mu.Unlock()
	at := place{kind, position}
	d.met[at]++
	h := fnv.New64a()
	h.Write([]byte(kind + "\x00" + position))
	return rand.New(rand.NewPCG(d.Seed, h.Sum64()+uint64(d.met[at])))
}

// hit reports whether a fault happens. What is stored has no position yet, and
// is no place that is come by again: its hits are not counted.
func (d *dice) hit(kind, position string, chance float64) bool {
	if d.roll(kind, position).Float64() >= chance {
		return false
	}
	if position == "" {
		return true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	at := place{kind, position}
	d.hits[at]++
	return d.hits[at] <= maxHits
}

func (d *dice) crash(dl *brokers.Delivery, acking bool) (crash bool, forget int) {
	kind := "crash"
	if acking {
		kind = "crash at the acknowledgement"
	}
	if !d.hit(kind, dl.Message.Position, d.Crash) {
		return false, 0
	}
	return true, d.roll("forget", dl.Message.Position).IntN(d.Forget + 1)
}
