package consumer

import (
	"slices"
	"sync"
	"time"

	"github.com/unecho/unecho/brokers"
)

// Waiting is a message that waits: to be tried again, or for a place that takes it.
type Waiting struct {
	// Position is where the broker keeps the message.
	Position string
	// Topic, Partition and Offset are what Position says, where it is that of a log
	// with partitions. Otherwise Topic is that of the message, and the others
	// are -1.
	Topic     string
	Partition int
	Offset    int64
	// Class and Err are why: what its last try has ended with or, for a message
	// that no dead-letter place takes, the last answer of that place.
	Class Class
	Err   error
	// Attempts is how often the handler has failed on it.
	Attempts int
	// Since is when it began to wait, without having got through.
	Since time.Time
	// Holds is what waits behind it: the lane of the broker, such as
	// "orders/3", where its order is kept (OrderByLane); otherwise empty, and
	// only messages of its key wait.
	Holds string
}

// maxWaiting bounds what Health lists.
const maxWaiting = 100

// afterNack is for how long a message counts as one that no place takes, behind
// when the broker was to deliver it again: it may have gone to another consumer.
const afterNack = 30 * time.Second

// waits are the messages that wait.
type waits struct {
	mu      sync.Mutex
	entries map[any]*waitEntry // by *job, or by the position of what the broker has
}

type waitEntry struct {
	Waiting
	noPlace bool      // the dead letters have not taken it
	until   time.Time // zero: until it is taken out
}

func newWaits() *waits { return &waits{entries: make(map[any]*waitEntry)} }

// begin notes that j waits. A message that has waited before, and did not get
// through, has waited since.
func (w *waits) begin(j *job, noPlace bool, class Class, err error) {
	e := &waitEntry{Waiting: waitingOf(j.d, class, err, j.failures), noPlace: noPlace}
	if j.o.Order == OrderByLane {
		e.Holds = j.d.Lane
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if was := w.entries[j]; was != nil && was.noPlace == noPlace {
		e.Since = was.Since
	}
	w.entries[j] = e
}

// end notes that j is settled.
func (w *waits) end(j *job) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.entries, j)
}

// keep has j's entry outlast it, for the broker has the message for so long.
func (w *waits) keep(j *job, after time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := w.entries[j]
	if e == nil || e.Position == "" {
		return
	}
	e.until = time.Now().Add(after + afterNack)
	if was := w.entries[e.Position]; was != nil {
		e.Since = was.Since
	}
	w.entries[e.Position] = e
}

// taken notes that the message at a position has found its place.
func (w *waits) taken(position string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.entries, position)
}

// look returns the messages that wait, those that no place takes apart, the
// oldest first, and how many there are of the others.
func (w *waits) look() (waiting, noPlace []Waiting, n int) {
	w.mu.Lock()
	now := time.Now()
	for key, e := range w.entries {
		switch {
		case !e.until.IsZero() && now.After(e.until):
			delete(w.entries, key)
		case e.noPlace:
			noPlace = append(noPlace, e.Waiting)
		default:
			waiting = append(waiting, e.Waiting)
		}
	}
	w.mu.Unlock()
	n = len(waiting)
	return oldest(waiting), oldest(noPlace), n
}

func oldest(ws []Waiting) []Waiting {
	slices.SortFunc(ws, func(a, b Waiting) int { return a.Since.Compare(b.Since) })
	return slices.Clip(ws[:min(len(ws), maxWaiting)])
}

func waitingOf(d *brokers.Delivery, class Class, err error, attempts int) Waiting {
	w := Waiting{Position: d.Message.Position, Topic: d.Message.Topic, Partition: -1, Offset: -1,
		Class: class, Err: err, Attempts: attempts, Since: time.Now()}
	if topic, partition, offset, err := placeOf(w.Position); err == nil {
		w.Topic, w.Partition, w.Offset = topic, partition, offset
	}
	return w
}
