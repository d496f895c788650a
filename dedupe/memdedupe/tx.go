package memdedupe

import (
	"container/heap"
	"errors"
	"slices"
	"sync"
	"time"
)

// Tx is the scope of a handler: what is staged in it happens at the commit, or
// never. It is safe for concurrent use.
type Tx struct {
	driver *Driver
	slots  []*slot
	place  *position // that it holds; nil if none
	begun  time.Time

	mu     sync.Mutex
	over   bool
	staged []func()
}

// ErrTxDone: the transaction was used after the handler had returned.
var ErrTxDone = errors.New("memdedupe: the transaction is over")

// OnCommit stages f: it runs when the transaction commits, after what was
// staged before it, and not at all when the transaction is rolled back. All
// commits of a store run one at a time; f must be quick and must not use the
// store. The error is ErrTxDone if the transaction is over.
func (tx *Tx) OnCommit(f func()) error {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.over {
		return ErrTxDone
	}
	tx.staged = append(tx.staged, f)
	return nil
}

// end takes what was staged, once.
func (tx *Tx) end() ([]func(), error) {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.over {
		return nil, ErrTxDone
	}
	tx.over = true
	return tx.staged, nil
}

// expiryQueue has the slot that expires first at index 0.
type expiryQueue []*slot

func (q *expiryQueue) push(s *slot) { heap.Push((*byExpiry)(q), s) }
func (q *expiryQueue) pop() *slot   { return heap.Pop((*byExpiry)(q)).(*slot) }
func (q *expiryQueue) remove(s *slot) {
	if i := slices.Index(*q, s); i >= 0 {
		heap.Remove((*byExpiry)(q), i)
	}
}

// byExpiry is an expiryQueue to container/heap.
type byExpiry []*slot

func (q byExpiry) Len() int           { return len(q) }
func (q byExpiry) Less(i, j int) bool { return q[i].expires.Before(q[j].expires) }
func (q byExpiry) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }
func (q *byExpiry) Push(x any)        { *q = append(*q, x.(*slot)) }
func (q *byExpiry) Pop() any {
	old := *q
	last := old[len(old)-1]
	*q = old[:len(old)-1]
	return last
}
