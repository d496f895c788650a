package pgdedupe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/pgkeys"
)

func TestEndsTransaction(t *testing.T) {
	for sql, want := range map[string]string{
		"":                                "",
		";;":                              "",
		"commit":                          "commit",
		"COMMIT;":                         "commit",
		" \t\n Commit And Chain":          "commit",
		"--x\ncommit":                     "commit",
		"--commit":                        "",
		"/* a /* b */ c */ rollback":      "rollback",
		"/* commit":                       "",
		"select 1;abort":                  "abort",
		"select 1; /* */ ; end work":      "end",
		"begin isolation level x":         "begin",
		"start transaction":               "start transaction",
		"start/**/transaction":            "start transaction",
		"starting":                        "",
		"prepare transaction 'x'":         "prepare transaction",
		"prepare p as select 1":           "",
		"rollback to x":                   "",
		"rollback to savepoint x":         "",
		"rollback work to x":              "",
		"rollback transaction to x":       "",
		"rollback prepared 'x'":           "rollback",
		"rollback work":                   "rollback",
		"savepoint x":                     "",
		"release x":                       "",
		"committed":                       "",
		"commit_all()":                    "",
		"select 'x; commit'":              "",
		"select 'x''; commit'":            "",
		`select E'\'; commit'`:            "",
		`select '\'; commit`:              "commit",
		`select date'\'; commit`:          "commit",
		`select "a; commit"`:              "",
		`select "a""; commit"`:            "",
		"select $$; commit$$":             "",
		"select $a$; $$ commit$a$":        "",
		"select $a$; $$; commit":          "",
		"select $1; commit":               "commit",
		"select $1$2; commit":             "commit",
		"select a$b$; commit; select $b$": "commit",
		"select 1 -- ; commit":            "",
		"select 1 - 1; commit":            "commit",
		"select 1 / 1; commit":            "commit",
		"select 1 /* ; */; commit":        "commit",
		"insert into t values ('é'); end": "end",
		"create function f() returns int begin atomic select 1; end": "",
		"create table t (n int); commit":                             "commit",
		"do $$ begin null; end $$":                                   "",
		"do $$ begin null; end $$; commit":                           "commit",
		"('commit')":                                                 "",
	} {
		if got := endsTransaction(sql); got != want {
			t.Errorf("%q: %q, want %q", sql, got, want)
		}
	}
}

func FuzzEndsTransaction(f *testing.F) {
	f.Add("select 'a'; /* b */ commit -- c")
	f.Add("$a$;E'\\")
	f.Fuzz(func(t *testing.T, sql string) {
		endsTransaction(sql) // ends, and does not panic
		if endsTransaction("commit;"+sql) != "commit" {
			t.Errorf("commit before %q passes", sql)
		}
	})
}

// TestCommitErrors: what is a verdict, and what is only a silence.
func TestCommitErrors(t *testing.T) {
	server := func(severity, code string) error {
		return fmt.Errorf("wrapped: %w", &pgconn.PgError{Severity: "FEHLER", SeverityUnlocalized: severity, Code: code})
	}
	for name, tc := range map[string]struct {
		err     error
		byGuard bool
		want    error // nil: a definite failure of no class
	}{
		"unique violation":        {err: server("ERROR", "23505")},
		"serialization failure":   {err: server("ERROR", "40001")},
		"division in the handler": {err: server("ERROR", "22012")},
		"guard":                   {err: server("ERROR", "22012"), byGuard: true, want: dedupe.ErrScope},
		"aborted":                 {err: server("ERROR", "25P02"), want: dedupe.ErrScope},
		"shutdown":                {err: server("FATAL", "57P01"), want: dedupe.ErrUnknownOutcome},
		"fatal of any kind":       {err: server("FATAL", "23505"), want: dedupe.ErrUnknownOutcome},
		"a pooler's error":        {err: server("ERROR", "08P01"), want: dedupe.ErrUnknownOutcome},
		"completion unknown":      {err: server("ERROR", "40003"), want: dedupe.ErrUnknownOutcome},
		"end of file":             {err: io.ErrUnexpectedEOF, want: dedupe.ErrUnknownOutcome},
		"time-out":                {err: context.DeadlineExceeded, want: dedupe.ErrUnknownOutcome},
		"said to be safe":         {err: safe{errors.New("conn closed")}, want: dedupe.ErrUnknownOutcome},
	} {
		unknown, err := commitError(tc.err, tc.byGuard)
		if !errors.Is(err, tc.err) || tc.want != nil && !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", name, err, tc.want)
		}
		if want := errors.Is(tc.want, dedupe.ErrUnknownOutcome); unknown != want || errors.Is(err, dedupe.ErrUnknownOutcome) != want {
			t.Errorf("%s: %v: unknown %v, want %v", name, err, unknown, want)
		}
	}
}

type safe struct{ error }

func (safe) SafeToRetry() bool { return true }

func TestClassify(t *testing.T) {
	d := &driver{}
	for code, want := range map[string]dedupe.Class{
		"40001": dedupe.ClassRetry, "40P01": dedupe.ClassRetry, pgkeys.LockTimeout: dedupe.ClassRetry,
		"57P01": dedupe.ClassUnavailable, "57P02": dedupe.ClassUnavailable, "57P03": dedupe.ClassUnavailable,
		"08006": dedupe.ClassUnavailable, "53300": dedupe.ClassUnavailable, "53100": dedupe.ClassUnavailable,
		"25006": dedupe.ClassUnavailable, "58030": dedupe.ClassUnavailable,
		"23505": dedupe.ClassOther, "57014": dedupe.ClassOther, "25P02": dedupe.ClassOther, "42P01": dedupe.ClassOther,
	} {
		if got := d.Classify(fmt.Errorf("a: %w", &pgconn.PgError{Code: code})); got != want {
			t.Errorf("%s: class %d, want %d", code, got, want)
		}
	}
	for _, err := range []error{nil, io.ErrUnexpectedEOF, context.DeadlineExceeded, context.Canceled, errors.New("x")} {
		if got := d.Classify(err); got != dedupe.ClassOther {
			t.Errorf("%v: class %d, want other", err, got)
		}
	}
	// A database that is not there, by the real thing.
	_, err := pgconn.Connect(t.Context(), "postgres://127.0.0.1:1/x?connect_timeout=1")
	if got := d.Classify(err); got != dedupe.ClassUnavailable {
		t.Errorf("%v: class %d, want unavailable", err, got)
	}
}
