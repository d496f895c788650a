package dedupe_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/dedupe"
)

// Errors of a database that a scripted driver knows the classes of.
var (
	errLost  = errors.New("serialization failure")
	errDown  = errors.New("shutting down")
	errPlain = errors.New("plain")
)

// scripted is a driver that answers by a script, and notes what it was asked.
type scripted struct {
	begin    []error // one for each Begin; none is left: nil
	prior    *dedupe.Record
	commit   []error
	rollback error
	conflict error
	explain  error

	calls     []string
	conflicts []dedupe.ConflictRecord
	claims    []dedupe.Claim
	ends      []context.Context // of commits and rollbacks
}

func (d *scripted) called(name string, script *[]error) error {
	d.calls = append(d.calls, name)
	if script == nil || len(*script) == 0 {
		return nil
	}
	err := (*script)[0]
	*script = (*script)[1:]
	return err
}

func (d *scripted) Begin(_ context.Context, c dedupe.Claim) (int, *dedupe.Record, error) {
	d.claims = append(d.claims, c)
	return len(d.claims), d.prior, d.called("begin", &d.begin)
}

func (d *scripted) Commit(ctx context.Context, _ int, _ dedupe.Claim, _ []byte) error {
	d.ends = append(d.ends, ctx)
	return d.called("commit", &d.commit)
}

func (d *scripted) Rollback(ctx context.Context, _ int) error {
	d.ends = append(d.ends, ctx)
	_ = d.called("rollback", nil)
	return errors.Join(d.rollback, ctx.Err())
}

func (d *scripted) Conflict(ctx context.Context, r dedupe.ConflictRecord) error {
	d.conflicts = append(d.conflicts, r)
	_ = d.called("conflict", nil)
	return errors.Join(d.conflict, ctx.Err())
}

func (d *scripted) Classify(err error) dedupe.Class {
	switch {
	case errors.Is(err, errLost):
		return dedupe.ClassRetry
	case errors.Is(err, errDown):
		return dedupe.ClassUnavailable
	}
	return dedupe.ClassOther
}

func (d *scripted) Explain(int) error { return d.explain }

func claimOf(id string) dedupe.Claim {
	k := dedupe.Key{Consumer: "billing", ID: id}
	return dedupe.Claim{Key: k, Fingerprint: dedupe.Fingerprint(k)}
}

type handler = func(context.Context, int) ([]byte, error)

func returns(err error) handler {
	return func(context.Context, int) ([]byte, error) { return []byte("reply"), err }
}

// classes are the errors that callers tell apart.
var classes = []error{
	dedupe.ErrInProgress, dedupe.ErrUnknownOutcome, dedupe.ErrUnavailable, dedupe.ErrContention, dedupe.ErrScope,
	dedupe.ErrInvalidKey, dedupe.ErrInvalidClaim,
}

