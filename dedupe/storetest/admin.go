package storetest

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
)

func adminCases[S any]() []Case[S] {
	return []Case[S]{
		{"admin finds and explains", adminFinds[S]},
		{"admin lists page by page", adminLists[S]},
		{"admin evicts", adminEvicts[S]},
		{"admin refuses what makes no sense", adminRefuses[S]},
	}
}

func adminFinds[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	a := power[Administered](tb, e.h).Admin()
	c := claim("1")
	c.Retain = time.Hour
	if _, err := a.Find(e.ctx, c.Key.Stored()); !errors.Is(err, dedupe.ErrNotFound) {
		tb.Errorf("Find before: %v, want ErrNotFound", err)
	}
	e.once(c, e.effect("e", []byte("reply")), dedupe.Processed)
	e.once(claimOf(c.Key, "other"), e.no("another content was done"), dedupe.Conflict)
	found, err := a.Find(e.ctx, c.Key.Stored())
	if err != nil {
		tb.Fatal(err)
	}
	if found.ID != c.Key.Stored() || found.State != dedupe.StateDone || found.ReplySize != 5 || found.Conflicts != 1 ||
		found.Key != (dedupe.Key{}) && found.Key != c.Key {
		tb.Errorf("Find: %+v", found)
	}
	if kept := found.ExpiresAt.Sub(found.DoneAt); kept < time.Hour-time.Minute || kept > time.Hour+time.Minute {
		tb.Errorf("done at %v and kept until %v, want an hour", found.DoneAt, found.ExpiresAt)
	}
	if age := time.Since(found.DoneAt); age < -time.Minute || age > time.Minute {
		tb.Errorf("done at %v, it is %v", found.DoneAt, time.Now())
	}
	e.once(claim("2"), e.effect("e", nil), dedupe.Processed)
	if found, err := a.Find(e.ctx, claim("2").Key.Stored()); err != nil || found.ReplySize != -1 || found.Conflicts != 0 {
		tb.Errorf("Find of a key without a reply: %+v, %v", found, err)
	}
}

func adminLists[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	a := power[Administered](tb, e.h).Admin()
	want := map[dedupe.KeyID]int{}
	for i := range 7 {
		c := claim(fmt.Sprint(i))
		want[c.Key.Stored()] = 0
		e.once(c, e.effect("e", nil), dedupe.Processed)
	}
	met := claim("3").Key
	e.once(claimOf(met, "other"), e.no("another content was done"), dedupe.Conflict)
	e.once(claimOf(met, "third"), e.no("another content was done"), dedupe.Conflict)
	for id, times := range listed(tb, a, dedupe.Filter{State: dedupe.StateDone, Limit: 3}) {
		if _, ok := want[id]; !ok || times != 1 {
			tb.Errorf("%v is listed %d times", id, times)
		}
		delete(want, id)
	}
	if len(want) > 0 {
		tb.Errorf("%d keys are not listed", len(want))
	}
	if got := listed(tb, a, dedupe.Filter{InConflict: true, Limit: 1}); len(got) != 1 || got[met.Stored()] != 1 {
		tb.Errorf("in conflict are %v, want %v", got, met.Stored())
	}
	for _, s := range dedupe.States() {
		if got := listed(tb, a, dedupe.Filter{State: s}); s != dedupe.StateDone && len(got) > 0 {
			tb.Errorf("%d keys are listed as %v", len(got), s)
		}
	}
	counts, err := a.Counts(e.ctx)
	if err != nil || counts.Conflicts != 2 && counts.Conflicts != -1 || counts.Running > 0 || counts.Parked > 0 {
		tb.Errorf("Counts: %+v, %v", counts, err)
	}
}

// listed is how often a list has each key.
func listed(tb testing.TB, a dedupe.Admin, f dedupe.Filter) map[dedupe.KeyID]int {
	tb.Helper()
	times := map[dedupe.KeyID]int{}
	for pages := 0; ; pages++ {
		page, err := a.List(tb.Context(), f)
		if err != nil {
			tb.Fatalf("List(%+v): %v", f, err)
		}
		if len(page.Entries) > f.PageSize() {
			tb.Errorf("a page has %d entries, want at most %d", len(page.Entries), f.PageSize())
		}
		for _, entry := range page.Entries {
			times[entry.ID]++
			if entry.State != f.State && !f.InConflict || f.InConflict && entry.Conflicts == 0 {
				tb.Errorf("List(%+v) has %+v", f, entry)
			}
		}
		if f.After = page.Next; f.After == "" {
			return times
		}
		if pages > 1000 {
			tb.Fatalf("List(%+v) has no end", f)
		}
	}
}

func adminEvicts[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	a := power[Administered](tb, e.h).Admin()
	c := claim("1")
	e.once(c, e.effect("e", []byte("old")), dedupe.Processed)
	e.once(claim("2"), e.effect("f", nil), dedupe.Processed)
	e.once(claimOf(c.Key, "other"), e.no("another content was done"), dedupe.Conflict)
	if err := a.Evict(e.ctx, c.Key.Stored()); err != nil {
		tb.Fatal(err)
	}
	if err := a.Evict(e.ctx, c.Key.Stored()); !errors.Is(err, dedupe.ErrNotFound) {
		tb.Errorf("Evict again: %v, want ErrNotFound", err)
	}
	if n := e.h.Conflicts(tb); n != 0 {
		tb.Errorf("%d conflicts of an evicted key are left", n)
	}
	if res := e.once(claimOf(c.Key, "other"), e.effect("e", nil), dedupe.Processed); res.Reply != nil {
		tb.Errorf("the reply is %q", res.Reply)
	}
	e.wantCount("e", 2)
	e.once(claim("2"), e.no("it was not evicted"), dedupe.Duplicate)
}

func adminRefuses[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	a := power[Administered](tb, e.h).Admin()
	e.once(claim("1"), e.effect("e", nil), dedupe.Processed)
	if err := a.Release(e.ctx, claim("1").Key.Stored()); !errors.Is(err, dedupe.ErrWrongState) {
		tb.Errorf("Release of a done key: %v, want ErrWrongState", err)
	}
	if err := a.Release(e.ctx, claim("2").Key.Stored()); !errors.Is(err, dedupe.ErrNotFound) {
		tb.Errorf("Release of no key: %v, want ErrNotFound", err)
	}
	if err := a.Settle(e.ctx, claim("2").Key.Stored()); err != nil {
		tb.Errorf("Settle of no key: %v", err)
	}
	for _, f := range []dedupe.Filter{{}, {State: 99}, {State: dedupe.StateDone, InConflict: true}, {State: -1}} {
		if _, err := a.List(e.ctx, f); !errors.Is(err, dedupe.ErrInvalidFilter) {
			tb.Errorf("List(%+v): %v, want ErrInvalidFilter", f, err)
		}
	}
	e.once(claim("1"), e.no("it was done"), dedupe.Duplicate)
}
