package dedupe

import (
	"context"
	"fmt"
)

// Placer is an optional power of a [Store]: it keeps the position of a partition
// with the effects, one row for each partition and consumer, instead of a key for
// each event. The store of a driver that is a [PlaceDriver] has it.
//
// It is for a log whose order is its identity, and asks for that order: whoever
// calls it must never leave a record out that is to be handled later, for what is
// below the position is done.
type Placer[S any] interface {
	// OnceAt locks the position of p, runs fn once for all places that are not
	// done, and makes fn's effects and the position behind the last place
	// durable together: all of it, or none. places ascend.
	//
	// claims are none, or one for each place. With claims, keys are recorded as
	// well, as OnceEach does it: an event that a producer has sent twice has two
	// places and one key, and is a Duplicate at the second one, too.
	//
	// fresh are the indices of the places that fn is to handle, in order; fn is
	// not called if there are none. fn returns a reply for each of fresh, or nil
	// for none at all. A reply is kept with its key; without claims nobody gets
	// it again.
	//
	// With a nil error there is an Answer for every place, in order, whose Err is
	// nil. A place that is done is a Duplicate without a reply. On an error
	// nothing is committed, whatever a single place would have been answered.
	// Beside the errors of Once there are:
	//
	//   - ErrInProgress: another transaction holds the position, as when two
	//     members of a group believe that a partition is theirs.
	//   - ErrLogReplaced: p is not the log that it was. fn did not run.
	//   - ErrInvalidClaim: a place is negative or not behind the one before, or
	//     p or a claim cannot be stored; a claim may be ErrInvalidKey, too.
	OnceAt(ctx context.Context, p Partition, places []Place, claims []Claim,
		fn func(ctx context.Context, scope S, fresh []int) (replies [][]byte, err error)) ([]Answer, error)
}

// PlaceDriver is an optional power of a [TxDriver]. To its orders come:
//
//   - Lock the position before anything is read from it, so that of two
//     transactions on one partition the second sees what the first has done.
type PlaceDriver[Tx any] interface {
	// BeginAt opens a transaction, locks the position of p in it until it ends,
	// and returns it; where there is none, it is created, with a Next of 0. The
	// error is ErrInProgress if another transaction holds it and did not end
	// within the driver's bound. After an error no transaction is left open.
	BeginAt(ctx context.Context, p Partition) (Tx, Position, error)
	// ClaimAt claims keys in tx, no two of which are stored alike, in the order
	// of [Key.Stored]. It returns, for each claim, nil if the transaction owns
	// the key, or the record of the winner. After an error the caller rolls
	// back.
	ClaimAt(ctx context.Context, tx Tx, claims []Claim) ([]*Record, error)
	// CommitAt stores a, and commits as [TxDriver] Commit does.
	CommitAt(ctx context.Context, tx Tx, a Advance) error
}

// txPlacer is what a txStore whose driver is a PlaceDriver has more.
type txPlacer[Tx any] struct {
	store  *txStore[Tx]
	driver PlaceDriver[Tx]
}

// OnceAt implements [Placer].
func (p *txPlacer[Tx]) OnceAt(ctx context.Context, at Partition, places []Place, claims []Claim,
	fn func(ctx context.Context, tx Tx, fresh []int) ([][]byte, error)) ([]Answer, error) {
	if err := at.Validate(); err != nil {
		return nil, err
	}
	places, err := checkPlaces(places)
	if err != nil {
		return nil, err
	}
	normal, err := normalEach(claims, len(places))
	switch {
	case err != nil:
		return nil, err
	case len(places) == 0:
		return nil, nil
	case ctx.Err() != nil:
		return nil, fmt.Errorf("dedupe: the context is done before the claim: %w", ctx.Err())
	}
	return untilWon(ctx, p.store, func() ([]Answer, error) { return p.try(ctx, at, places, normal, fn) })
}

