package sqldedupe_test

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"testing"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/sqldedupe"
	"github.com/unecho/unecho/dedupe/storetest"
	"github.com/unecho/unecho/internal/planted"
	"github.com/unecho/unecho/internal/testenv"
)

type (
	dbDriver = sqldedupe.Driver
	scope    = sqldedupe.Scope
)

// plants are the bugs that the suite has to catch in a driver of this package,
// each with the case that has to do it.
var plants = []struct {
	bug, by string
	on      []sqldedupe.Dialect // SQLite if there is none
	build   func(d dbDriver) dbDriver
}{
	{"key in a transaction of its own", "handler error", nil, func(d dbDriver) dbDriver { return keyApart{d} }},
	{"duplicate swallowed", "duplicate", nil, func(d dbDriver) dbDriver { return noDuplicate{d} }},
	{"transaction ended by the handler taken for success", "B34 handler ends the transaction", nil, func(d dbDriver) dbDriver { return noGuard{d} }},
	{"commit error taken for success", "B33 commit lost on its way", servers, func(d dbDriver) dbDriver { return commitIsSuccess{d} }},
	{"commit error taken for failure", "B33 commit applied, answer lost", servers, func(d dbDriver) dbDriver { return commitIsFailure{d} }},
	{"in progress taken for done", "in progress", nil, func(d dbDriver) dbDriver { return progressIsDone{d} }},

	{"batch: keys in a transaction of their own", "batch: what fails leaves no trace", nil, func(d dbDriver) dbDriver { return keyApart{d} }},
	{"batch: duplicates swallowed", "batch: new, done and in conflict", nil, func(d dbDriver) dbDriver { return noDuplicate{d} }},
	{"batch: committed without the guard", "batch: B34 handler ends the transaction", nil, func(d dbDriver) dbDriver { return noGuard{d} }},
	{"batch: commit error taken for success", "batch: B33 commit lost on its way", servers, func(d dbDriver) dbDriver { return commitIsSuccess{d} }},
	{"batch: commit error taken for failure", "batch: B33 commit applied, answer lost", servers, func(d dbDriver) dbDriver { return commitIsFailure{d} }},
	{"batch: in progress taken for done", "batch: in progress", nil, func(d dbDriver) dbDriver { return progressIsDone{d} }},
	{"batch: claimed as it comes", "batch: keys are claimed in order", nil, func(d dbDriver) dbDriver { return unsorted{d} }},
	{"batch: a part taken for the whole", "batch: a thousand claims", nil, func(d dbDriver) dbDriver { return firstPart{d, false} }},
	{"batch: own rows taken for a winner's", "batch: a thousand claims", nil, func(d dbDriver) dbDriver { return firstPart{d, true} }},
	{"batch: replies of other claims", "batch: replies", nil, func(d dbDriver) dbDriver { return turnedReplies{d} }},
	{"batch: replies not kept", "batch: replies", nil, func(d dbDriver) dbDriver { return noReplies{d} }},
	{"batch: records in another order", "batch: new, done and in conflict", nil, func(d dbDriver) dbDriver { return turnedRecords{d} }},
	{"batch: fields not kept", "batch: B14 a conflict names the fields that differ", nil, func(d dbDriver) dbDriver { return noFields{d} }},
}

// servers have a commit whose answer can be lost.
var servers = []sqldedupe.Dialect{sqldedupe.Postgres, sqldedupe.MySQL}

var openers = map[sqldedupe.Dialect]storetest.Open[*sql.Tx]{
	sqldedupe.Postgres: openPostgres(sqldedupe.Options{}),
	sqldedupe.MySQL:    openMySQL(sqldedupe.Options{}, asItComes),
	sqldedupe.SQLite:   openSQLite(sqldedupe.Options{}, "_pragma=journal_mode(WAL)"),
}

