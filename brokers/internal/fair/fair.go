// Package fair divides a bound among lanes, so that one that gives nothing back
// leaves the others room.
package fair

import "math"

// Budget is a bound over all lanes. Half of it is divided equally: a lane's share
// is its own, whatever the others hold. The other half is for whoever needs more,
// and a lane may take no more of it than it leaves. So a lane that holds on
// to what it has, gets at most some quarter of the whole beyond its share, a second
// one half of that, and so on, while the shares of the others stay free for them.
// A lane that is alone has everything.
//
// The zero Budget has no bound. It is not safe for concurrent use.
type Budget struct {
	total, share, common int
	lanes                int
	used                 int // by all lanes
	beyond               int // what lanes hold beyond their shares
}

// New returns a budget over so many lanes; without a bound if total is not
// positive.
func New(total, lanes int) Budget {
	b := Budget{total: max(0, total), lanes: lanes}
	if lanes <= 1 {
		b.share = b.total
		return b
	}
	b.share = max(1, b.total/(2*lanes))
	b.common = max(0, b.total-lanes*b.share)
	return b
}

// Share is what a lane may hold in any case; with more lanes than there is to
// divide it is one, as long as that is there.
func (b *Budget) Share() int {
	if b.total == 0 {
		return math.MaxInt
	}
	return b.share
}

// Left is how much more a lane may take that holds so much.
func (b *Budget) Left(held int) int {
	if b.total == 0 {
		return math.MaxInt
	}
	own, beyond := max(0, b.share-held), max(0, held-b.share)
	left := own + max(0, (b.common-b.beyond-beyond+1)/2)
	if b.lanes > b.total {
		left = min(left, max(0, b.total-b.used))
	}
	return left
}

// Move notes that a lane holds another amount than before. It reports whether the
// others may take more now.
func (b *Budget) Move(from, to int) (freed bool) {
	if b.total == 0 {
		return false
	}
	beyond, used := b.beyond, b.used
	b.used += to - from
	b.beyond += max(0, to-b.share) - max(0, from-b.share)
	return b.beyond < beyond || b.lanes > b.total && b.used < used
}
