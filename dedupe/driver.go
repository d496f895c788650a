package dedupe

import (
	"context"
	"time"
)

// Record is what a store holds about a key that is done; of a lease that has
// not ended, its fingerprint and fields are enough.
type Record struct {
	// Fingerprint is the claim's, as the state machine handed it to the driver.
	Fingerprint [32]byte
	// Fields are the claim's; nil if the store keeps none.
	Fields []byte
	Reply  []byte
	// DoneAt is when the key was committed, by the store's clock, for people.
	DoneAt time.Time
}

// TxDriver is what a transactional store has to provide; [NewTxStore] makes a
// [Store] of it. Orders to whoever implements one:
//
//   - The claim is an insert that a unique constraint decides, the first
//     thing in the transaction. Never look first and insert later.
//   - Retry nothing. The caller does, by Classify.
//   - Bound every wait for a lock. A bound that ran out is ErrInProgress.
//   - All methods may be called concurrently for different transactions.
//   - Keep no argument after the method has returned.
//
// storetest.Run shows that a driver is right.
type TxDriver[Tx any] interface {
	// Begin opens a transaction and claims c.Key in it. It returns
	//
	//   - an open transaction that owns the key, a nil Record and no error; or
	//   - the Record of the winner, when the key is done, or
	//   - an error; ErrInProgress if another transaction holds the key and
	//     did not end within the driver's bound.
	//
	// In the last two cases no transaction is left open.
	Begin(ctx context.Context, c Claim) (Tx, *Record, error)
	// Commit stores reply with the key, unless it is nil, and commits. It
	// returns nil only if the server has said that the transaction is
	// committed; an error that matches ErrUnknownOutcome if it may be, and
	// ErrScope if the transaction is not the one that Begin opened any more,
	// or was aborted. A driver that sends its claim only now returns a *Taken
	// if the key turned out to be done. In any case the transaction is over,
	// its resources are released, and using it afterwards is an error.
	Commit(ctx context.Context, tx Tx, c Claim, reply []byte) error
	// Rollback ends the transaction without a trace, after a failed Commit
	// too, where it does nothing. An error that matches ErrScope means that
	// the handler had ended the transaction before; any other one that the
	// connection is gone, which undoes the transaction as well.
	Rollback(ctx context.Context, tx Tx) error
	// Conflict keeps a record of a claim that met its key with another
	// fingerprint: one for each key and fingerprint, however often it is
	// called.
	Conflict(ctx context.Context, r ConflictRecord) error
	// Classify says what an error of this driver's database means, whichever
	// wrapping a handler put around it. It judges what the database itself has
	// said, by its codes: an io.ErrUnexpectedEOF may as well be from a
	// payload that the handler failed to parse. The end of a context, and
	// nil, are ClassOther.
	Classify(err error) Class
}

// Explainer is an optional power of a [TxDriver] that sees what the handler's
// statements are answered. It makes the verdict on a handler independent of
// what the handler made of an error, be it a %v in its own text.
type Explainer[Tx any] interface {
	// Explain returns the error that tx has not recovered from, or nil if tx
	// is usable. It is called when the handler has failed, before Rollback.
	Explain(tx Tx) error
}

// Class says what to do about an error of the database.
type Class int

const (
	// ClassOther: the error is the statement's own.
	ClassOther Class = iota
	// ClassRetry: the transaction lost against another one (serialization
	// failure, deadlock, lock time-out). Run it again, at once.
	ClassRetry
	// ClassUnavailable: the database cannot be reached, is starting, stopping
	// or out of connections.
	ClassUnavailable
)

// Taken is the error of a [TxDriver]'s Commit that finds the key done. Nothing
// of the transaction is committed.
type Taken struct{ Record }

// Error says so.
func (*Taken) Error() string { return "dedupe: the key is done" }
