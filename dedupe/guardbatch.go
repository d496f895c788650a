package dedupe

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// guardBatch is a guard around a Batcher.
type guardBatch[S any] struct {
	*guard[S]
	batch Batcher[S]
}

// OnceEach implements [Batcher].
//
// Which keys are new shows only in the transaction that has claimed them, when
// those that are too many are among them. So a run that meets some is undone,
// and the others are claimed again without them. Each run has fewer claims than
// the one before, and there are hardly more than two: what a run has let through
// it has paid for.
func (g *guardBatch[S]) OnceEach(ctx context.Context, claims []Claim, fn func(ctx context.Context, scope S, fresh []int) ([][]byte, error)) ([]Answer, error) {
	answers := make([]Answer, len(claims))
	for i, c := range claims {
		answers[i].Err = g.check(c.Key)
	}
	q := newQuota(g.rates)
	defer q.giveBack()
	for range len(claims) + 1 {
		some, at := passing(claims, answers)
		got, err := g.batch.OnceEach(ctx, some, func(ctx context.Context, scope S, fresh []int) ([][]byte, error) {
			mine := make([]int, len(fresh))
			for n, i := range fresh {
				mine[n] = at[i]
			}
			if err := q.take(claims, mine); err != nil {
				return nil, err
			}
			return fn(ctx, scope, mine)
		})
		var over overRate
		switch {
		case errors.As(err, &over) && !errors.Is(err, ErrUnavailable):
			over.refuse(claims, answers)
			continue
		case err != nil:
			q.failed(err)
			return nil, err
		}
		for n, i := range at {
			answers[i] = got[n]
		}
		q.settle(claims, answers)
		return answers, nil
	}
	return nil, fmt.Errorf("%w: in every run of the batch", ErrRateLimited)
}

// passing are the claims without an answer, and where each stands.
func passing(claims []Claim, answers []Answer) (some []Claim, at []int) {
	for i, a := range answers {
		if a.Err == nil {
			some, at = append(some, claims[i]), append(at, i)
		}
	}
	return some, at
}

// overRate is why new keys of a batch are refused.
type overRate map[Key]error

func (overRate) Error() string { return ErrRateLimited.Error() }

// refuse answers for the claims of these keys: if one is refused, so are those
// that come after it.
func (o overRate) refuse(claims []Claim, answers []Answer) {
	for i, c := range claims {
		if err := o[c.Key]; err != nil && answers[i].Err == nil {
			answers[i].Err = err
		}
	}
}

// quota is what the new keys of one batch take of their tenants' rates. It is
// used by one goroutine at a time.
type quota struct {
	rates *rates // nil without a limit
	paid  map[Key]bool
	over  map[string]error // by tenant: one that is over its rate stays so for this batch
}

func newQuota(r *rates) *quota {
	return &quota{rates: r, paid: make(map[Key]bool), over: make(map[string]error)}
}

// take takes a token for each new key that has none yet. Of a tenant's new keys
// none is let through behind one that is refused, so their order stays. The
// error is nil or an overRate.
func (q *quota) take(claims []Claim, fresh []int) error {
	if q.rates == nil {
		return nil
	}
	refused := make(overRate)
	for _, i := range fresh {
		k := claims[i].Key
		if q.paid[k] {
			continue
		}
		if q.over[k.Tenant] == nil {
			q.over[k.Tenant] = limited(q.rates.take(k.Tenant, time.Now(), false))
		}
		if err := q.over[k.Tenant]; err != nil {
			refused[k] = err
			continue
		}
		q.paid[k] = true
	}
	if len(refused) > 0 {
		return refused
	}
	return nil
}

// limited is the error for a wait of a rate; nil if there is none.
func limited(wait time.Duration) error {
	if wait <= 0 {
		return nil
	}
	return fmt.Errorf("%w: the next one in %v", ErrRateLimited, wait.Round(time.Millisecond))
}

// settle keeps what was paid for keys that are done now: one that another
// transaction has done between two runs is a duplicate, and free.
func (q *quota) settle(claims []Claim, answers []Answer) {
	for i, a := range answers {
		if a.Outcome == Processed {
			delete(q.paid, claims[i].Key)
		}
	}
}

// failed keeps what was paid for keys that may be done. Nothing else of a batch
// that failed is: the caller tries fewer, and must not pay twice.
func (q *quota) failed(err error) {
	if errors.Is(err, ErrUnknownOutcome) {
		clear(q.paid)
	}
}

// giveBack gives back what was paid and not kept.
func (q *quota) giveBack() {
	for k := range q.paid {
		q.rates.give(k.Tenant)
	}
}