// normalEach returns claims as stores keep them. One that cannot be stored is an
// error of all: the position must not pass it, and what is behind it would.
func normalEach(claims []Claim, places int) ([]Claim, error) {
	if n := len(claims); n > 0 && n != places {
		return nil, fmt.Errorf("%w: there are %d claims for %d places", ErrInvalidClaim, n, places)
	}
	normal := make([]Claim, len(claims))
	for i, c := range claims {
		var err error
		if normal[i], err = c.Normal(); err != nil {
			return nil, err
		}
	}
	return normal, nil
}

// try is one transaction.
func (p *txPlacer[Tx]) try(ctx context.Context, at Partition, places []Place, claims []Claim, fn batchHandler[Tx]) ([]Answer, error) {
	tx, from, err := p.driver.BeginAt(ctx, at)
	if err != nil {
		return nil, p.store.storeFault(ctx, "lock the position", err)
	}
	over := false
	defer func() {
		if !over {
			_ = p.store.rollback(ctx, tx) // what ends it says more
		}
	}()
	from.Partition = at
	done, err := from.split(places)
	if err != nil {
		return nil, err
	}
	s := newStep(len(places), done)
	if done == len(places) {
		return s.answers, nil
	}
	if err := p.claim(ctx, s, tx, claims); err != nil {
		return nil, p.store.storeFault(ctx, "claim", err)
	}
	replies, err := p.run(ctx, s, tx, fn)
	if err != nil {
		over = true
		return nil, p.store.failed(ctx, tx, err)
	}
	s.settle(replies)
	over = true
	return s.answers, p.store.committed(ctx, func(ctx context.Context) error {
		return p.driver.CommitAt(ctx, tx, s.advance(from.past(places[done:]), replies))
	})
}

// step is what one transaction finds and does.
type step struct {
	done    int      // places that were done before
	fresh   []int    // indices of the places to handle
	answers []Answer // of all places
	b       *batch   // of the claims of the places that were not done; nil without keys

	conflicts []ConflictRecord
}

func newStep(n, done int) *step {
	s := &step{done: done, answers: make([]Answer, n)}
	for i := range n {
		s.answers[i].Outcome = Duplicate
		if i >= done {
			s.fresh = append(s.fresh, i)
		}
	}
	return s
}

// claim claims the keys of the places that are not done, if there are keys.
func (p *txPlacer[Tx]) claim(ctx context.Context, s *step, tx Tx, claims []Claim) error {
	if len(claims) == 0 {
		return nil
	}
	s.b = newBatch(claims[s.done:])
	priors, err := p.driver.ClaimAt(ctx, tx, s.b.of(s.b.first))
	if err != nil {
		return err
	}
	s.b.found(priors)
	s.fresh = nil
	for _, i := range s.b.fresh {
		s.fresh = append(s.fresh, s.done+i)
	}
	return nil
}

// run runs fn for what is fresh.
func (p *txPlacer[Tx]) run(ctx context.Context, s *step, tx Tx, fn batchHandler[Tx]) ([][]byte, error) {
	if len(s.fresh) == 0 {
		return nil, nil
	}
	replies, err := fn(ctx, tx, s.fresh)
	if err != nil {
		return nil, err
	}
	return p.store.checkReplies(len(s.fresh), replies)
}

// settle fills in what every place is answered, and collects the conflicts. They
// are recorded in the transaction: the position passes them, so nobody would
// come back to record them later.
func (s *step) settle(replies [][]byte) {
	if s.b == nil {
		for n, i := range s.fresh {
			s.answers[i].Result = Result{Outcome: Processed, Reply: replies[n]}
		}
		return
	}
	s.b.settle(replies, s.judge)
	copy(s.answers[s.done:], s.b.answers)
}

// judge answers a claim whose key another one has.
func (s *step) judge(c Claim, prior Record) Answer {
	if c.Fingerprint == prior.Fingerprint {
		return Answer{Result: Result{Outcome: Duplicate, Reply: prior.Reply}}
	}
	s.conflicts = append(s.conflicts, NewConflictRecord(c, prior))
	return Answer{Result: Result{Outcome: Conflict}}
}

func (s *step) advance(to Position, replies [][]byte) Advance {
	a := Advance{To: to, Conflicts: s.conflicts}
	if s.b != nil {
		a.Claims, a.Replies = s.b.of(s.b.fresh), replies
	}
	return a
}