func TestPlanted(t *testing.T) {
	cases := map[string]storetest.Case[*sql.Tx]{}
	for _, c := range storetest.Cases[*sql.Tx]() {
		cases[c.Name] = c
	}
	for _, p := range plants {
		if p.on == nil {
			p.on = []sqldedupe.Dialect{sqldedupe.SQLite}
		}
		for _, d := range p.on {
			name := d.String() + " " + p.bug
			t.Run(name, func(t *testing.T) {
				c, ok := cases[p.by]
				if !ok {
					t.Fatalf("the suite has no case %q", p.by)
				}
				planted.Caught(t, "sqldedupe/"+name, func(tb testing.TB) { c.Run(tb, broken(d, p.build)) })
			})
		}
	}
}

// broken is a harness whose driver is broken.
func broken(d sqldedupe.Dialect, build func(d dbDriver) dbDriver) storetest.Open[*sql.Tx] {
	return func(tb testing.TB, s storetest.Settings) storetest.Harness[*sql.Tx] {
		h := openers[d](tb, s)
		own := h.(interface{ itself() *harness }).itself()
		own.store = sqldedupe.StoreOf(build(sqldedupe.NewDriver(own.db, d, &own.o)))
		return h
	}
}

func (h *harness) itself() *harness { return h }

// another begins a transaction that owns a key nobody cares for.
func another(ctx context.Context, d dbDriver) (*scope, error) {
	s, _, err := d.Begin(ctx, claim(testenv.Name("another")))
	return s, err
}

// keyApart commits the keys before the handler runs.
type keyApart struct{ dbDriver }

func (d keyApart) Begin(ctx context.Context, c dedupe.Claim) (*scope, *dedupe.Record, error) {
	s, priors, err := d.BeginBatch(ctx, []dedupe.Claim{c})
	if err != nil {
		return nil, nil, err
	}
	return s, priors[0], nil
}

func (d keyApart) BeginBatch(ctx context.Context, claims []dedupe.Claim) (*scope, []*dedupe.Record, error) {
	s, priors, err := d.dbDriver.BeginBatch(ctx, claims)
	if err != nil || s == nil {
		return nil, priors, err
	}
	if err := d.CommitBatch(ctx, s, nil, nil); err != nil {
		return nil, nil, err
	}
	s, err = another(ctx, d.dbDriver)
	return s, priors, err
}

// noDuplicate takes a key that was there for its own.
type noDuplicate struct{ dbDriver }

func (d noDuplicate) Begin(ctx context.Context, c dedupe.Claim) (*scope, *dedupe.Record, error) {
	s, prior, err := d.dbDriver.Begin(ctx, c)
	if prior != nil {
		s, err = another(ctx, d.dbDriver)
	}
	return s, nil, err
}

func (d noDuplicate) BeginBatch(ctx context.Context, claims []dedupe.Claim) (*scope, []*dedupe.Record, error) {
	s, _, err := d.dbDriver.BeginBatch(ctx, claims)
	if s == nil && err == nil {
		s, err = another(ctx, d.dbDriver)
	}
	return s, make([]*dedupe.Record, len(claims)), err
}

// noGuard does not look at what became of the transaction.
type noGuard struct{ dbDriver }

func fine(err error) error {
	if errors.Is(err, dedupe.ErrScope) {
		return nil
	}
	return err
}

func (d noGuard) Commit(ctx context.Context, s *scope, c dedupe.Claim, reply []byte) error {
	return fine(d.dbDriver.Commit(ctx, s, c, reply))
}

func (d noGuard) CommitBatch(ctx context.Context, s *scope, claims []dedupe.Claim, replies [][]byte) error {
	return fine(d.dbDriver.CommitBatch(ctx, s, claims, replies))
}

type commitIsSuccess struct{ dbDriver }

func (d commitIsSuccess) Commit(ctx context.Context, s *scope, c dedupe.Claim, reply []byte) error {
	_ = d.dbDriver.Commit(ctx, s, c, reply)
	return nil
}

func (d commitIsSuccess) CommitBatch(ctx context.Context, s *scope, claims []dedupe.Claim, replies [][]byte) error {
	_ = d.dbDriver.CommitBatch(ctx, s, claims, replies)
	return nil
}

type commitIsFailure struct{ dbDriver }

func failed(err error) error {
	if err != nil {
		return errors.New("commit failed")
	}
	return nil
}

