package storetest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
)

func placeCases[S any]() []Case[S] {
	return []Case[S]{
		{"position: new, done and gaps", placeBasics[S]},
		{"position: what fails leaves it where it was", placeFails[S]},
		{"position: panic and Goexit leave it where it was", placePanics[S]},
		{"position: what is before the culprit is committed", placePrefix[S]},
		{"position: two at once", placeTwoAtOnce[S]},
		{"position: a wait for it is bounded", placeInProgress[S]},
		{"position: members of two generations", placeGenerations[S]},
		{"position: first records race", placeFirstRace[S]},
		{"position: B33 commit applied, answer lost", func(tb testing.TB, open Open[S]) { placeLostCommit(tb, open, true) }},
		{"position: B33 commit lost on its way", func(tb testing.TB, open Open[S]) { placeLostCommit(tb, open, false) }},
		{"position: a replaced log is later", placeReplacedLater[S]},
		{"position: a replaced log holds another record", placeReplacedRecord[S]},
		{"position: times that tell nothing", placeTimes[S]},
		{"position: consumers, tenants, topics and partitions are independent", placeIndependent[S]},
		{"position: offsets at the bounds", placeBounds[S]},
		{"position: what is no place is refused", placeInvalid[S]},
		{"position: keys, too", placeKeys[S]},
		{"position: keys held elsewhere", placeKeyHeld[S]},
		{"position: B34 swallowed SQL error", placeSwallowed[S]},
		{"position: B35 lost races are run again", placeRetries[S]},
		{"position: store unreachable", placeUnreachable[S]},
		{"position: listed and reset", placeAdmin[S]},
	}
}

// places is what a case about positions works with.
type places[S any] struct {
	*env[S]
	st dedupe.Placer[S]
	p  dedupe.Partition
}

func startPlaces[S any](tb testing.TB, open Open[S], s Settings) *places[S] {
	tb.Helper()
	e := start(tb, open, s)
	st, ok := e.h.Store().(dedupe.Placer[S])
	if !ok {
		tb.Skip("n/a: the store is no Placer")
	}
	return &places[S]{e, st, dedupe.Partition{Tenant: "acme", Consumer: "billing", Topic: "orders", Number: 3}}
}

// epoch is when the record at offset 0 was written; each one is a second later.
var epoch = time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)

func place(offset int64) dedupe.Place {
	at := dedupe.Place{Offset: offset, Time: epoch.Add(time.Duration(offset%1e6) * time.Second)}
	copy(at.Fingerprint[:], fmt.Sprint("record ", offset))
	return at
}

func placesOf(offsets ...int64) (all []dedupe.Place) {
	for _, o := range offsets {
		all = append(all, place(o))
	}
	return all
}

// name is that of the effect of an offset.
func (e *places[S]) name(offset int64) string { return fmt.Sprint("at ", offset) }

// add returns a handler that writes an effect for each place.
func (e *places[S]) add(at []dedupe.Place) func(context.Context, S, []int) ([][]byte, error) {
	return e.addThen(at, func(context.Context, S) error { return nil })
}

func (e *places[S]) addThen(at []dedupe.Place, then func(context.Context, S) error) func(context.Context, S, []int) ([][]byte, error) {
	return func(ctx context.Context, scope S, fresh []int) ([][]byte, error) {
		e.runs.Add(1)
		for _, i := range fresh {
			if err := e.h.Add(ctx, scope, e.name(at[i].Offset)); err != nil {
				return nil, err
			}
		}
		return nil, then(ctx, scope)
	}
}

func (e *places[S]) none(why string) func(context.Context, S, []int) ([][]byte, error) {
	return func(context.Context, S, []int) ([][]byte, error) {
		e.tb.Errorf("the handler ran although %s", why)
		return nil, nil
	}
}

// pass handles records, and fails the case at once unless the outcomes are want.
func (e *places[S]) pass(at []dedupe.Place, want ...dedupe.Outcome) {
	e.tb.Helper()
	e.passIn(e.p, at, nil, want...)
}

func (e *places[S]) passIn(p dedupe.Partition, at []dedupe.Place, claims []dedupe.Claim, want ...dedupe.Outcome) {
	e.tb.Helper()
	answers, err := e.st.OnceAt(e.ctx, p, at, claims, e.add(at))
	if err != nil {
		e.tb.Fatalf("OnceAt: %v", err)
	}
	if len(answers) != len(want) {
		e.tb.Fatalf("OnceAt: %d answers, want %d", len(answers), len(want))
	}
	e.wantOutcomes(answers, want...)
}

