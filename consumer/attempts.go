package consumer

import (
	"container/list"
	"sync"
)

// maxRemembered bounds what is kept for messages between their deliveries.
// Forgetting one only gives its message more attempts.
const maxRemembered = 10_000

// attempts remembers what is known of a message over redeliveries by a broker.
// The broker's own count will not do: it includes deliveries that ended with an
// outage, a crash or a drain, and would turn those into dead letters.
type attempts struct {
	mu     sync.Mutex
	byPos  map[string]*list.Element
	recent *list.List // of *attempt, the latest at the front
}

type attempt struct {
	pos string
	history
}

// history is what is known of a message.
type history struct {
	failures int     // of the handler on it
	mind     *mind   // what the gate knows; nil is nothing
	doomed   *ruling // it is for the dead letters, which have not taken it yet
}

// ruling is that a message is not to be tried again.
type ruling struct {
	class  Class
	reason string
	err    error
}

func newAttempts() *attempts {
	return &attempts{byPos: make(map[string]*list.Element), recent: list.New()}
}

func (a *attempts) get(pos string) history {
	a.mu.Lock()
	defer a.mu.Unlock()
	if e, ok := a.byPos[pos]; ok {
		return e.Value.(*attempt).history
	}
	return history{}
}

func (a *attempts) set(pos string, h history) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if e, ok := a.byPos[pos]; ok {
		e.Value.(*attempt).history = h
		a.recent.MoveToFront(e)
		return
	}
	a.byPos[pos] = a.recent.PushFront(&attempt{pos, h})
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
