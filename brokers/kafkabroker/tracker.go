package kafkabroker

import "time"

// tracker knows which deliveries of one partition, in one generation, are not
// settled, and from that which offset may be committed. It keeps nothing of those
// that are: what is settled behind one that is not is only counted, so it costs no
// memory, however much that is. It is not safe for concurrent use.
type tracker struct {
	read    int64     // everything below was handed out, or is no message
	first   *entry    // of those that are not settled, in the order of offsets
	last    *entry    // nil if there is none
	open    int       // how many they are
	running int       // how many of them are being worked on
	bytes   int       // of them
	handed  int64     // how many were handed out
	since   time.Time // since when first has been the first
}

// entry is one delivery that is not settled.
type entry struct {
	offset     int64
	place      int64 // how many were handed out before it
	size       int
	settled    settlement
	prev, next *entry
}

type settlement int8

const (
	running settlement = iota
	done
	returned // not done, and waited for by nobody
	dropped  // forgotten by a rewind, comes again
)

// deliver adds the delivery of a message.
func (t *tracker) deliver(offset int64, size int) *entry {
	e := &entry{offset: offset, place: t.handed, size: size, prev: t.last}
	if t.last == nil {
		t.first, t.since = e, time.Now()
	} else {
		t.last.next = e
	}
	t.last = e
	t.open++
	t.running++
	t.bytes += size
	t.handed++
	t.read = offset + 1
	return e
}

// skip notes that there is no message below offset that was not handed out.
func (t *tracker) skip(offset int64) { t.read = max(t.read, offset) }

// done settles e, and forgets it.
func (t *tracker) done(e *entry) {
	t.settle(e, done)
	t.open--
	t.bytes -= e.size
	if e.prev == nil {
		t.first, t.since = e.next, time.Now()
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		t.last = e.prev
	} else {
		e.next.prev = e.prev
	}
	e.prev, e.next = nil, nil
}

// giveUp settles e as returned: the offset stays where it is.
func (t *tracker) giveUp(e *entry) { t.settle(e, returned) }

func (t *tracker) settle(e *entry, s settlement) {
	if e.settled == running {
		t.running--
	}
	e.settled = s
}

// rewind has the partition handed out again from e on. Whatever was handed
// out behind e is forgotten: if it was settled it comes again, because an
// offset can only say that everything below it is done.
func (t *tracker) rewind(e *entry) {
	t.last = e.prev
	if e.prev == nil {
		t.first = nil
	} else {
		e.prev.next = nil
	}
	for d := e; d != nil; {
		next := d.next
		t.settle(d, dropped)
		t.open--
		t.bytes -= d.size
		d.prev, d.next = nil, nil
		d = next
	}
	t.read, t.handed = e.offset, e.place
}

// position is the offset to commit: the lowest that is not settled, or what
// follows the last.
func (t *tracker) position() int64 {
	if t.first != nil {
		return t.first.offset
	}
	return t.read
}

// behind is how many were handed out behind the lowest that is not settled.
func (t *tracker) behind() int {
	if t.first == nil {
		return 0
	}
	return int(t.handed - t.first.place - 1)
}

// idle reports whether nothing is being worked on.
func (t *tracker) idle() bool { return t.running == 0 }