// refused fails the case unless OnceAt is answered with an error, and without
// running a handler.
func (e *places[S]) refused(at []dedupe.Place, want error) {
	e.tb.Helper()
	answers, err := e.st.OnceAt(e.ctx, e.p, at, nil, e.none("it was to be refused"))
	if !errors.Is(err, want) || answers != nil {
		e.tb.Errorf("OnceAt: %v, %v; want %q", answers, err, want)
	}
}

func (e *places[S]) wantAt(offset int64, want int) {
	e.tb.Helper()
	e.wantCount(e.name(offset), want)
}

const (
	isNew  = dedupe.Processed
	isDone = dedupe.Duplicate
)

func placeBasics[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{Conns: 2})
	for o := range int64(3) {
		e.pass(placesOf(o), isNew)
	}
	e.pass(placesOf(2), isDone) // the acknowledgement was lost
	e.pass(placesOf(0), isDone) // a rewind
	e.pass(placesOf(1, 2, 3, 4), isDone, isDone, isNew, isNew)
	e.pass(placesOf(10), isNew)                       // a gap
	e.pass(placesOf(7), isDone)                       // what was left out is done
	e.pass(placesOf(12, 15, 20), isNew, isNew, isNew) // gaps in a batch
	e.runs.Store(0)
	e.pass(placesOf(0, 4, 10, 13, 20), isDone, isDone, isDone, isDone, isDone)
	e.wantRuns(0)
	for _, o := range []int64{0, 1, 2, 3, 4, 10, 12, 15, 20} {
		e.wantAt(o, 1)
	}
	for _, o := range []int64{7, 13} {
		e.wantAt(o, 0)
	}
	if answers, err := e.st.OnceAt(e.ctx, e.p, nil, nil, e.none("there are no places")); err != nil || len(answers) != 0 {
		tb.Errorf("no places: %v, %v", answers, err)
	}
	e.wantIdle()
}

func placeFails[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{Conns: 2})
	at := placesOf(0, 1)
	for range 2 { // also when there is a row
		for range 5 {
			answers, err := e.st.OnceAt(e.ctx, e.p, at, nil, e.addThen(at, func(context.Context, S) error { return errHandler }))
			if !errors.Is(err, errHandler) || answers != nil {
				tb.Errorf("OnceAt: %v, %v; want the handler's error", answers, err)
			}
		}
		for _, p := range at {
			e.wantAt(p.Offset, 0)
		}
		e.pass(at, isNew, isNew)
		e.pass(at, isDone, isDone)
		at = placesOf(2, 3)
	}
	e.wantIdle()
}

func placePanics[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{Conns: 1})
	at := placesOf(0)
	for _, end := range []func(){func() { panic(errHandler) }, runtime.Goexit} {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			defer func() { _ = recover() }() //nolint:errcheck // what it was is none of this case's business
			_, err := e.st.OnceAt(e.ctx, e.p, at, nil, e.addThen(at, func(context.Context, S) error {
				end()
				return nil
			}))
			tb.Errorf("OnceAt returned %v, its handler was to end the goroutine", err)
		}()
		<-ended
		e.wantAt(0, 0)
		e.wantIdle()
	}
	e.pass(at, isNew)
	e.wantAt(0, 1)
}

// placePrefix is what a run does that finds the culprit of a batch: later records
// are never handled before earlier ones.
func placePrefix[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{})
	all := placesOf(0, 1, 2, 3, 4, 5, 6, 7)
	poison := func(ctx context.Context, scope S, fresh []int) ([][]byte, error) {
		if slices.ContainsFunc(fresh, func(i int) bool { return all[i].Offset == 5 }) {
			return nil, errHandler
		}
		return e.add(all)(ctx, scope, fresh)
	}
	if _, err := e.st.OnceAt(e.ctx, e.p, all, nil, poison); !errors.Is(err, errHandler) {
		tb.Errorf("OnceAt: %v, want the handler's error", err)
	}
	if _, err := e.st.OnceAt(e.ctx, e.p, all[:5], nil, poison); err != nil {
		tb.Errorf("OnceAt of what is before the culprit: %v", err)
	}
	e.pass(all, isDone, isDone, isDone, isDone, isDone, isNew, isNew, isNew)
	for _, p := range all {
		e.wantAt(p.Offset, 1)
	}
}

