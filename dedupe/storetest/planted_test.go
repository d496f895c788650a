package storetest_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/memharness"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/dedupe/storetest"
	"github.com/unecho/unecho/internal/planted"
)

type (
	tx     = *memdedupe.Tx
	driver = memharness.TxDriver
	store  = dedupe.Store[tx]
)

// plants are the bugs that the suite has to catch, each with the case that has
// to do it.
var plants = []struct {
	bug, by string
	build   func(d driver) store
}{
	{"key stored before the handler and never released", "handler error", keyBeforeHandler},
	{"key in a transaction of its own", "B33 commit lost on its way", keyApart},
	{"key inserted after the handler", "B24 32 copies on 8 connections", lookThenInsert},
	{"commit error taken for success", "B33 commit lost on its way", tx1(func(d driver) driver { return commitIsSuccess{d} })},
	{"commit error taken for failure", "B33 commit applied, answer lost", tx1(func(d driver) driver { return commitIsFailure{d} })},
	{"unknown commit run again at once", "B33 commit lost on its way", unknownRunAgain},
	{"consumer missing from the key", "B05 two consumers", rekey(func(k *dedupe.Key) { k.Consumer = "any" })},
	{"tenant missing from the key", "two tenants", rekey(func(k *dedupe.Key) { k.Tenant = "" })},
	{"source missing from the key", "B04 two sources", rekey(func(k *dedupe.Key) { k.Source = "" })},
	{"parts of the key joined by a colon", "B03 separators in parts", rekey(func(k *dedupe.Key) { k.Source, k.ID = "", k.Source+":"+k.ID })},
	{"long ids cut off", "B06 B07 long and odd ids", rekey(func(k *dedupe.Key) { k.ID = k.ID[:min(255, len(k.ID))] })},
	{"fingerprint not compared", "conflict", tx1(func(d driver) driver { return noFingerprint{d} })},
	{"conflict recorded at every copy", "conflict", tx1(func(d driver) driver { return everyConflict{d, new(counter)} })},
	{"conflict not recorded", "conflict", tx1(func(d driver) driver { return noConflict{d} })},
	{"fields not kept", "B14 a conflict names the fields that differ", tx1(func(d driver) driver { return noFields{d} })},
	{"reply of a failed attempt", "a reply is that of the attempt that was committed", failedReplies},
	{"long reply cut off", "a reply over the cap is refused whole", truncated},
	{"fail open", "store unreachable", failOpen},
	{"reply not kept", "duplicate", tx1(func(d driver) driver { return noReply{d} })},
	{"empty reply kept as nil", "reply byte for byte", tx1(func(d driver) driver { return emptyIsNil{d} })},
	{"runs share one transaction", "B35 lost races are run again", sharedTransaction},
	{"lost races run again for ever", "B35 lost races are bounded", runsForEver},
	{"in progress taken for done", "in progress", tx1(func(d driver) driver { return progressIsDone{d} })},
	{"done taken for in progress", "duplicate", tx1(func(d driver) driver { return doneIsProgress{d} })},
	{"keys expire early", "expired key is new", rekeyClaim(func(c *dedupe.Claim) { c.Retain = time.Millisecond })},
	{"swallowed error taken for success", "B34 swallowed SQL error", tx1(func(d driver) driver { return scopeIsFine{d} })},
	{"transaction ended by the handler taken for success", "B34 handler ends the transaction", tx1(func(d driver) driver { return scopeIsFine{d} })},
	{"no rollback after a panic", "handler panic", noDefer},
	{"no rollback after Goexit", "handler Goexit", noDefer},
	{"handler's slowness taken for an outage", "handler context ends", slowIsOutage},
	{"commit under the handler's context", "context ends after the work", commitUnderContext},
}

func TestPlanted(t *testing.T) {
	for _, p := range plants {
		caught(t, p.bug, p.by, p.build)
	}
}

// caught demands that a case of the suite fails for a store that is broken.
func caught(t *testing.T, bug, by string, build func(d driver) store) {
	t.Helper()
	t.Run(bug, func(t *testing.T) {
		for _, c := range storetest.Cases[tx]() {
			if c.Name == by {
				planted.Caught(t, "storetest/"+bug, func(tb testing.TB) {
					c.Run(tb, func(_ testing.TB, s storetest.Settings) storetest.Harness[tx] { return memharness.New(s, build) })
				})
				return
			}
		}
		t.Fatalf("the suite has no case %q", by)
	})
}

