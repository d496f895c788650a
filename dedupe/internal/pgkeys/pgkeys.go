// Package pgkeys holds what pgdedupe and sqldedupe share on PostgreSQL: the
// tables, the statements, and the meaning of its error codes. Both work on the
// same tables, so a program can move from one to the other.
package pgkeys

import (
	"embed"
	"io/fs"
	"strings"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/internal/migrate"
)

//go:embed sql/*.sql
var files embed.FS

// Set returns the migrations, in schema or, if that is empty, in whatever
// schema unqualified names mean. It panics if migrate.CheckName refuses schema.
func Set(schema string) *migrate.Set {
	sub, err := fs.Sub(files, "sql")
	if err != nil {
		panic(err) // the folder is embedded
	}
	return migrate.MustNew("dedupe/postgres", sub, schema)
}

// Statements are the texts of what a driver sends.
type Statements struct {
	// Claim inserts a key unless it is there. Its arguments are those of
	// [Statements.Takeover]. One row: the transaction owns the key, and its
	// first column is the transaction's id. No row: the key was there.
	Claim string
	// Takeover is Claim, but replaces a key that has expired. It costs a lock
	// on the row even where it replaces nothing, so it is not the first try.
	//
	// Arguments: key, fingerprint, retention in microseconds, bound of the
	// wait for a lock in milliseconds as text, tenant, consumer, source, id.
	Takeover string
	// Winner reads the record of a key: fingerprint, reply, done_at, and
	// whether it has expired. Argument: key.
	Winner string
	// Reply stores a reply. Arguments: key, reply.
	Reply string
	// Guard fails with division by zero unless the transaction is the one
	// whose id is its argument, as text.
	Guard string
	// Conflict records a conflict. Arguments: key, fingerprint, the first
	// fingerprint, retention in microseconds, tenant, consumer, source, id.
	Conflict string
	// PruneKeys and PruneConflicts delete what has expired. Argument: how
	// many rows at most.
	PruneKeys, PruneConflicts string
}

// GuardFailed is the code of a failed Guard.
const GuardFailed = "22012"

// lockWait bounds the wait for a lock for the rest of this one statement: the
// insert that follows it waits for another holder of the key, and RETURNING
// puts back what was set before. A claim that ends without a row or with an
// error is rolled back, and the setting with it. CASE, because the order in
// which AND evaluates its sides is not defined.
const (
	lockWait = `case when set_config('unecho.lock_timeout', current_setting('lock_timeout'), true) is not null
		then set_config('lock_timeout', $4::text, true) end is not null`
	lockBack = `set_config('lock_timeout', current_setting('unecho.lock_timeout'), true)`
)

// New returns the statements for the tables of a set.
func New(s *migrate.Set) Statements {
	fill := strings.NewReplacer("{{key}}", s.Table("unecho_key"), "{{conflict}}", s.Table("unecho_conflict"),
		"{{lock_wait}}", lockWait, "{{lock_back}}", lockBack).Replace
	const insert = `insert into {{key}} as k (key, fingerprint, done_at, expires_at, tenant, consumer, source, id)
select $1::uuid, $2::bytea, now(), now() + $3::bigint * interval '1 microsecond', $5::text, $6::text, $7::text, $8::text
where {{lock_wait}}
on conflict (key) do `
	const returning = `
returning pg_current_xact_id()::text, {{lock_back}}`
	return Statements{
		Claim: fill(insert + `nothing` + returning),
		Takeover: fill(insert + `update set fingerprint = excluded.fingerprint, done_at = excluded.done_at,
	expires_at = excluded.expires_at, reply = null, tenant = excluded.tenant, consumer = excluded.consumer,
	source = excluded.source, id = excluded.id
	where k.expires_at <= now()` + returning),
		Winner: fill(`select fingerprint, reply, done_at, expires_at <= now() from {{key}} where key = $1::uuid`),
		Reply:  fill(`update {{key}} set reply = $2::bytea where key = $1::uuid`),
		Guard:  `select 1 / (pg_current_xact_id()::text = $1::text)::int`,
		Conflict: fill(`insert into {{conflict}} (key, fingerprint, first_fingerprint, seen_at, expires_at, tenant, consumer, source, id)
values ($1::uuid, $2::bytea, $3::bytea, now(), now() + $4::bigint * interval '1 microsecond', $5::text, $6::text, $7::text, $8::text)
on conflict do nothing`),
		PruneKeys: fill(`delete from {{key}} where key in
	(select key from {{key}} where expires_at <= now() limit $1::bigint for update skip locked)`),
		PruneConflicts: fill(`delete from {{conflict}} where (key, fingerprint) in
	(select key, fingerprint from {{conflict}} where expires_at <= now() limit $1::bigint for update skip locked)`),
	}
}

// Milliseconds is d as lock_timeout takes it. Zero would be no bound at all.
func Milliseconds(d time.Duration) int64 { return max(1, d.Milliseconds()) }

// Microseconds is d in the unit of the statements, rounded up.
func Microseconds(d time.Duration) int64 {
	us := d.Microseconds()
	if d%time.Microsecond > 0 {
		us++
	}
	return us
}

// LockTimeout and QueryCanceled are the codes of a claim that waited for
// another holder of its key until lock_timeout, or a shorter
// statement_timeout of the user's, was over.
const (
	LockTimeout   = "55P03"
	QueryCanceled = "57014"
)

// Aborted is the code of every statement in a transaction after one has failed.
const Aborted = "25P02"

// Classify says what a code means.
func Classify(code string) dedupe.Class {
	switch code {
	case "40001", "40P01", LockTimeout: // serialization failure, deadlock
		return dedupe.ClassRetry
	case "25006": // read-only: what was the primary is a standby now
		return dedupe.ClassUnavailable
	}
	if outage(code) || strings.HasPrefix(code, "53") { // 53: out of connections, memory, disk
		return dedupe.ClassUnavailable
	}
	return dedupe.ClassOther
}

// outage: connection exceptions, the end of the server, its own I/O errors.
func outage(code string) bool {
	for _, class := range [...]string{"08", "57P", "58"} {
		if strings.HasPrefix(code, class) {
			return true
		}
	}
	return false
}

// Refused reports whether an error with this code, in answer to a commit, says
// that there was no commit. A server that says so says it as the verdict on the
// statement; what a proxy or a dying server says is about the connection, and
// the commit may have happened.
func Refused(code string) bool {
	switch code {
	case "25P03", "25P04", "40003": // idle or transaction time-out, completion unknown
		return false
	}
	return len(code) == 5 && !outage(code) && !strings.HasPrefix(code, "XX")
}