// holder starts to handle records, and waits for what release is sent.
func (e *places[S]) holder(at []dedupe.Place) (release chan<- error, done <-chan error) {
	e.tb.Helper()
	return e.holding(func(hold func(context.Context, S) error) error {
		_, err := e.st.OnceAt(e.ctx, e.p, at, nil, e.addThen(at, hold))
		return err
	})
}

type placeAnswer struct {
	answers []dedupe.Answer
	err     error
}

// placeTwoAtOnce: a member whose generation is over is still at work on a record
// when the next owner gets it. The second waits, and sees what came of it.
func placeTwoAtOnce[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{})
	for round, end := range []error{nil, errHandler} {
		at := placesOf(int64(2*round), int64(2*round+1))
		e.runs.Store(0)
		release, done := e.holder(at[:1])
		got := make(chan placeAnswer, 1)
		go func() {
			for {
				answers, err := e.st.OnceAt(e.ctx, e.p, at, nil, e.add(at))
				if !errors.Is(err, dedupe.ErrInProgress) && !errors.Is(err, dedupe.ErrContention) {
					got <- placeAnswer{answers, err}
					return
				}
			}
		}()
		select {
		case a := <-got:
			tb.Fatalf("the second was answered %v, %v while the first was at work", a.answers, a.err)
		case <-time.After(20 * time.Millisecond): // it waits; if not yet, the case is only easier
		}
		release <- end
		if err := <-done; !errors.Is(err, end) {
			tb.Errorf("the first: %v, want %v", err, end)
		}
		want, a := isDone, <-got
		if end != nil {
			want = isNew
		}
		if a.err != nil {
			tb.Fatalf("the second: %v", a.err)
		}
		e.wantOutcomes(a.answers, want, isNew)
		e.wantAt(at[0].Offset, 1)
		e.wantAt(at[1].Offset, 1)
	}
	e.wantIdle()
}

func placeInProgress[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{Wait: 30 * time.Millisecond})
	for o := range int64(2) { // the first time there is no row
		release, done := e.holder(placesOf(o))
		for range 2 {
			began := time.Now()
			e.refused(placesOf(o), dedupe.ErrInProgress)
			if took := time.Since(began); took > 10*time.Second {
				tb.Errorf("it waited %v, want about 30 ms", took)
			}
		}
		release <- nil
		if err := <-done; err != nil {
			tb.Errorf("the holder: %v", err)
		}
		e.pass(placesOf(o), isDone)
		e.wantAt(o, 1)
	}
	e.wantIdle()
}

// placeGenerations: members that all believe that the partition is theirs, each
// from an offset that was committed a while ago, in batches of their own.
func placeGenerations[S any](tb testing.TB, open Open[S]) {
	const records = 60
	e := startPlaces(tb, open, Settings{Conns: 4})
	var wg sync.WaitGroup
	for member := range uint64(4) {
		rnd := rand.New(rand.NewPCG(member, 1)) //nolint:gosec // what is random here is a schedule
		wg.Go(func() {
			for next := int64(0); next < records && e.ctx.Err() == nil; {
				var at []dedupe.Place
				for o := next; o < min(records, next+1+rnd.Int64N(8)); o++ {
					at = append(at, place(o))
				}
				_, err := e.st.OnceAt(e.ctx, e.p, at, nil, e.addThen(at, func(context.Context, S) error {
					if rnd.IntN(5) == 0 {
						return errHandler
					}
					return nil
				}))
				switch {
				case err == nil:
					next = at[len(at)-1].Offset + 1
				case rnd.IntN(4) == 0:
					next = max(0, next-rnd.Int64N(10)) // a new generation
				case !errors.Is(err, errHandler) && !errors.Is(err, dedupe.ErrInProgress) && !errors.Is(err, dedupe.ErrContention):
					tb.Errorf("OnceAt: %v", err)
					return
				}
			}
		})
	}
	wg.Wait()
	for o := range int64(records) {
		e.wantAt(o, 1)
	}
	e.wantIdle()
}