// TestUnbroken: the harness of the planted bugs passes without one.
func TestUnbroken(t *testing.T) { storetest.Run(t, memharness.Open) }

// tx1 puts a broken driver behind the real state machine.
func tx1(broken func(d driver) driver) func(d driver) store {
	return func(d driver) store { return dedupe.NewTxStore(broken(d), nil) }
}

type once = func(ctx context.Context, c dedupe.Claim, fn func(context.Context, tx) ([]byte, error)) (dedupe.Result, error)

// storeFunc is a whole store in one function.
type storeFunc once

func (f storeFunc) Once(ctx context.Context, c dedupe.Claim, fn func(context.Context, tx) ([]byte, error)) (dedupe.Result, error) {
	return f(ctx, c, fn)
}

// keyBeforeHandler commits the key, then runs the handler.
func keyBeforeHandler(d driver) store {
	st := dedupe.NewTxStore(d, nil)
	return storeFunc(func(ctx context.Context, c dedupe.Claim, fn func(context.Context, tx) ([]byte, error)) (dedupe.Result, error) {
		res, err := st.Once(ctx, c, func(context.Context, tx) ([]byte, error) { return nil, nil })
		if err != nil || res.Outcome != dedupe.Processed {
			return res, err
		}
		c.Key.Consumer += " effects"
		return st.Once(ctx, c, fn)
	})
}

// keyApart has the key in one transaction and the effect in another, and
// releases the key when the handler fails.
func keyApart(d driver) store {
	return dedupe.NewTxStore(&keyApartDriver{driver: d, keys: memdedupe.NewDriver(nil), owner: map[tx]tx{}}, nil)
}

type keyApartDriver struct {
	driver
	keys  *memdedupe.Driver
	mu    sync.Mutex
	owner map[tx]tx // of a scope, the transaction that holds the key
}

func (d *keyApartDriver) Begin(ctx context.Context, c dedupe.Claim) (tx, *dedupe.Record, error) {
	key, prior, err := d.keys.Begin(ctx, c)
	if err != nil || prior != nil {
		return nil, prior, err
	}
	scope, prior, err := d.driver.Begin(ctx, c)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.owner[scope] = key
	return scope, prior, err
}

func (d *keyApartDriver) key(scope tx) tx {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.owner[scope]
}

func (d *keyApartDriver) Commit(ctx context.Context, scope tx, c dedupe.Claim, reply []byte) error {
	if err := d.keys.Commit(ctx, d.key(scope), c, reply); err != nil {
		return err
	}
	return d.driver.Commit(ctx, scope, c, reply)
}

func (d *keyApartDriver) Rollback(ctx context.Context, scope tx) error {
	_ = d.keys.Rollback(ctx, d.key(scope))
	return d.driver.Rollback(ctx, scope)
}

// lookThenInsert asks whether the key is there, runs the handler, and inserts
// the key in the same transaction as the effect.
func lookThenInsert(d driver) store {
	done := memdedupe.NewDriver(nil)
	var n counter
	return storeFunc(func(ctx context.Context, c dedupe.Claim, fn func(context.Context, tx) ([]byte, error)) (dedupe.Result, error) {
		key, prior, err := done.Begin(ctx, c)
		if err != nil {
			return dedupe.Result{}, err
		}
		if prior != nil {
			return dedupe.Result{Outcome: dedupe.Duplicate, Reply: prior.Reply}, nil
		}
		_ = done.Rollback(ctx, key)
		own := c
		own.Key.ID = n.next()
		res, err := dedupe.NewTxStore(d, nil).Once(ctx, own, fn)
		if err != nil {
			return res, err
		}
		if key, prior, _ := done.Begin(ctx, c); prior == nil {
			return res, done.Commit(ctx, key, c, res.Reply)
		}
		return res, nil
	})
}

type commitIsSuccess struct{ driver }

func (d commitIsSuccess) Commit(ctx context.Context, scope tx, c dedupe.Claim, reply []byte) error {
	_ = d.driver.Commit(ctx, scope, c, reply)
	return nil
}

