package storetest

import (
	"context"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
)

// Open returns a harness around a new store that holds no keys. What it opens
// goes with tb.
type Open[S any] func(tb testing.TB, s Settings) Harness[S]

// Settings are what a case asks of the store that it is given.
type Settings struct {
	// Wait is how long a claim waits for another holder of the key.
	// 0 is the store's default, which must be at least a second.
	Wait time.Duration
	// Conns is how many connections the store may use. 0 is 8. A store
	// without connections ignores it.
	Conns int
}

// Harness is what the suite needs of a store and of the database behind it.
// All methods may be called concurrently.
type Harness[S any] interface {
	// Store returns the store, the same one at every call.
	Store() dedupe.Store[S]
	// Add writes one effect in scope. Effects of one name add up.
	Add(ctx context.Context, scope S, name string) error
	// Count returns how many effects of a name are committed.
	Count(tb testing.TB, name string) int
	// Conflicts returns how many conflicts are recorded.
	Conflicts(tb testing.TB) int
}

// Pooled is a harness whose store borrows connections.
type Pooled interface {
	// InUse returns how many connections are not idle in the pool.
	InUse() int
}

// Retrier is a harness whose database may end a transaction because of another.
type Retrier interface {
	// Lost returns an error such as a statement ends with in a transaction
	// that lost against another one.
	Lost() error
}

// Aborter is a harness whose database makes a transaction unusable when a
// statement fails.
type Aborter[S any] interface {
	// Abort makes a statement fail in scope so that nothing in it can be
	// committed any more, and returns its error.
	Abort(ctx context.Context, scope S) error
}

// Ender is a harness whose scope lets a handler end the transaction.
type Ender[S any] interface {
	// Ends returns the ways to do it.
	Ends() []End[S]
}

// End is a way to end a transaction from within. Whether it works or is refused
// is the store's business.
type End[S any] struct {
	Name string
	Do   func(ctx context.Context, scope S) error
}

// Cutter is a harness that can lose the answer to a commit.
type Cutter interface {
	// CutCommit makes the next commit's answer get lost: after the commit was
	// applied, or before it reached the server.
	CutCommit(applied bool)
}

// Breaker is a harness whose store can be made unreachable.
type Breaker interface {
	// Break ends all connections, and refuses new ones.
	Break()
	// Mend lets connections through again.
	Mend()
}

// Pruner is a harness whose store keeps keys beyond their retention until it is
// pruned.
type Pruner interface {
	// Prune deletes what has expired, and returns how many keys that were.
	Prune(tb testing.TB) int
}

// Administered is a harness whose store lets people look into it.
type Administered interface {
	Admin() dedupe.Admin
}

// ClaimLog is a harness that can see in which order keys are stored.
type ClaimLog interface {
	// LogClaims begins to note them. The function that it returns returns the
	// ids of those that were committed since, in the order in which they were
	// stored.
	LogClaims(tb testing.TB) (claimed func() []dedupe.KeyID)
}

// Eager is a harness whose store asks the handler for statements before it
// claims the key: the handler runs for a duplicate, too, has no effect then,
// and holds nothing while it runs.
type Eager interface {
	// Eager does nothing.
	Eager()
}
