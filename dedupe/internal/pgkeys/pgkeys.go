// Package pgkeys holds what pgdedupe and sqldedupe share on PostgreSQL: the
// tables, the statements, and the meaning of its error codes. Both work on the
// same tables, so a program can move from one to the other.
package pgkeys

import (
	"embed"
	"encoding/json"
	"io/fs"
	"strings"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/internal/migrate"
	"github.com/unecho/unecho/internal/sqlstate"
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
	// Claim inserts a key unless it is there. One row: the transaction owns
	// the key, and its first column is the transaction's id. No row: the key
	// was there.
	//
	// Arguments: key, fingerprint, retention in microseconds, bound of the
	// wait for a lock in milliseconds as text, tenant, consumer, source, id,
	// fields.
	Claim string
	// ClaimOrFail is Claim, but fails with UniqueViolation of KeyConstraint if
	// the key was there, so that nothing behind it in a pipeline happens.
	ClaimOrFail string
	// ClaimEach inserts those of several keys that are not there. One row for
	// each that is the transaction's own: key, and the transaction's id. It
	// leaves lock_timeout changed: send LockBack behind it.
	//
	// Arguments: those of Claim, each but the fourth as an array; the keys in
	// order.
	ClaimEach string
	// Winners reads the records of several keys: key, and what Winner reads.
	// Argument: keys, as an array.
	Winners string
	// Replies stores several replies. Arguments: keys, replies, as arrays.
	Replies string
	// Winner reads the record of a key: fingerprint, fields, reply, done_at.
	// Argument: key.
	Winner string
	// Reply stores a reply. Arguments: key, reply.
	Reply string
	// Guard fails with division by zero unless the transaction is the one
	// whose id is its argument, as text. GuardSame takes no argument, and
	// means the transaction of ClaimOrFail.
	Guard, GuardSame string
	// Conflict records a conflict. Arguments: see ConflictArgs.
	Conflict string
	// Prune deletes keys that have expired, but for those with a conflict.
	// Argument: how many at most.
	Prune string
}

// KeyConstraint is the constraint that decides who has a key.
const KeyConstraint = "unecho_key_pkey"

// UniqueViolation is the code of a claim by ClaimOrFail that came second.
const UniqueViolation = "23505"

// GuardFailed is the code of a failed Guard.
const GuardFailed = "22012"

// lockWait bounds the wait for a lock for the rest of this one statement: the
// insert that follows it waits for another holder of the key, and RETURNING
// puts back what was set before. A claim that ends without a row or with an
// error is rolled back, and the setting with it. CASE, because the order in
// which AND evaluates its sides is not defined.
//
// The transaction's id is noted for GuardSame in the same way: a transaction
// that the handler has begun itself does not have the setting.
const (
	lockWait = `case when set_config('unecho.lock_timeout', current_setting('lock_timeout'), true) is not null
		then set_config('lock_timeout', $4::text, true) end is not null`
	lockBack = `set_config('lock_timeout', current_setting('unecho.lock_timeout'), true)`
	noteID   = `set_config('unecho.xid', pg_current_xact_id()::text, true)`
)

// LockBack puts back what a claim that took no row has set, in a transaction
// that goes on.
const LockBack = `select ` + lockBack

// Savepoint, Release and Back surround a claim in a transaction that goes on
// whatever becomes of the claim.
const (
	Savepoint = `savepoint unecho_claim`
	Release   = `release savepoint unecho_claim`
	Back      = `rollback to savepoint unecho_claim`
)

// New returns the statements for the tables of a set.
func New(s *migrate.Set) Statements {
	fill := strings.NewReplacer("{{key}}", s.Table("unecho_key"), "{{conflict}}", s.Table("unecho_conflict"),
		"{{lock_wait}}", lockWait, "{{lock_back}}", lockBack, "{{note_id}}", noteID).Replace
	const insert = `insert into {{key}} as k (key, fingerprint, done_at, expires_at, tenant, consumer, source, id, fields)
select $1::uuid, $2::bytea, now(), now() + $3::bigint * interval '1 microsecond', $5::text, $6::text, $7::text, $8::text, $9::bytea
where {{lock_wait}}`
	return Statements{
		Claim: fill(insert + `
on conflict (key) do nothing
returning pg_current_xact_id()::text, {{lock_back}}`),
		ClaimOrFail: fill(insert + `
returning {{note_id}}, {{lock_back}}`),
		// The bound is set once, before the first row: a subselect that refers
		// to nothing is evaluated once. RETURNING must not put it back, or the
		// second row would wait without it.
		ClaimEach: fill(`insert into {{key}} (key, fingerprint, done_at, expires_at, tenant, consumer, source, id, fields)
select k.key, k.fingerprint, now(), now() + k.retain * interval '1 microsecond', k.tenant, k.consumer, k.source, k.id, k.fields
from unnest($1::uuid[], $2::bytea[], $3::bigint[], $5::text[], $6::text[], $7::text[], $8::text[], $9::bytea[])
	as k (key, fingerprint, retain, tenant, consumer, source, id, fields)
where (select {{lock_wait}})
order by k.key
on conflict (key) do nothing
returning key::text, pg_current_xact_id()::text`),
		Winners:   fill(`select key::text, fingerprint, fields, reply, done_at from {{key}} where key = any($1::uuid[])`),
		Replies:   fill(`update {{key}} k set reply = r.reply from unnest($1::uuid[], $2::bytea[]) as r (key, reply) where k.key = r.key`),
		Winner:    fill(`select fingerprint, fields, reply, done_at from {{key}} where key = $1::uuid`),
		Reply:     fill(`update {{key}} set reply = $2::bytea where key = $1::uuid`),
		Guard:     `select 1 / (pg_current_xact_id()::text = $1::text)::int`,
		GuardSame: `select 1 / (pg_current_xact_id()::text = coalesce(current_setting('unecho.xid', true), ''))::int`,
		Conflict: fill(`insert into {{conflict}} (key, fingerprint, first_fingerprint, seen_at, reason, fields, tenant, consumer, source, id)
values ($1::uuid, $2::bytea, $3::bytea, now(), $4::text, $5::text, $6::text, $7::text, $8::text, $9::text)
on conflict do nothing`),
		Prune: fill(`delete from {{key}} where key in
	(select key from {{key}} k where expires_at <= now() and not exists (select from {{conflict}} c where c.key = k.key)
	limit $1::bigint for update skip locked)`),
	}
}

// Fields is the list of the fields of a conflict as it is stored; nil if there
// is none.
func Fields(names []string) any {
	if names == nil {
		return nil
	}
	b, _ := json.Marshal(names) // strings have a form
	return string(b)
}

// ParseFields reads what Fields has made.
func ParseFields(stored *string) (names []string) {
	if stored != nil {
		_ = json.Unmarshal([]byte(*stored), &names) // what somebody else has written there is no list
	}
	return names
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
	LockTimeout   = sqlstate.LockTimeout
	QueryCanceled = "57014"
)

// Aborted is the code of every statement in a transaction after one has failed.
const Aborted = "25P02"

// Classify says what a code means.
func Classify(code string) dedupe.Class {
	switch {
	case sqlstate.Contention(code):
		return dedupe.ClassRetry
	case sqlstate.Outage(code):
		return dedupe.ClassUnavailable
	}
	return dedupe.ClassOther
}