// placeFirstRace: nobody finds a row, and one makes it.
func placeFirstRace[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{Conns: 4})
	for number := range 5 {
		e.p.Number = number
		at := placesOf(int64(number))
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for e.ctx.Err() == nil {
					_, err := e.st.OnceAt(e.ctx, e.p, at, nil, e.add(at))
					if err == nil {
						return
					}
					if !errors.Is(err, dedupe.ErrInProgress) && !errors.Is(err, dedupe.ErrContention) {
						tb.Errorf("OnceAt: %v", err)
						return
					}
				}
			})
		}
		wg.Wait()
		e.wantAt(int64(number), 1)
	}
}

func placeLostCommit[S any](tb testing.TB, open Open[S], applied bool) {
	e := startPlaces(tb, open, Settings{Conns: 2})
	cut := power[Cutter](tb, e.h)
	want := isNew
	if applied {
		want = isDone
	}
	for _, at := range [][]dedupe.Place{placesOf(0), placesOf(1, 2)} {
		cut.CutCommit(applied)
		if _, err := e.st.OnceAt(e.ctx, e.p, at, nil, e.add(at)); !errors.Is(err, dedupe.ErrUnknownOutcome) {
			tb.Errorf("OnceAt: %v, want ErrUnknownOutcome", err)
		}
		var answers []dedupe.Answer
		e.within("the outcome is known", func() (ok bool) {
			var err error
			answers, err = e.st.OnceAt(e.ctx, e.p, at, nil, e.add(at))
			return err == nil
		})
		for i, p := range at {
			if answers[i].Outcome != want {
				tb.Errorf("the redelivery: %v, want %v", answers[i].Outcome, want)
			}
			e.wantAt(p.Offset, 1)
		}
	}
	e.wantIdle()
}

// placeReplacedLater: the topic was deleted and made anew. To take its records for
// duplicates would lose them without a sound.
func placeReplacedLater[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{})
	late := place(4)
	late.Time = late.Time.Add(time.Hour) // clocks of producers differ: the greatest counts, not the latest
	e.pass([]dedupe.Place{place(3), late}, isNew, isNew)
	e.pass(placesOf(5, 6, 7), isNew, isNew, isNew)
	at := late
	for _, o := range []int64{0, 5, 7} { // of which the last one is judged by its content as well
		at.Offset = o
		at.Time = late.Time.Add(time.Microsecond)
		for range 2 {
			e.refused([]dedupe.Place{at}, dedupe.ErrLogReplaced)
			e.refused([]dedupe.Place{at, place(8)}, dedupe.ErrLogReplaced)
		}
	}
	at.Offset, at.Time = 2, late.Time
	e.pass([]dedupe.Place{at}, isDone)
	e.refused([]dedupe.Place{at, {Offset: 6, Time: late.Time.Add(time.Hour)}, place(8)}, dedupe.ErrLogReplaced)
	e.pass(placesOf(8), isNew) // the log that it was goes on
	if a, ok := positionAdmin(e); ok {
		if err := a.ResetPosition(e.ctx, e.p, 0); err != nil {
			tb.Fatal(err)
		}
		fresh := dedupe.Place{Offset: 0, Time: late.Time.Add(time.Hour)}
		e.pass([]dedupe.Place{fresh, {Offset: 1, Time: fresh.Time}}, isNew, isNew)
		e.pass([]dedupe.Place{fresh}, isDone)
	}
	e.wantIdle()
}

// placeReplacedRecord: the log was cut off and written to again within the time
// of what is done. The last record shows it.
func placeReplacedRecord[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{})
	e.pass(placesOf(0, 1), isNew, isNew)
	e.pass(placesOf(2), isNew)
	other := place(2)
	other.Fingerprint[0]++
	e.refused([]dedupe.Place{other}, dedupe.ErrLogReplaced)
	e.refused([]dedupe.Place{place(1), other, place(3)}, dedupe.ErrLogReplaced)
	other.Fingerprint = [32]byte{}
	e.pass([]dedupe.Place{other}, isDone) // nothing is known of it
	blank := dedupe.Place{Offset: 3, Time: place(3).Time}
	e.pass([]dedupe.Place{blank}, isNew)
	e.pass(placesOf(2, 3), isDone, isDone) // nothing was known of it
}

