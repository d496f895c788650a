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
	// deliveries are handled one after the other. It is the default. A message
	// that fails holds up its partition, by definition, until it is done or with
	// the dead letters; Health tells which it is, where, and why.
	OrderByLane Order = iota
	// OrderByKey keeps the order of what has an equal Message.Key within a lane,
	// and handles different keys at once: a slow or failing message holds up
	// those of its key. In groups (RunOptions.Batch) a slow one holds up its
	// group as well, and a failing one waits aside. Messages without a key have
	// no order.
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

// laneOf is the name of the lane of d here, "" for a lane of its own. Where the
// order of keys is enough each key has one. In groups a lane of the broker is
// divided into as many as there are workers, by a hash of the key: with a lane for
// each key, groups would be of one message.
//
// A broker's lane may be divided although it is acknowledged in order: sources
// take the acknowledgements of a lane in any order, and tell the broker of the
// prefix that is done.
func (r *runner) laneOf(d *brokers.Delivery) string {
	switch {
	case d.Lane != "" && r.o.Order == OrderByLane:
		return d.Lane
	case r.batch == nil:
		return r.keyLane(d)
	case r.keyLane(d) != "":
		h := fnv.New64a()
		_, _ = h.Write(d.Message.Key)
		return d.Lane + "\x00" + strconv.FormatUint(h.Sum64()%uint64(r.o.Concurrency), 10)
	}
	// In groups, what has no order shares as many lanes as there are workers,
	// by turns. No source has such a lane.
	r.turn = (r.turn + 1) % r.o.Concurrency
	return "\x00" + strconv.Itoa(r.turn)
}

// keyLane is the name of the lane of d's key; "" if d waits for nobody.
func (r *runner) keyLane(d *brokers.Delivery) string {
	if d.Lane == "" || r.o.Order != OrderByKey || d.Message.Key == nil {
		return ""
	}
	return d.Lane + "\x00key\x00" + string(d.Message.Key)
}