type commitIsFailure struct{ driver }

func (d commitIsFailure) Commit(ctx context.Context, scope tx, c dedupe.Claim, reply []byte) error {
	if d.driver.Commit(ctx, scope, c, reply) != nil {
		return errors.New("commit failed")
	}
	return nil
}

func unknownRunAgain(d driver) store {
	st := dedupe.NewTxStore(d, nil)
	return storeFunc(func(ctx context.Context, c dedupe.Claim, fn func(context.Context, tx) ([]byte, error)) (dedupe.Result, error) {
		res, err := st.Once(ctx, c, fn)
		if errors.Is(err, dedupe.ErrUnknownOutcome) {
			return st.Once(ctx, c, fn)
		}
		return res, err
	})
}

// rekey changes the key under which a claim is stored.
func rekey(change func(k *dedupe.Key)) func(d driver) store {
	return rekeyClaim(func(c *dedupe.Claim) { change(&c.Key) })
}

func rekeyClaim(change func(c *dedupe.Claim)) func(d driver) store {
	return tx1(func(d driver) driver { return rekeyed{d, change} })
}

type rekeyed struct {
	driver
	change func(c *dedupe.Claim)
}

func (d rekeyed) Begin(ctx context.Context, c dedupe.Claim) (tx, *dedupe.Record, error) {
	d.change(&c)
	return d.driver.Begin(ctx, c)
}

func (d rekeyed) Commit(ctx context.Context, scope tx, c dedupe.Claim, reply []byte) error {
	d.change(&c)
	return d.driver.Commit(ctx, scope, c, reply)
}

type noFingerprint struct{ driver }

func (d noFingerprint) Begin(ctx context.Context, c dedupe.Claim) (tx, *dedupe.Record, error) {
	scope, prior, err := d.driver.Begin(ctx, c)
	if prior != nil {
		prior.Fingerprint = c.Fingerprint
	}
	return scope, prior, err
}

type everyConflict struct {
	driver
	n *counter
}

func (d everyConflict) Conflict(ctx context.Context, r dedupe.ConflictRecord) error {
	r.Fingerprint = dedupe.Fingerprint(r.Key, []byte(d.n.next()))
	return d.driver.Conflict(ctx, r)
}

type noConflict struct{ driver }

func (noConflict) Conflict(context.Context, dedupe.ConflictRecord) error { return nil }

type noFields struct{ driver }

func (d noFields) Begin(ctx context.Context, c dedupe.Claim) (tx, *dedupe.Record, error) {
	scope, prior, err := d.driver.Begin(ctx, c)
	if prior != nil {
		prior.Fields = nil
	}
	return scope, prior, err
}

// failedReplies wraps a store so that a duplicate is answered with the first
// reply that any attempt has returned.
func failedReplies(d driver) store {
	st := dedupe.NewTxStore(d, nil)
	var mu sync.Mutex
	first := map[dedupe.Key][]byte{}
	return storeFunc(func(ctx context.Context, c dedupe.Claim, fn func(context.Context, tx) ([]byte, error)) (dedupe.Result, error) {
		res, err := st.Once(ctx, c, func(ctx context.Context, scope tx) ([]byte, error) {
			reply, err := fn(ctx, scope)
			mu.Lock()
			defer mu.Unlock()
			if _, ok := first[c.Key]; !ok {
				first[c.Key] = reply
			}
			return reply, err
		})
		mu.Lock()
		defer mu.Unlock()
		if res.Outcome == dedupe.Duplicate {
			res.Reply = first[c.Key]
		}
		return res, err
	})
}

// truncated keeps what fits.
func truncated(d driver) store {
	st := dedupe.NewTxStore(d, nil)
	return storeFunc(func(ctx context.Context, c dedupe.Claim, fn func(context.Context, tx) ([]byte, error)) (dedupe.Result, error) {
		return st.Once(ctx, c, func(ctx context.Context, scope tx) ([]byte, error) {
			reply, err := fn(ctx, scope)
			return reply[:min(len(reply), dedupe.DefaultMaxReply)], err
		})
	})
}