func placeTimes[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{})
	none := func(o int64) []dedupe.Place { return []dedupe.Place{{Offset: o}} }
	at := func(o int64, t time.Time) []dedupe.Place { return []dedupe.Place{{Offset: o, Time: t}} }
	e.pass(none(0), isNew)
	e.pass(at(0, epoch), isDone) // none had a time yet
	e.pass(at(1, time.UnixMilli(-1)), isNew)
	e.pass(at(0, epoch), isDone) // before 1970 is no time: Kafka says so of a record without one
	e.pass(at(2, epoch.Add(999)), isNew)
	e.pass(at(2, epoch.Add(1)), isDone)
	e.pass(at(2, epoch.Add(998).In(time.FixedZone("", 3600))), isDone) // less than a microsecond does not count
	e.pass(none(2), isDone)
	e.refused(at(0, epoch.Add(time.Microsecond)), dedupe.ErrLogReplaced)
	e.pass(at(3, epoch.Add(-time.Hour)), isNew)
	e.refused(at(3, epoch.Add(time.Microsecond)), dedupe.ErrLogReplaced)
	far := time.UnixMilli(math.MaxInt64)
	e.pass(at(4, far), isNew)
	e.pass(at(4, far), isDone)
}

func placeIndependent[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{})
	all := []dedupe.Partition{e.p}
	for _, change := range []func(p *dedupe.Partition){
		func(p *dedupe.Partition) { p.Tenant = "" },
		func(p *dedupe.Partition) { p.Tenant = "Acme" },
		func(p *dedupe.Partition) { p.Consumer = "shipping" },
		func(p *dedupe.Partition) { p.Topic = "payments" },
		func(p *dedupe.Partition) { p.Number = 4 },
		func(p *dedupe.Partition) { p.Number = math.MaxInt32 },
		func(p *dedupe.Partition) { p.Tenant, p.Consumer = "acmeb", "illing" },
	} {
		p := e.p
		change(&p)
		all = append(all, p)
	}
	for i, p := range all {
		e.passIn(p, placesOf(5), nil, isNew)
		e.wantAt(5, i+1)
	}
	for _, p := range all {
		e.passIn(p, placesOf(4, 5), nil, isDone, isDone)
	}
	e.wantAt(5, len(all))
	e.wantAt(4, 0)
}

func placeBounds[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{})
	const most = math.MaxInt64 - 1
	e.pass(placesOf(0), isNew)
	e.pass(placesOf(math.MaxInt32, math.MaxInt32+1, 1<<53, 1<<53+1), isNew, isNew, isNew, isNew)
	at := []dedupe.Place{{Offset: most - 1}, {Offset: most}}
	e.pass(at, isNew, isNew)
	e.pass(at, isDone, isDone)
	e.pass(placesOf(1<<53), isDone)
	e.refused([]dedupe.Place{{Offset: math.MaxInt64}}, dedupe.ErrInvalidClaim)
}

