package consumer

import (
	"container/list"
	"sync"
)

// maxRemembered bounds the counts that are kept for messages between their
// deliveries. Forgetting one only gives its message more attempts.
const maxRemembered = 10_000

// attempts remembers how often a message has failed here, over redeliveries by
// a broker. The broker's own count will not do: it includes deliveries that
// ended with an outage, a crash or a drain, and would turn those into dead
// letters.
type attempts struct {
	mu     sync.Mutex
	byPos  map[string]*list.Element
	recent *list.List // of *attempt, the latest at the front
}

type attempt struct {
	pos   string
	count int
}

func newAttempts() *attempts {
	return &attempts{byPos: make(map[string]*list.Element), recent: list.New()}
}

func (a *attempts) get(pos string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	if e, ok := a.byPos[pos]; ok {
		return e.Value.(*attempt).count
	}
	return 0
}

func (a *attempts) set(pos string, n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if e, ok := a.byPos[pos]; ok {
		e.Value.(*attempt).count = n
		a.recent.MoveToFront(e)
		return
	}
	a.byPos[pos] = a.recent.PushFront(&attempt{pos, n})
	if a.recent.Len() > maxRemembered {
		oldest := a.recent.Remove(a.recent.Back()).(*attempt)
		delete(a.byPos, oldest.pos)
	}
}

func (a *attempts) forget(pos string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if e, ok := a.byPos[pos]; ok {
		a.recent.Remove(e)
		delete(a.byPos, pos)
	}
}
