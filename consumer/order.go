package consumer

import (
	"fmt"
	"hash/fnv"
	"strconv"

	"github.com/unecho/unecho/brokers"
)

// Order says which deliveries are handled one after the other. What a broker
// gives no lane (JetStream) has no order, whatever is chosen.
type Order int

const (
	// OrderByLane keeps the order of a lane, which is a Kafka partition: its
	// deliveries are handled one after the other. It is the default.
	OrderByLane Order = iota
	// OrderByKey keeps the order of what has an equal Message.Key within a lane,
	// and handles different keys at once: a slow or failing message holds up
	// those of its key, and the few whose keys have the same hash. Messages
	// without a key have no order.
	OrderByKey
	// Unordered keeps none.
	Unordered
)

// String returns the name of the order.
func (o Order) String() string {
	switch o {
	case OrderByLane:
		return "by lane"
	case OrderByKey:
		return "by key"
	case Unordered:
		return "unordered"
	}
	return fmt.Sprintf("order(%d)", int(o))
}

// laneOf is the name of the lane of d here, "" for a lane of its own. A lane of
// the broker is divided into as many as there are workers, by a hash of the key:
// with a lane for each key, groups would be of one message.
//
// A broker's lane may be divided although it is acknowledged in order: sources
// take the acknowledgements of a lane in any order, and tell the broker of the
// prefix that is done.
func (r *runner) laneOf(d *brokers.Delivery) string {
	switch {
	case d.Lane != "" && r.o.Order == OrderByLane:
		return d.Lane
	case d.Lane != "" && r.o.Order == OrderByKey && d.Message.Key != nil:
		h := fnv.New64a()
		_, _ = h.Write(d.Message.Key)
		return d.Lane + "\x00" + strconv.FormatUint(h.Sum64()%uint64(r.o.Concurrency), 10)
	case r.batch == nil:
		return ""
	}
	// In groups, what has no order shares as many lanes as there are workers,
	// by turns. No source has such a lane.
	r.turn = (r.turn + 1) % r.o.Concurrency
	return "\x00" + strconv.Itoa(r.turn)
}