// TestVerdicts: which error of the driver or the handler becomes which class,
// and how often what is called.
func TestVerdicts(t *testing.T) {
	var same, other [32]byte // as a store keeps them
	{
		d := scripted{}
		_, _ = dedupe.NewTxStore(&d, nil).Once(t.Context(), claimOf("1"), returns(nil))
		same, other = d.claims[0].Fingerprint, d.claims[0].Fingerprint
		other[31]++
	}
	timedOut := fmt.Errorf("statement: %w", context.DeadlineExceeded)
	scope := fmt.Errorf("rollback: %w", dedupe.ErrScope)
	for name, tc := range map[string]struct {
		d       scripted
		fn      error // of the handler
		outcome dedupe.Outcome
		class   error   // the only one of classes that is matched
		also    []error // matched too
		calls   string
	}{
		"new":                        {outcome: dedupe.Processed, calls: "begin commit"},
		"duplicate":                  {d: scripted{prior: &dedupe.Record{Fingerprint: same}}, outcome: dedupe.Duplicate, calls: "begin"},
		"conflict":                   {d: scripted{prior: &dedupe.Record{Fingerprint: other}}, outcome: dedupe.Conflict, calls: "begin conflict"},
		"conflict not recorded":      {d: scripted{prior: &dedupe.Record{Fingerprint: other}, conflict: errPlain}, class: dedupe.ErrUnavailable, also: []error{errPlain}, calls: "begin conflict"},
		"claim fails":                {d: scripted{begin: []error{errPlain}}, class: dedupe.ErrUnavailable, also: []error{errPlain}, calls: "begin"},
		"claim times out":            {d: scripted{begin: []error{timedOut}}, class: dedupe.ErrUnavailable, calls: "begin"},
		"claim in progress":          {d: scripted{begin: []error{dedupe.ErrInProgress}}, class: dedupe.ErrInProgress, calls: "begin"},
		"claim lost":                 {d: scripted{begin: []error{errLost, errLost}}, outcome: dedupe.Processed, calls: "begin begin begin commit"},
		"claim lost, then progress":  {d: scripted{begin: []error{errLost, dedupe.ErrInProgress}}, class: dedupe.ErrInProgress, calls: "begin begin"},
		"handler fails":              {fn: errPlain, also: []error{errPlain}, calls: "begin rollback"},
		"handler meets an outage":    {fn: fmt.Errorf("a: %w", errDown), class: dedupe.ErrUnavailable, also: []error{errDown}, calls: "begin rollback"},
		"handler hides an outage":    {d: scripted{explain: errDown}, fn: errPlain, class: dedupe.ErrUnavailable, also: []error{errDown, errPlain}, calls: "begin rollback"},
		"handler hides a time-out":   {d: scripted{explain: timedOut, rollback: errPlain}, fn: errPlain, also: []error{errPlain}, calls: "begin rollback"},
		"handler's own time-out":     {d: scripted{rollback: errPlain}, fn: timedOut, also: []error{timedOut}, calls: "begin rollback"},
		"connection lost":            {d: scripted{rollback: errPlain}, fn: io("x"), class: dedupe.ErrUnavailable, calls: "begin rollback"},
		"handler ended it":           {d: scripted{rollback: scope}, fn: errPlain, class: dedupe.ErrScope, also: []error{errPlain}, calls: "begin rollback"},
		"commit unknown":             {d: scripted{commit: []error{dedupe.ErrUnknownOutcome}}, class: dedupe.ErrUnknownOutcome, calls: "begin commit"},
		"commit unknown by a loser":  {d: scripted{commit: []error{errors.Join(dedupe.ErrUnknownOutcome, errLost)}}, class: dedupe.ErrUnknownOutcome, calls: "begin commit"},
		"commit lost":                {d: scripted{commit: []error{errLost}}, outcome: dedupe.Processed, calls: "begin commit begin commit"},
		"commit meets an outage":     {d: scripted{commit: []error{errDown}}, class: dedupe.ErrUnavailable, also: []error{errDown}, calls: "begin commit"},
		"commit refused":             {d: scripted{commit: []error{errPlain}}, also: []error{errPlain}, calls: "begin commit"},
		"swallowed error":            {d: scripted{commit: []error{errors.Join(dedupe.ErrScope, errPlain)}}, class: dedupe.ErrScope, calls: "begin commit"},
		"swallowed lost race":        {d: scripted{commit: []error{errors.Join(dedupe.ErrScope, errLost)}}, outcome: dedupe.Processed, calls: "begin commit begin commit"},
		"commit finds no connection": {d: scripted{commit: []error{dedupe.ErrUnavailable}}, class: dedupe.ErrUnavailable, calls: "begin commit"},
	} {
		t.Run(name, func(t *testing.T) {
			d := tc.d
			res, err := dedupe.NewTxStore(&d, nil).Once(t.Context(), claimOf("1"), returns(tc.fn))
			if res.Outcome != tc.outcome || (err == nil) != (tc.outcome != 0) {
				t.Errorf("Once: %v, %v; want %v", res.Outcome, err, tc.outcome)
			}
			for _, class := range classes {
				if errors.Is(err, class) != (class == tc.class) { //nolint:errorlint // sentinels of a table
					t.Errorf("Once: %v: it matches %q: %v", err, class, errors.Is(err, class))
				}
			}
			for _, also := range tc.also {
				if !errors.Is(err, also) {
					t.Errorf("Once: %v, want it to wrap %q", err, also)
				}
			}
			if calls := strings.Join(d.calls, " "); calls != tc.calls {
				t.Errorf("the driver was called: %s; want: %s", calls, tc.calls)
			}
		})
	}
}

