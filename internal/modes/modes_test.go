package modes

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/planted"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	seed   = 1
	length = 300
)

// groups wait until they are full: the history is there before the run begins,
// so only the last one of a lane waits for as long as this.
var groups = consumer.Batch{Max: 16, Wait: 100 * time.Millisecond}

func oneByOne(h func(e *env) consumer.Handler) mode {
	return mode{name: "one by one", handler: h}
}

func grouped(h func(e *env) consumer.Handler) mode {
	return mode{name: "group commit", batch: groups, handler: h}
}

func setBased(h func(e *env) consumer.Handler) mode {
	return mode{name: "set-based", batch: groups, handler: h}
}

// leased brings the effect of what fails twice about again, twice.
func leased(h func(e *env) consumer.Handler) mode {
	return mode{name: "lease", repeats: failures, handler: h}
}

func wrap(e *env) consumer.Handler {
	return consumer.Wrap("billing", e.watched(), e.effect, nil)
}

func wrapBatch(e *env) consumer.Handler {
	return consumer.WrapBatch("billing", e.watched(), e.effects, nil)
}

func lease(e *env) consumer.Handler {
	return consumer.Wrap("billing", e.leases(), e.leased(derived), nil)
}

func derived(l *dedupe.Lease) string { return l.Derive("effect", 0) }

// One history has one result, however its keys are held.
func TestModes(t *testing.T) {
	h := newHistory(seed, length)
	for _, m := range []mode{
		oneByOne(wrap),
		grouped(wrap),
		setBased(wrapBatch),
		leased(lease),
	} {
		t.Run(m.name, func(t *testing.T) {
			e := m.check(t, h)
			if m.batch.Max > 0 && (e.twins.Load() == 0 || e.conflicts.Load() == 0) {
				t.Errorf("%d twins and %d conflicts met in one group: the history shows nothing about groups", e.twins.Load(), e.conflicts.Load())
			}
			t.Logf("MODES %s: deliveries=%d twins=%d conflicts=%d in one group", m.name, len(h), e.twins.Load(), e.conflicts.Load())
		})
	}
}

// batched is the store of both Wrap and groups.
type batched interface {
	dedupe.Store[pgx.Tx]
	dedupe.Batcher[pgx.Tx]
}

func (e *env) store() batched { return pgdedupe.NewStore(e.pool, nil).(batched) }

func (e *env) leases() dedupe.Store[*dedupe.Lease] { return pgdedupe.NewLeaseStore(e.pool, nil) }

// watched counts what meets in one group.
func (e *env) watched() renamed {
	return renamed{e.store(), func(claims []dedupe.Claim) []dedupe.Claim {
		first := map[dedupe.Key][32]byte{}
		for _, c := range claims {
			f, met := first[c.Key]
			switch {
			case !met:
				first[c.Key] = c.Fingerprint
			case f == c.Fingerprint:
				e.twins.Add(1)
			default:
				e.conflicts.Add(1)
			}
		}
		return claims
	}}
}

// renamed sees the claims before its store does, and may change them.
type renamed struct {
	batched
	rename func(claims []dedupe.Claim) []dedupe.Claim
}

func (s renamed) Once(ctx context.Context, c dedupe.Claim, fn func(context.Context, pgx.Tx) ([]byte, error)) (dedupe.Result, error) {
	return s.batched.Once(ctx, s.rename([]dedupe.Claim{c})[0], fn)
}

func (s renamed) OnceEach(ctx context.Context, claims []dedupe.Claim, fn func(context.Context, pgx.Tx, []int) ([][]byte, error)) ([]dedupe.Answer, error) {
	return s.batched.OnceEach(ctx, s.rename(claims), fn)
}

// perContent makes an event of every content of an identity, so a conflict runs.
func perContent(claims []dedupe.Claim) []dedupe.Claim {
	claims = slices.Clone(claims)
	for i := range claims {
		claims[i].Key.ID += hex.EncodeToString(claims[i].Fingerprint[:])
	}
	return claims
}

