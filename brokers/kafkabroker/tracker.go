package kafkabroker

// tracker knows which deliveries of one partition, in one generation, are
// settled, and from that which offset may be committed. It is not safe for
// concurrent use.
type tracker struct {
	read  int64    // everything below was handed out, or is no message
	open  []*entry // handed out and not committable, in the order of offsets
	bytes int      // of open
}

// entry is one delivery.
type entry struct {
	offset  int64
	size    int
	settled settlement
}

type settlement int

const (
	running settlement = iota
	done
	returned
	dropped // forgotten by a rewind, comes again
)

// deliver adds the delivery of a message.
func (t *tracker) deliver(offset int64, size int) *entry {
	e := &entry{offset: offset, size: size}
	t.open = append(t.open, e)
	t.bytes += size
	t.read = offset + 1
	return e
}

// skip notes that there is no message below offset that was not handed out.
func (t *tracker) skip(offset int64) { t.read = max(t.read, offset) }

// done settles e, and lets go of the prefix that is done.
func (t *tracker) done(e *entry) {
	e.settled = done
	for len(t.open) > 0 && t.open[0].settled == done {
		t.bytes -= t.open[0].size
		t.open[0] = nil
		t.open = t.open[1:]
	}
}

// rewind has the partition handed out again from e on. Whatever was handed
// out behind e is forgotten: if it was settled it comes again, because an
// offset can only say that everything below it is done.
func (t *tracker) rewind(e *entry) {
	for i, o := range t.open {
		if o != e {
			continue
		}
		for _, d := range t.open[i:] {
			d.settled = dropped
			t.bytes -= d.size
		}
		t.open = t.open[:i]
		t.read = e.offset
		return
	}
}

// position is the offset to commit: the lowest that is not settled, or what
// follows the last.
func (t *tracker) position() int64 {
	if len(t.open) > 0 {
		return t.open[0].offset
	}
	return t.read
}

// idle reports whether nothing is being worked on.
func (t *tracker) idle() bool {
	for _, e := range t.open {
		if e.settled == running {
			return false
		}
	}
	return true
}
