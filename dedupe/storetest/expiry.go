package storetest

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
)

func expiryCases[S any]() []Case[S] {
	return []Case[S]{
		{"expired key is new", expired[S]},
		{"expired key, copies at once", expiredRace[S]},
		{"B46 expired and not pruned is a duplicate", notPruned[S]},
		{"pruning spares what has not expired", pruneSpares[S]},
		{"pruning spares keys in conflict", pruneSparesConflicts[S]},
	}
}

// prune prunes where that is what makes a store forget.
func (e *env[S]) prune() {
	e.tb.Helper()
	if p, ok := e.h.(Pruner); ok {
		p.Prune(e.tb)
	}
}

func expired[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	short, long := claim("short"), claim("long")
	short.Retain, long.Retain = 50*time.Millisecond, time.Hour
	e.once(short, e.effect("short", []byte("old")), dedupe.Processed)
	e.once(long, e.effect("long", nil), dedupe.Processed)
	// With another content as well: an expired key is no conflict.
	anew := claimOf(short.Key, "other content")
	anew.Retain = time.Hour
	e.within("an expired key is new", func() bool {
		e.prune()
		if e.stillThere(short.Key) {
			return false // and a claim with another content would be a conflict
		}
		res, err := e.h.Store().Once(e.ctx, anew, e.effect("short", nil))
		if err != nil {
			tb.Fatal(err)
		}
		return res.Outcome == dedupe.Processed
	})
	e.wantCount("short", 2)
	res := e.once(anew, e.no("it was done again"), dedupe.Duplicate)
	if res.Reply != nil {
		tb.Errorf("the reply is %q, of the run that has expired; want nil", res.Reply)
	}
	e.once(short, e.no("it is the old content now"), dedupe.Conflict)
	e.once(long, e.no("it is kept for an hour"), dedupe.Duplicate)
	e.wantCount("long", 1)
}

// stillThere reports whether the store is known to hold a key.
func (e *env[S]) stillThere(k dedupe.Key) bool {
	a, ok := e.h.(Administered)
	if !ok {
		return false
	}
	_, err := a.Admin().Find(e.ctx, k.Stored())
	return err == nil
}

// expiredRace: of the copies that find a key expired, one takes it over.
func expiredRace[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	for i := range 5 {
		id := fmt.Sprint("race ", i)
		short, anew := claim(id), claim(id)
		short.Retain, anew.Retain = time.Millisecond, time.Hour
		e.once(short, e.effect(id, nil), dedupe.Processed)
		var processed atomic.Int64
		e.within("an expired key is new", func() bool { // it may not have expired at first
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					e.prune()
					if e.settle(anew, e.effect(id, nil)) == dedupe.Processed {
						processed.Add(1)
					}
				})
			}
			wg.Wait()
			return processed.Load() > 0
		})
		if n := processed.Load(); n != 1 {
			tb.Errorf("%d copies took an expired key over, want 1", n)
		}
		e.wantCount(id, 2)
	}
	e.wantIdle()
}

// expire makes a key done whose retention is over.
func (e *env[S]) expire(name string, a dedupe.Admin) dedupe.Claim {
	e.tb.Helper()
	c := claim(name)
	c.Retain = time.Millisecond
	e.once(c, e.effect(name, nil), dedupe.Processed)
	e.within("the retention is over", func() bool {
		entry, err := a.Find(e.ctx, c.Key.Stored())
		if err != nil {
			e.tb.Fatal(err)
		}
		return time.Now().After(entry.ExpiresAt.Add(5 * time.Millisecond))
	})
	return c
}

// notPruned: after a downtime, what the broker redelivers meets the keys of
// before, however old they are by then.
func notPruned[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	p, a := power[Pruner](tb, e.h), power[Administered](tb, e.h).Admin()
	c := e.expire("e", a)
	e.once(c, e.no("its key has expired and is not pruned"), dedupe.Duplicate)
	e.once(claimOf(c.Key, "other content"), e.no("its key has expired and is not pruned"), dedupe.Conflict)
	if err := a.Settle(e.ctx, c.Key.Stored()); err != nil {
		tb.Fatal(err)
	}
	if n := p.Prune(tb); n != 1 {
		tb.Errorf("%d keys were pruned, want 1", n)
	}
	e.once(c, e.effect("e", nil), dedupe.Processed)
	e.wantCount("e", 2)
}

func pruneSpares[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	p := power[Pruner](tb, e.h)
	for i := range 20 {
		e.once(claim(fmt.Sprint(i)), e.effect("e", nil), dedupe.Processed)
	}
	if n := p.Prune(tb); n != 0 {
		tb.Errorf("%d keys were pruned that have not expired", n)
	}
	for i := range 20 {
		e.once(claim(fmt.Sprint(i)), e.no("it has not expired"), dedupe.Duplicate)
	}
}

// pruneSparesConflicts: somebody has to look at a conflict before the first
// result is forgotten.
func pruneSparesConflicts[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	p, a := power[Pruner](tb, e.h), power[Administered](tb, e.h).Admin()
	c := e.expire("e", a)
	e.once(claimOf(c.Key, "other content"), e.no("its key was done with another content"), dedupe.Conflict)
	if n := p.Prune(tb); n != 0 {
		tb.Errorf("%d keys in conflict were pruned", n)
	}
	e.once(c, e.no("its key is in conflict"), dedupe.Duplicate)
	if n := e.h.Conflicts(tb); n != 1 {
		tb.Errorf("%d conflicts are recorded after pruning, want 1", n)
	}
	if err := a.Settle(e.ctx, c.Key.Stored()); err != nil {
		tb.Fatal(err)
	}
	if n := p.Prune(tb); n != 1 {
		tb.Errorf("%d keys were pruned after the conflict was settled, want 1", n)
	}
}