// apart does not see that two claims of one group are of one event, if their
// contents are alike, or if they are not.
func apart(alike bool) func(claims []dedupe.Claim) []dedupe.Claim {
	return func(claims []dedupe.Claim) []dedupe.Claim {
		claims = slices.Clone(claims)
		first := map[dedupe.Key][32]byte{}
		for i, c := range claims {
			f, met := first[c.Key]
			switch {
			case !met:
				first[c.Key] = c.Fingerprint
			case (f == c.Fingerprint) == alike:
				claims[i].Key.ID += fmt.Sprintf(" again %d", i)
			}
		}
		return claims
	}
}

// again runs a duplicate. Under a lease that leaves no second effect behind, only
// a mark that was met twice.
type again struct{ dedupe.Store[*dedupe.Lease] }

func (s again) Once(ctx context.Context, c dedupe.Claim, fn func(context.Context, *dedupe.Lease) ([]byte, error)) (dedupe.Result, error) {
	res, err := s.Store.Once(ctx, c, fn)
	if err == nil && res.Outcome == dedupe.Duplicate {
		_, err = fn(ctx, &dedupe.Lease{Key: c.Key})
	}
	return res, err
}

func rerun(e *env) consumer.Handler {
	return consumer.Wrap("billing", again{e.leases()}, e.leased(derived), nil)
}

// underived names its effect anew at every attempt.
func underived(e *env) consumer.Handler {
	return consumer.Wrap("billing", e.leases(), e.leased(func(*dedupe.Lease) string { return rand.Text() }), nil)
}

// twinInSet hands both of two twins to one statement.
func twinInSet(e *env) consumer.Handler {
	return consumer.WrapBatch("billing", renamed{e.store(), apart(true)}, e.effects, nil)
}

// backwards gives the events of a group to the handler from the last to the first.
func backwards(e *env) consumer.Handler {
	return consumer.WrapBatch("billing", e.store(), func(ctx context.Context, tx pgx.Tx, ms []*envelope.Message) error {
		ms = slices.Clone(ms)
		slices.Reverse(ms)
		return e.effects(ctx, tx, ms)
	}, nil)
}

// elsewhere has its effect on a connection that is not the transaction's.
func elsewhere(e *env) consumer.Handler {
	return consumer.Wrap("billing", e.store(), func(ctx context.Context, _ pgx.Tx, m *envelope.Message) error {
		return e.effectBy(ctx, e.outside, m)
	}, nil)
}

// unrecorded takes a conflict for a duplicate.
func unrecorded(e *env) consumer.Handler {
	return consumer.Wrap("billing", e.store(), e.effect, &consumer.Options{Content: consumer.NoContent})
}

// swallowing acknowledges what it cannot read.
func swallowing(e *env) consumer.Handler {
	h := wrap(e)
	return consumer.HandlerFunc(func(ctx context.Context, m *envelope.Message) error {
		if err := h.Handle(ctx, m); !errors.Is(err, envelope.ErrMalformed) {
			return err
		}
		return nil
	})
}

// A mode with a bug has another result.
func TestPlanted(t *testing.T) {
	h := newHistory(seed, length)
	renaming := func(rename func([]dedupe.Claim) []dedupe.Claim) func(e *env) consumer.Handler {
		return func(e *env) consumer.Handler {
			return consumer.Wrap("billing", renamed{e.store(), rename}, e.effect, nil)
		}
	}
	for name, m := range map[string]mode{
		"conflict runs":                  oneByOne(renaming(perContent)),
		"conflict runs in its group":     grouped(renaming(apart(false))),
		"twin runs twice":                grouped(renaming(apart(true))),
		"twin twice in a set":            setBased(twinInSet),
		"twin runs under a lease":        leased(rerun),
		"set out of order":               setBased(backwards),
		"effect outside the transaction": oneByOne(elsewhere),
		"conflict unrecorded":            oneByOne(unrecorded),
		"malformed acknowledged":         oneByOne(swallowing),
		"key not derived":                leased(underived),
	} {
		t.Run(name, func(t *testing.T) {
			planted.Caught(t, "modes/"+name, func(tb testing.TB) { m.check(tb, h) })
		})
	}
}