// failOpen runs the handler when the store does not answer.
func failOpen(d driver) store {
	st := dedupe.NewTxStore(d, nil)
	return storeFunc(func(ctx context.Context, c dedupe.Claim, fn func(context.Context, tx) ([]byte, error)) (dedupe.Result, error) {
		res, err := st.Once(ctx, c, fn)
		if errors.Is(err, dedupe.ErrUnavailable) {
			reply, err := fn(ctx, nil)
			return dedupe.Result{Outcome: dedupe.Processed, Reply: reply}, err
		}
		return res, err
	})
}

type noReply struct{ driver }

func (d noReply) Commit(ctx context.Context, scope tx, c dedupe.Claim, _ []byte) error {
	return d.driver.Commit(ctx, scope, c, nil)
}

type emptyIsNil struct{ driver }

func (d emptyIsNil) Commit(ctx context.Context, scope tx, c dedupe.Claim, reply []byte) error {
	if len(reply) == 0 {
		reply = nil
	}
	return d.driver.Commit(ctx, scope, c, reply)
}

// sharedTransaction runs a handler up to three times in one transaction.
func sharedTransaction(d driver) store {
	st := dedupe.NewTxStore(d, nil)
	return storeFunc(func(ctx context.Context, c dedupe.Claim, fn func(context.Context, tx) ([]byte, error)) (dedupe.Result, error) {
		return st.Once(ctx, c, func(ctx context.Context, scope tx) (reply []byte, err error) {
			for range 3 {
				if reply, err = fn(ctx, scope); err == nil {
					break
				}
			}
			return reply, err
		})
	})
}

func runsForEver(d driver) store {
	return dedupe.NewTxStore(d, &dedupe.TxOptions{Retries: 30})
}

type progressIsDone struct{ driver }

func (d progressIsDone) Begin(ctx context.Context, c dedupe.Claim) (tx, *dedupe.Record, error) {
	scope, prior, err := d.driver.Begin(ctx, c)
	if errors.Is(err, dedupe.ErrInProgress) {
		return nil, &dedupe.Record{Fingerprint: c.Fingerprint}, nil
	}
	return scope, prior, err
}

type doneIsProgress struct{ driver }

func (d doneIsProgress) Begin(ctx context.Context, c dedupe.Claim) (tx, *dedupe.Record, error) {
	scope, prior, err := d.driver.Begin(ctx, c)
	if prior != nil {
		return nil, nil, dedupe.ErrInProgress
	}
	return scope, prior, err
}

// scopeIsFine does not look at what became of the transaction.
type scopeIsFine struct{ driver }

func (d scopeIsFine) Commit(ctx context.Context, scope tx, c dedupe.Claim, reply []byte) error {
	if err := d.driver.Commit(ctx, scope, c, reply); !errors.Is(err, dedupe.ErrScope) {
		return err
	}
	return nil
}

// byHand is the sequence of a transaction without the state machine's care.
func byHand(d driver, end func(ctx context.Context, scope tx, err error) error) store {
	return storeFunc(func(ctx context.Context, c dedupe.Claim, fn func(context.Context, tx) ([]byte, error)) (dedupe.Result, error) {
		scope, prior, err := d.Begin(ctx, c)
		if err != nil {
			return dedupe.Result{}, err
		}
		if prior != nil {
			return dedupe.Result{Outcome: dedupe.Duplicate, Reply: prior.Reply}, nil
		}
		reply, err := fn(ctx, scope)
		if err = end(ctx, scope, err); err != nil {
			_ = d.Rollback(ctx, scope)
			return dedupe.Result{}, err
		}
		return dedupe.Result{Outcome: dedupe.Processed, Reply: reply}, d.Commit(ctx, scope, c, reply)
	})
}

func noDefer(d driver) store {
	return byHand(d, func(_ context.Context, _ tx, err error) error { return err })
}

func slowIsOutage(d driver) store {
	return byHand(d, func(ctx context.Context, _ tx, err error) error {
		if ctx.Err() != nil {
			return errors.Join(dedupe.ErrUnavailable, err)
		}
		return err
	})
}

func commitUnderContext(d driver) store {
	return byHand(d, func(ctx context.Context, _ tx, err error) error { return errors.Join(err, ctx.Err()) })
}

// counter makes names that are not taken.
type counter struct {
	mu sync.Mutex
	n  int
}

func (c *counter) next() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
	return strconv.Itoa(c.n)
}