func (d commitIsFailure) Commit(ctx context.Context, s *scope, c dedupe.Claim, reply []byte) error {
	return failed(d.dbDriver.Commit(ctx, s, c, reply))
}

func (d commitIsFailure) CommitBatch(ctx context.Context, s *scope, claims []dedupe.Claim, replies [][]byte) error {
	return failed(d.dbDriver.CommitBatch(ctx, s, claims, replies))
}

type progressIsDone struct{ dbDriver }

func (d progressIsDone) Begin(ctx context.Context, c dedupe.Claim) (*scope, *dedupe.Record, error) {
	s, prior, err := d.dbDriver.Begin(ctx, c)
	if errors.Is(err, dedupe.ErrInProgress) {
		return nil, &dedupe.Record{Fingerprint: c.Fingerprint}, nil
	}
	return s, prior, err
}

func (d progressIsDone) BeginBatch(ctx context.Context, claims []dedupe.Claim) (*scope, []*dedupe.Record, error) {
	s, priors, err := d.dbDriver.BeginBatch(ctx, claims)
	if errors.Is(err, dedupe.ErrInProgress) {
		return nil, records(claims), nil
	}
	return s, priors, err
}

// records are of claims as if they were done.
func records(claims []dedupe.Claim) (all []*dedupe.Record) {
	for _, c := range claims {
		all = append(all, &dedupe.Record{Fingerprint: c.Fingerprint})
	}
	return all
}

// unsorted claims one key after the other, in the order in which they come.
type unsorted struct{ dbDriver }

func (d unsorted) BeginBatch(ctx context.Context, claims []dedupe.Claim) (*scope, []*dedupe.Record, error) {
	s, prior, err := d.Begin(ctx, claims[0])
	if err != nil || prior != nil {
		return nil, nil, errors.Join(err, errors.New("this driver takes new keys only"))
	}
	for _, c := range claims[1:] {
		id := c.Key.Stored()
		if _, err := s.Tx().ExecContext(ctx, "insert into unecho_key (key, fingerprint, done_at, expires_at) values (?, ?, 0, 0)", id[:], c.Fingerprint[:]); err != nil {
			return nil, nil, errors.Join(err, d.Rollback(ctx, s))
		}
	}
	return s, make([]*dedupe.Record, len(claims)), nil
}

// firstPart claims what fits into one statement, and takes the rest for new, or
// for done.
type firstPart struct {
	dbDriver
	done bool
}

func (d firstPart) BeginBatch(ctx context.Context, claims []dedupe.Claim) (*scope, []*dedupe.Record, error) {
	n := min(500, len(claims))
	s, priors, err := d.dbDriver.BeginBatch(ctx, claims[:n])
	rest := make([]*dedupe.Record, len(claims)-n)
	if d.done {
		rest = records(claims[n:])
	}
	return s, append(priors, rest...), err
}

type turnedReplies struct{ dbDriver }

func (d turnedReplies) CommitBatch(ctx context.Context, s *scope, claims []dedupe.Claim, replies [][]byte) error {
	turned := slices.Clone(replies)
	slices.Reverse(turned)
	return d.dbDriver.CommitBatch(ctx, s, claims, turned)
}

type noReplies struct{ dbDriver }

func (d noReplies) CommitBatch(ctx context.Context, s *scope, claims []dedupe.Claim, replies [][]byte) error {
	return d.dbDriver.CommitBatch(ctx, s, claims, make([][]byte, len(replies)))
}

type turnedRecords struct{ dbDriver }

func (d turnedRecords) BeginBatch(ctx context.Context, claims []dedupe.Claim) (*scope, []*dedupe.Record, error) {
	s, priors, err := d.dbDriver.BeginBatch(ctx, claims)
	slices.Reverse(priors)
	return s, priors, err
}

type noFields struct{ dbDriver }

func (d noFields) BeginBatch(ctx context.Context, claims []dedupe.Claim) (*scope, []*dedupe.Record, error) {
	s, priors, err := d.dbDriver.BeginBatch(ctx, claims)
	for _, p := range priors {
		if p != nil {
			p.Fields = nil
		}
	}
	return s, priors, err
}