func placeInvalid[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{})
	for _, offsets := range [][]int64{{-1}, {math.MinInt64}, {1, 1}, {2, 1}, {0, 1, -1}} {
		var at []dedupe.Place
		for _, o := range offsets {
			at = append(at, dedupe.Place{Offset: o})
		}
		e.refused(at, dedupe.ErrInvalidClaim)
	}
	good := e.p
	for _, change := range []func(p *dedupe.Partition){
		func(p *dedupe.Partition) { p.Consumer = "" },
		func(p *dedupe.Partition) { p.Topic = "" },
		func(p *dedupe.Partition) { p.Topic = "a\x00" },
		func(p *dedupe.Partition) { p.Tenant = " " },
		func(p *dedupe.Partition) { p.Number = -1 },
	} {
		e.p = good
		change(&e.p)
		e.refused(placesOf(0), dedupe.ErrInvalidClaim)
	}
	e.p = good
	for name, c := range map[string]struct {
		claims []dedupe.Claim
		want   error
	}{
		"one for two": {[]dedupe.Claim{claim("1")}, dedupe.ErrInvalidClaim},
		"no id":       {[]dedupe.Claim{claim("1"), claim("")}, dedupe.ErrInvalidKey},
	} {
		if _, err := e.st.OnceAt(e.ctx, e.p, placesOf(0, 1), c.claims, e.none("a claim cannot be stored")); !errors.Is(err, c.want) {
			tb.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	e.pass(placesOf(0), isNew) // nothing has moved
}

// placeKeys: what a producer has sent twice has two places and one key.
func placeKeys[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{})
	e.passIn(e.p, placesOf(0, 1), []dedupe.Claim{claim("a"), claim("b")}, isNew, isNew)
	e.passIn(e.p, placesOf(2), []dedupe.Claim{claim("a")}, isDone)
	e.pass(placesOf(2), isDone) // a position without a key: it has moved
	met := claimOf(claim("b").Key, "other")
	e.passIn(e.p, placesOf(3, 4, 5), []dedupe.Claim{met, claim("c"), claim("c")}, dedupe.Conflict, isNew, isDone)
	e.wantAt(3, 0)
	e.wantAt(4, 1)
	e.wantAt(5, 0)
	if n := e.h.Conflicts(tb); n != 1 {
		tb.Errorf("%d conflicts are recorded, want 1", n)
	}
	e.passIn(e.p, placesOf(6), []dedupe.Claim{met}, dedupe.Conflict)
	e.passIn(e.p, placesOf(7, 8), []dedupe.Claim{claim("d"), claimOf(claim("d").Key, "other")}, isNew, dedupe.Conflict)
	if n := e.h.Conflicts(tb); n != 2 {
		tb.Errorf("%d conflicts are recorded, want 2", n)
	}
	e.passIn(e.p, placesOf(3, 4), []dedupe.Claim{met, claim("c")}, isDone, isDone) // the position decides first
	// What fails leaves neither.
	at := placesOf(9, 10)
	claims := []dedupe.Claim{claim("e"), claimOf(claim("a").Key, "other")}
	if _, err := e.st.OnceAt(e.ctx, e.p, at, claims, e.addThen(at, func(context.Context, S) error { return errHandler })); !errors.Is(err, errHandler) {
		tb.Errorf("OnceAt: %v", err)
	}
	if n := e.h.Conflicts(tb); n != 2 {
		tb.Errorf("%d conflicts are recorded after a rollback, want 2", n)
	}
	var replies [2][]byte
	for i, o := range []int64{9, 11} {
		answers, err := e.st.OnceAt(e.ctx, e.p, placesOf(o), claims[:1], func(ctx context.Context, scope S, _ []int) ([][]byte, error) {
			return [][]byte{[]byte("reply")}, e.h.Add(ctx, scope, "e")
		})
		if err != nil {
			tb.Fatal(err)
		}
		replies[i] = answers[0].Reply
	}
	if string(replies[0]) != "reply" || string(replies[1]) != "reply" {
		tb.Errorf("the replies are %q", replies)
	}
	e.wantCount("e", 1)
	// A key is one key, by whatever way it was done.
	e.once(claim("c"), e.no("it was done"), dedupe.Duplicate)
	e.once(claim("f"), e.effect("f", nil), dedupe.Processed)
	e.passIn(e.p, placesOf(12), []dedupe.Claim{claim("f")}, isDone)
	e.wantIdle()
}

// placeKeyHeld: another transaction is at work on one of the keys.
func placeKeyHeld[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{Wait: 30 * time.Millisecond})
	release, done := e.owner(claim("held"), "held")
	at, claims := placesOf(0, 1), []dedupe.Claim{claim("x"), claim("held")}
	if _, err := e.st.OnceAt(e.ctx, e.p, at, claims, e.none("a key is held")); !errors.Is(err, dedupe.ErrInProgress) {
		tb.Errorf("OnceAt: %v, want ErrInProgress", err)
	}
	release <- nil
	if err := <-done; err != nil {
		tb.Error(err)
	}
	e.passIn(e.p, at, claims, isNew, isDone)
	e.wantAt(0, 1)
	e.wantIdle()
}

func placeSwallowed[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{Conns: 2})
	a := power[Aborter[S]](tb, e.h)
	at := placesOf(0)
	for range 3 {
		_, err := e.st.OnceAt(e.ctx, e.p, at, nil, e.addThen(at, func(ctx context.Context, scope S) error {
			_ = a.Abort(ctx, scope)
			return nil
		}))
		if !errors.Is(err, dedupe.ErrScope) {
			tb.Errorf("OnceAt: %v, want ErrScope", err)
		}
	}
	e.wantAt(0, 0)
	e.pass(at, isNew)
	e.wantIdle()
}