func io(s string) error { return fmt.Errorf("read: %s", s) }

// TestLostRaces: a handler whose transaction lost is run again, in a
// transaction of its own each time, and not for ever.
func TestLostRaces(t *testing.T) {
	for name, tc := range map[string]struct {
		d       scripted
		retries int
		fn      error
		runs    int
	}{
		"default":            {fn: errLost, runs: 6},
		"as set":             {retries: 2, fn: errLost, runs: 3},
		"disabled":           {retries: -1, fn: errLost, runs: 1},
		"hidden by its text": {d: scripted{explain: errLost}, retries: 2, fn: errPlain, runs: 3},
	} {
		synctest.Test(t, func(t *testing.T) {
			d := tc.d
			var txs []int
			began := time.Now()
			_, err := dedupe.NewTxStore(&d, &dedupe.TxOptions{Retries: tc.retries}).Once(t.Context(), claimOf("1"),
				func(_ context.Context, tx int) ([]byte, error) {
					txs = append(txs, tx)
					return nil, tc.fn
				})
			if !errors.Is(err, dedupe.ErrContention) || !errors.Is(err, errLost) || !errors.Is(err, tc.fn) {
				t.Errorf("%s: %v, want ErrContention that wraps what was lost", name, err)
			}
			if len(txs) != tc.runs || len(slices.Compact(txs)) != tc.runs {
				t.Errorf("%s: runs in the transactions %v, want %d of its own", name, txs, tc.runs)
			}
			if n := strings.Count(strings.Join(d.calls, " "), "rollback"); n != tc.runs {
				t.Errorf("%s: %d rollbacks, want %d", name, n, tc.runs)
			}
			if took := time.Since(began); took > time.Second {
				t.Errorf("%s: took %v", name, took)
			}
		})
	}
}

// TestContextEndsBetweenRuns: the error says both what ended and what was lost.
func TestContextEndsBetweenRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		_, err := dedupe.NewTxStore(&scripted{}, &dedupe.TxOptions{Retries: 1000}).Once(ctx, claimOf("1"), returns(errLost))
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, errLost) || errors.Is(err, dedupe.ErrUnavailable) {
			t.Errorf("Once: %v, want the deadline and the lost race", err)
		}
	})
}

// TestCallerLosesInterest: a claim that ends because the caller cancelled it is
// no outage, one that the caller's deadline cut off is: the store did not answer.
func TestCallerLosesInterest(t *testing.T) {
	for _, tc := range []struct {
		end    error
		outage bool
	}{{context.Canceled, false}, {context.DeadlineExceeded, true}} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			d := hangs{&scripted{}, func() {
				if !tc.outage {
					cancel()
				}
			}}
			_, err := dedupe.NewTxStore[int](d, nil).Once(ctx, claimOf("1"), returns(nil))
			if !errors.Is(err, tc.end) || errors.Is(err, dedupe.ErrUnavailable) != tc.outage {
				t.Errorf("Once: %v, want %v, as an outage: %v", err, tc.end, tc.outage)
			}
		})
	}
}

// hangs does not answer a claim before its context ends.
type hangs struct {
	*scripted
	hung func()
}

func (h hangs) Begin(ctx context.Context, _ dedupe.Claim) (int, *dedupe.Record, error) {
	h.hung()
	<-ctx.Done()
	return 0, nil, ctx.Err()
}

