package pgkeys

import (
	"strings"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/internal/migrate"
)

// LeaseStatements are the texts of what a lease driver sends. Each is one
// statement and decides by the database's clock.
type LeaseStatements struct {
	// Acquire claims a key unless it is held, parked or done, or unknown with
	// another fingerprint. Arguments: key, fingerprint, owner, lease in
	// microseconds, tenant, consumer, source, id, fields.
	// One row: token, attempt, unknown. No row: see Holder.
	Acquire string
	// Holder reads who has the key: state, owner, token, attempt, unknown,
	// fingerprint, fields, reply, done_at, microseconds that are left of the
	// lease. Argument: key.
	Holder string
	// Extend, Complete and Release change the row of a claim that is still the
	// caller's; no row: it is not. Arguments: key, owner, token, and lease in
	// microseconds; reply, retention in microseconds; state,
	// unknown.
	Extend, Complete, Release string
	// Prune deletes what is done and has expired, but for keys with a conflict.
	// Argument: how many rows.
	Prune string
}

// NewLease returns the statements for the tables of a set.
func NewLease(s *migrate.Set) LeaseStatements {
	fill := strings.NewReplacer("{{lease}}", s.Table("unecho_lease"), "{{conflict}}", s.Table("unecho_conflict"),
		"{{token}}", strings.ReplaceAll(s.Table("unecho_token"), "'", "''")).Replace
	const now = "clock_timestamp()"
	const ours = ` where key = $1::uuid and owner = $2::text and token = $3::bigint`
	return LeaseStatements{
		// The update draws a token of its own. The one in the values is drawn
		// before the row is locked: while this claim waits for the row, others
		// may come and go with higher ones.
		Acquire: fill(`insert into {{lease}} as l (key, state, owner, token, attempt, unknown, lease_until, fingerprint, tenant, consumer, source, id, fields)
values ($1::uuid, 'r', $3::text, nextval('{{token}}'), 1, false, ` + now + ` + $4::bigint * interval '1 microsecond', $2::bytea, $5::text, $6::text, $7::text, $8::text, $9::bytea)
on conflict (key) do update set state = 'r', owner = excluded.owner, token = nextval('{{token}}'), attempt = l.attempt + 1,
	unknown = l.state = 'r' or l.unknown, lease_until = excluded.lease_until, fingerprint = excluded.fingerprint, fields = excluded.fields
	where l.state = 'f' and (not l.unknown or l.fingerprint = excluded.fingerprint)
		or l.state = 'r' and l.lease_until <= ` + now + ` and l.fingerprint = excluded.fingerprint
returning token, attempt, unknown`),
		Holder: fill(`select state::text, owner, token, attempt, unknown, fingerprint, fields, reply, done_at,
	greatest(0, extract(epoch from lease_until - ` + now + `) * 1000000)::bigint from {{lease}} where key = $1::uuid`),
		Extend: fill(`update {{lease}} set lease_until = ` + now + ` + $4::bigint * interval '1 microsecond'` + ours + ` and state = 'r'`),
		// The first completion is the one that counts.
		Complete: fill(`update {{lease}} set state = 'd', unknown = false, done_at = coalesce(done_at, ` + now + `),
	reply = case when state = 'd' then reply else $4::bytea end,
	expires_at = coalesce(expires_at, ` + now + ` + $5::bigint * interval '1 microsecond')` + ours + ` and state in ('r', 'd')`),
		Release: fill(`update {{lease}} set state = $4::text::"char", unknown = $5::boolean` + ours + ` and state = 'r'`),
		Prune: fill(`delete from {{lease}} where key in
	(select key from {{lease}} l where expires_at <= ` + now + ` and state = 'd' and not exists (select from {{conflict}} c where c.key = l.key)
	limit $1::bigint for update skip locked)`),
	}
}

// Released is how a state in which a lease is given up is stored. It reports
// false for any other state.
func Released(to dedupe.State) (state string, unknown, ok bool) {
	switch to {
	case dedupe.StateFree:
		return "f", false, true
	case dedupe.StateUnknown:
		return "f", true, true
	case dedupe.StateParked:
		return "p", true, true
	}
	return "", false, false
}