func placeRetries[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{})
	lost := power[Retrier](tb, e.h).Lost()
	at, runs := placesOf(0, 1), 0
	answers, err := e.st.OnceAt(e.ctx, e.p, at, nil, e.addThen(at, func(context.Context, S) error {
		if runs++; runs < 3 {
			return fmt.Errorf("a statement: %w", lost)
		}
		return nil
	}))
	if err != nil || runs != 3 {
		tb.Fatalf("OnceAt: %v in %d runs, want 3", err, runs)
	}
	e.wantOutcomes(answers, isNew, isNew)
	e.wantAt(0, 1)
	if _, err := e.st.OnceAt(e.ctx, e.p, placesOf(2), nil, func(context.Context, S, []int) ([][]byte, error) { return nil, lost }); !errors.Is(err, dedupe.ErrContention) {
		tb.Errorf("OnceAt: %v, want ErrContention", err)
	}
	e.pass(placesOf(2), isNew)
}

func placeUnreachable[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{})
	b := power[Breaker](tb, e.h)
	e.pass(placesOf(0), isNew)
	b.Break()
	e.refused(placesOf(0), dedupe.ErrUnavailable)
	e.refused(placesOf(1), dedupe.ErrUnavailable)
	b.Mend()
	e.within("the store is back", func() bool {
		at := placesOf(1)
		_, err := e.st.OnceAt(e.ctx, e.p, at, nil, e.add(at))
		return err == nil
	})
	e.pass(placesOf(0, 1), isDone, isDone)
	e.wantAt(1, 1)
	e.wantIdle()
}

func positionAdmin[S any](e *places[S]) (dedupe.PositionAdmin, bool) {
	a, ok := e.h.(Administered)
	if !ok {
		return nil, false
	}
	p, ok := a.Admin().(dedupe.PositionAdmin)
	return p, ok
}

func placeAdmin[S any](tb testing.TB, open Open[S]) {
	e := startPlaces(tb, open, Settings{})
	a, ok := positionAdmin(e)
	if !ok {
		tb.Skip("n/a: the harness has no admin of positions")
	}
	list := func(want ...int64) []dedupe.Position {
		tb.Helper()
		all, err := a.Positions(e.ctx)
		if err != nil {
			tb.Fatal(err)
		}
		var next []int64
		for _, p := range all {
			next = append(next, p.Next)
			if p.MovedAt.IsZero() || p.Partition != (dedupe.Partition{}) && p.Partition.Topic != e.p.Topic {
				tb.Errorf("the position is %+v", p)
			}
		}
		slices.Sort(next)
		if !slices.Equal(next, want) {
			tb.Errorf("the positions are %v, want %v", next, want)
		}
		return all
	}
	list()
	second := e.p
	second.Number++
	e.pass(placesOf(0, 1), isNew, isNew)
	if p := list(2)[0]; !p.MaxTime.Equal(place(1).Time) || p.Last != place(1).Fingerprint {
		tb.Errorf("the position is %+v, want the time and the fingerprint of the last record", p)
	}
	e.passIn(second, placesOf(7), nil, isNew)
	list(2, 8)
	reset := func(p dedupe.Partition, next int64) {
		tb.Helper()
		if err := a.ResetPosition(e.ctx, p, next); err != nil {
			tb.Fatal(err)
		}
	}
	reset(second, 3)
	p := second
	p.Number++
	reset(p, 5) // where there is none yet
	list(2, 3, 5)
	e.passIn(second, placesOf(2, 3), nil, isDone, isNew)
	e.passIn(p, []dedupe.Place{{Offset: 4, Time: epoch.Add(time.Hour)}}, nil, isDone) // by a person's word
	e.passIn(p, placesOf(4, 5), nil, isDone, isNew)
	for _, bad := range []error{a.ResetPosition(e.ctx, e.p, -1), a.ResetPosition(e.ctx, dedupe.Partition{}, 0)} {
		if !errors.Is(bad, dedupe.ErrInvalidClaim) {
			tb.Errorf("ResetPosition: %v, want ErrInvalidClaim", bad)
		}
	}
	// It does not fall between the lock and the commit of a transaction.
	release, done := e.holder(placesOf(2))
	ended := make(chan error, 1)
	go func() { ended <- a.ResetPosition(e.ctx, e.p, 1) }()
	select {
	case err := <-ended:
		tb.Errorf("ResetPosition returned %v while a transaction was at work", err)
		ended <- err
	case <-time.After(20 * time.Millisecond):
	}
	release <- nil
	if err := errors.Join(<-done, <-ended); err != nil {
		tb.Error(err)
	}
	list(1, 4, 6)
}