// TestEndOutlivesTheContext: the commit, the rollback and the record of a
// conflict have a context of their own, with a bound.
func TestEndOutlivesTheContext(t *testing.T) {
	type key struct{}
	for name, end := range map[string]error{"commit": nil, "rollback": errPlain} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "kept"))
			d := &scripted{}
			_, err := dedupe.NewTxStore(d, &dedupe.TxOptions{CommitTimeout: time.Second}).Once(ctx, claimOf("1"),
				func(context.Context, int) ([]byte, error) {
					cancel()
					return nil, end
				})
			if !errors.Is(err, end) || errors.Is(err, dedupe.ErrUnavailable) {
				t.Errorf("%s: %v, want %v", name, err, end)
			}
			if end != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v does not say that the context had ended", name, err)
			}
			deadline, ok := d.ends[0].Deadline()
			if !ok || time.Until(deadline) != time.Second || d.ends[0].Value(key{}) != "kept" {
				t.Errorf("%s: its context ends %v from now, %v; want 1 s, and the caller's values", name, time.Until(deadline), ok)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	d := &cancelling{scripted: scripted{prior: &dedupe.Record{}}, cancel: cancel}
	res, err := dedupe.NewTxStore[int](d, nil).Once(ctx, claimOf("1"), returns(nil))
	if err != nil || res.Outcome != dedupe.Conflict {
		t.Errorf("conflict: %v, %v", res.Outcome, err)
	}
}

// cancelling cancels the caller's context when it has answered the claim.
type cancelling struct {
	scripted
	cancel func()
}

func (d *cancelling) Begin(ctx context.Context, c dedupe.Claim) (int, *dedupe.Record, error) {
	defer d.cancel()
	return d.scripted.Begin(ctx, c)
}

// TestNoWayOutWithoutRollback: a panic goes on, and the transaction is over.
func TestNoWayOutWithoutRollback(t *testing.T) {
	for name, leave := range map[string]func(){
		"panic":     func() { panic(errPlain) },
		"nil panic": func() { panic(nil) }, //nolint:govet // it happens
		"Goexit":    runtime.Goexit,
	} {
		d := &scripted{}
		done := make(chan any)
		go func() {
			returned := false
			defer func() {
				v := recover()
				if returned {
					v = "returned"
				}
				done <- v
			}()
			_, _ = dedupe.NewTxStore(d, nil).Once(t.Context(), claimOf("1"), func(context.Context, int) ([]byte, error) {
				leave()
				return nil, nil
			})
			returned = true
		}()
		v := <-done
		if v == "returned" || name == "panic" && v != any(errPlain) {
			t.Errorf("%s: recovered %v", name, v)
		}
		if calls := strings.Join(d.calls, " "); calls != "begin rollback" {
			t.Errorf("%s: the driver was called: %s", name, calls)
		}
	}
}

func TestContextDoneBefore(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	d := &scripted{}
	if _, err := dedupe.NewTxStore(d, nil).Once(ctx, claimOf("1"), returns(nil)); !errors.Is(err, context.Canceled) || len(d.calls) != 0 {
		t.Errorf("Once: %v, and the driver was called: %v", err, d.calls)
	}
}

func TestClaimIsCompleted(t *testing.T) {
	d := &scripted{}
	store := dedupe.NewTxStore(d, nil)
	if _, err := store.Once(t.Context(), claimOf("1"), returns(nil)); err != nil || d.claims[0].Retain != dedupe.DefaultRetain {
		t.Errorf("Retain is %v, %v; want the default", d.claims[0].Retain, err)
	}
	c := claimOf("2")
	c.Retain = time.Minute
	if _, err := store.Once(t.Context(), c, returns(nil)); err != nil || d.claims[1].Retain != time.Minute {
		t.Errorf("Retain is %v, %v; want a minute", d.claims[1].Retain, err)
	}
	c.Retain = -1
	if _, err := store.Once(t.Context(), c, returns(nil)); !errors.Is(err, dedupe.ErrInvalidClaim) || len(d.claims) != 2 {
		t.Errorf("a negative Retain: %v", err)
	}
}

func TestNewTxStoreNeedsADriver(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	dedupe.NewTxStore[int](nil, nil)
}
