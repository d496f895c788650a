package dedupe

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// State is what a store knows about a key.
type State int

const (
	// StateDone: the effect is durable. Keys of transactional stores are done,
	// or not there.
	StateDone State = iota + 1
	// StateRunning: an owner holds the key, and its lease has not run out.
	StateRunning
	// StateFree: an attempt has failed without effect. The next claim runs.
	StateFree
	// StateUnknown: an owner has vanished, or could not say whether it had its
	// effect. The next claim is told.
	StateUnknown
	// StateParked: as StateUnknown, and nothing runs until a person releases
	// or forgets the key.
	StateParked
)

var stateNames = [...]string{StateDone: "done", StateRunning: "running", StateFree: "free", StateUnknown: "unknown", StateParked: "parked"}

// States are all states.
func States() []State {
	return []State{StateDone, StateRunning, StateFree, StateUnknown, StateParked}
}

// String returns the lower-case name of the state.
func (s State) String() string {
	if s > 0 && int(s) < len(stateNames) {
		return stateNames[s]
	}
	return fmt.Sprintf("state(%d)", int(s))
}

// ParseState reads what [State.String] has written.
func ParseState(name string) (State, error) {
	for s, n := range stateNames {
		if n != "" && n == name {
			return State(s), nil
		}
	}
	return 0, fmt.Errorf("dedupe: there is no state %q; there are %s", name, strings.Join(stateNames[1:], ", "))
}

// Entry is what a store holds about a key, for people.
type Entry struct {
	ID KeyID
	// Key is zero if the store keeps no readable parts.
	Key   Key
	State State
	// Fingerprint is as the store keeps it, see [Fingerprint].
	Fingerprint [32]byte
	// Attempt, Token and Holder are those of the lease; zero if there is none.
	// Holder is LeaseOptions.Holder and the random name of the claim.
	Attempt int
	Token   int64
	Holder  string
	// LeaseUntil, DoneAt and ExpiresAt are by the store's clock; zero where
	// the state has none.
	LeaseUntil, DoneAt, ExpiresAt time.Time
	// ReplySize is the size of the stored reply in bytes; -1 if there is none.
	ReplySize int
	// Conflicts is how many conflicts are recorded for the key and not settled.
	Conflicts int
}

// Explain says in a few lines what e means and what will happen next. It shows
// the readable parts of the key, and neither fingerprint nor reply.
func (e Entry) Explain() string {
	var b strings.Builder
	fmt.Fprintf(&b, "key        %s\n", e.ID)
	if e.Key != (Key{}) {
		fmt.Fprintf(&b, "identity   tenant %q, consumer %q, source %q, id %q\n", e.Key.Tenant, e.Key.Consumer, e.Key.Source, e.Key.ID)
	}
	fmt.Fprintf(&b, "state      %s: %s\n", e.State, e.meaning())
	if e.Attempt > 0 {
		fmt.Fprintf(&b, "attempt    %d, fencing token %d, last holder %q\n", e.Attempt, e.Token, e.Holder)
	}
	for _, at := range [...]struct {
		name string
		time time.Time
	}{{"lease ends", e.LeaseUntil}, {"done at", e.DoneAt}, {"kept until", e.ExpiresAt}} {
		if !at.time.IsZero() {
			fmt.Fprintf(&b, "%-10s %s\n", at.name, at.time.UTC().Format(time.RFC3339Nano))
		}
	}
	if e.ReplySize >= 0 {
		fmt.Fprintf(&b, "reply      %d bytes\n", e.ReplySize)
	}
	if e.Conflicts > 0 {
		fmt.Fprintf(&b, "conflicts  %d: the identity came with other contents, which were not handled\n", e.Conflicts)
	}
	return b.String()
}

func (e Entry) meaning() string {
	switch e.State {
	case StateDone:
		return "handled; redeliveries are acknowledged without being handled again"
	case StateRunning:
		return "being handled now; redeliveries come back later"
	case StateFree:
		return "the last attempt failed; the next delivery is handled"
	case StateUnknown:
		return "an attempt ended without saying what came of it; the policy for unknown keys decides at the next delivery"
	case StateParked:
		return "an attempt ended without saying what came of it; nothing is handled until the key is released or forgotten"
	}
	return "not known to this version"
}

// Filter selects entries.
type Filter struct {
	// State is the state of the entries, or 0 beside InConflict. One of the
	// two is mandatory.
	State State
	// InConflict selects the keys with conflicts that nobody has settled.
	InConflict bool
	// After is Page.Next of the page before; empty for the first one.
	After string
	// Limit is how many entries a page has at most. Defaults to 100, the most
	// is 1,000.
	Limit int
}

// PageSize is Limit with its default and its bound.
func (f Filter) PageSize() int {
	if f.Limit <= 0 {
		return 100
	}
	return min(f.Limit, 1000)
}

// Check returns nil, or an error that matches ErrInvalidFilter.
func (f Filter) Check() error {
	known := f.State > 0 && int(f.State) < len(stateNames)
	if known == f.InConflict || f.State != 0 && !known {
		return fmt.Errorf("%w: it must name one state, or keys in conflict", ErrInvalidFilter)
	}
	return nil
}

// Page is a part of a list, in an order of the store's own.
type Page struct {
	Entries []Entry
	// Next continues the list; empty at its end. A page may be empty and have
	// a next one.
	Next string
}

// Counts are numbers that a store has without looking at every key. A number
// that it does not have is -1.
type Counts struct {
	// Done is an estimate. Expired keys that are not pruned yet count.
	Done int64
	// Running, Free, Unknown and Parked are counted up to CountCap, and
	// Conflicts, of conflicts that nobody has settled, as well.
	Running, Free, Unknown, Parked, Conflicts int64
}

// CountCap is where exact counts end: a number that is CountCap means that, or
// more.
const CountCap = 10_000

// ErrNotFound: the store holds nothing about the key.
var ErrNotFound = errors.New("dedupe: the key is not in the store")

// ErrInvalidFilter: the filter selects nothing that a store can list.
var ErrInvalidFilter = errors.New("dedupe: invalid filter")

// ErrWrongState: the key is not in a state that this is for.
var ErrWrongState = errors.New("dedupe: the key is in another state")

// Admin is for people, and the tools they work with, who look into a store.
// Nothing in it is for handlers. Its errors match ErrNotFound where a key is
// asked for that is not there. It is safe for concurrent use.
type Admin interface {
	// Find returns what the store holds about a key; [Key.Stored] is its id.
	Find(ctx context.Context, id KeyID) (Entry, error)
	// List returns the entries that a filter selects, page by page. An error
	// that matches ErrInvalidFilter says what is wrong with the filter.
	List(ctx context.Context, f Filter) (Page, error)
	// Release makes a key that is unknown or parked free: a person has made
	// sure that it had no effect, and the next delivery is handled as after an
	// attempt that has failed. Any other state is an error that matches
	// ErrWrongState, and nothing changes.
	Release(ctx context.Context, id KeyID) error
	// Evict forgets a key, whatever its state, and its conflicts: the next
	// delivery is handled. An owner that is running now loses its lease.
	Evict(ctx context.Context, id KeyID) error
	// Conflicts returns the conflicts of a key that nobody has settled, the
	// oldest first.
	Conflicts(ctx context.Context, id KeyID) ([]ConflictRecord, error)
	// Settle forgets the conflicts of a key, which holds it from then on only
	// as long as its retention says. It is no error if there are none.
	Settle(ctx context.Context, id KeyID) error
	// Counts returns numbers for a glance. It does not scan keys.
	Counts(ctx context.Context) (Counts, error)
}
