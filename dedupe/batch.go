package dedupe

import (
	"context"
	"errors"
	"fmt"
)

// Batcher is an optional power of a [Store]: it claims several keys in one
// transaction, which is several times faster than one for each. The store of a
// driver that is a [BatchDriver] has it.
type Batcher[S any] interface {
	// OnceEach claims the keys of all claims in one transaction, runs fn once
	// for all that are new, and makes fn's effects, the keys and the replies
	// durable together: all of them, or none.
	//
	// fresh are the indices of the claims that are new, in order; fn is not
	// called if there are none. Of several claims of one key the first is
	// fresh, and the others are judged by it. fn returns a reply for each of
	// fresh, or nil for none at all.
	//
	// With a nil error there is an Answer for every claim, in order. On an
	// error, one of those of Once, nothing is committed, whatever a single
	// claim would have been answered; fn may be the reason or just one of its
	// claims, and the caller may try fewer.
	OnceEach(ctx context.Context, claims []Claim, fn func(ctx context.Context, scope S, fresh []int) (replies [][]byte, err error)) ([]Answer, error)
}

// Answer is what one claim of several is answered.
type Answer struct {
	Result
	// Err is an error of this claim alone, that matches ErrInvalidKey or
	// ErrInvalidClaim; ErrUnavailable for a conflict that could not be
	// recorded; or what a [Guard] refuses a claim for, ErrWeakKey or
	// ErrRateLimited. Result is zero then, nothing of the claim is stored, and
	// the delivery must not be acknowledged.
	Err error
}

// BatchDriver is an optional power of a [TxDriver]. To its orders come:
//
//   - Claim in the order of [Key.Stored], whatever order the claims come in, so
//     that two batches never wait for each other.
type BatchDriver[Tx any] interface {
	// BeginBatch opens a transaction and claims the keys of claims in it, no
	// two of which are stored alike. It returns, for each claim, nil if the
	// transaction owns the key, or the record of the winner. If it owns none,
	// no transaction is left open, and Tx is not used.
	BeginBatch(ctx context.Context, claims []Claim) (Tx, []*Record, error)
	// CommitBatch is Commit for the claims that tx owns, with a reply for each.
	CommitBatch(ctx context.Context, tx Tx, claims []Claim, replies [][]byte) error
}

// txBatchStore is a txStore whose driver is a BatchDriver.
type txBatchStore[Tx any] struct {
	*txStore[Tx]
	batch BatchDriver[Tx]
}

type batchHandler[Tx any] = func(ctx context.Context, tx Tx, fresh []int) ([][]byte, error)

// OnceEach implements [Batcher].
func (s *txBatchStore[Tx]) OnceEach(ctx context.Context, claims []Claim, fn func(ctx context.Context, tx Tx, fresh []int) ([][]byte, error)) ([]Answer, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("dedupe: the context is done before the claims: %w", err)
	}
	return untilWon(ctx, s.txStore, func() ([]Answer, error) { return s.tryEach(ctx, newBatch(claims), fn) })
}

// batch are claims on their way through one transaction.
type batch struct {
	claims  []Claim // as the caller gave them, normal
	answers []Answer
	first   []int     // indices of the first claim of each key
	twins   [][2]int  // index of a later claim of a key, and of its first
	records []*Record // of the keys of first: the winner's, or in the end ours
	fresh   []int     // indices of claims whose key is ours
}

// newBatch sorts claims into those that can be stored, once each, and the rest.
func newBatch(claims []Claim) *batch {
	b := &batch{claims: make([]Claim, len(claims)), answers: make([]Answer, len(claims))}
	seen := make(map[KeyID]int, len(claims))
	for i, c := range claims {
		c, err := c.Normal()
		if err != nil {
			b.answers[i].Err = err
			continue
		}
		b.claims[i] = c
		if at, ok := seen[c.Key.Stored()]; ok {
			b.twins = append(b.twins, [2]int{i, at})
			continue
		}
		seen[c.Key.Stored()] = i
		b.first = append(b.first, i)
	}
	return b
}

// found notes who has the keys of first: nil for one that is ours.
func (b *batch) found(priors []*Record) {
	b.records = priors
	for n, i := range b.first {
		if priors[n] == nil {
			b.fresh = append(b.fresh, i)
		}
	}
}

// settle fills in what every claim is answered: what is ours is processed, and
// the others are judged by the record of who has their key.
func (b *batch) settle(replies [][]byte, judge func(c Claim, prior Record) Answer) {
	n := 0
	at := make(map[int]Record, len(b.first))
	for k, i := range b.first {
		if prior := b.records[k]; prior != nil {
			at[i] = *prior
			b.answers[i] = judge(b.claims[i], *prior)
			continue
		}
		b.answers[i].Result = Result{Outcome: Processed, Reply: replies[n]}
		at[i] = Record{Fingerprint: b.claims[i].Fingerprint, Fields: b.claims[i].Fields, Reply: replies[n]}
		n++
	}
	for _, t := range b.twins {
		b.answers[t[0]] = judge(b.claims[t[0]], at[t[1]])
	}
}

func (b *batch) of(indices []int) []Claim {
	claims := make([]Claim, len(indices))
	for n, i := range indices {
		claims[n] = b.claims[i]
	}
	return claims
}

// tryEach is one transaction.
func (s *txBatchStore[Tx]) tryEach(ctx context.Context, b *batch, fn batchHandler[Tx]) ([]Answer, error) {
	if len(b.first) == 0 {
		return b.answers, nil
	}
	tx, priors, err := s.batch.BeginBatch(ctx, b.of(b.first))
	if err != nil {
		return nil, s.storeFault(ctx, "claim", err)
	}
	b.found(priors)
	var replies [][]byte
	if len(b.fresh) > 0 {
		if replies, err = s.runEach(ctx, b, tx, fn); err != nil {
			return nil, err
		}
	}
	b.settle(replies, func(c Claim, prior Record) Answer { // now that nothing can be undone
		res, err := s.settled(ctx, c, prior)
		return Answer{Result: res, Err: err}
	})
	return b.answers, nil
}

// runEach runs fn in tx, which owns the fresh keys, and ends tx on every path.
func (s *txBatchStore[Tx]) runEach(ctx context.Context, b *batch, tx Tx, fn batchHandler[Tx]) (replies [][]byte, err error) {
	returned := false
	defer func() {
		if !returned {
			_ = s.rollback(ctx, tx) // the panic goes on, and says more
		}
	}()
	replies, err = fn(ctx, tx, b.fresh)
	returned = true
	if err == nil {
		replies, err = s.checkReplies(len(b.fresh), replies)
	}
	if err != nil {
		return nil, s.failed(ctx, tx, err)
	}
	return replies, s.committed(ctx, func(ctx context.Context) error {
		return s.batch.CommitBatch(ctx, tx, b.of(b.fresh), replies)
	})
}

// checkReplies returns a reply for each of fresh claims.
func (s *txStore[Tx]) checkReplies(fresh int, replies [][]byte) ([][]byte, error) {
	if replies == nil {
		replies = make([][]byte, fresh)
	}
	if len(replies) != fresh {
		return nil, fmt.Errorf("%w: it returned %d replies for %d claims", ErrScope, len(replies), fresh)
	}
	var errs []error
	for _, r := range replies {
		errs = append(errs, CheckReply(r, s.maxReply))
	}
	return replies, errors.Join(errs...)
}
