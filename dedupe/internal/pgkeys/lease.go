package pgkeys

import (
	"strings"

	"github.com/unecho/unecho/internal/migrate"
)

// LeaseStatements are the texts of what a lease driver sends. Each is one
// statement and decides by the database's clock.
type LeaseStatements struct {
	// Acquire claims a key unless it is held or done. Arguments: key,
	// fingerprint, owner, lease in microseconds, tenant, consumer, source, id.
	// One row: token, attempt, unknown. No row: see Holder.
	Acquire string
	// Holder reads who has the key: state, owner, token, attempt, unknown,
	// fingerprint, reply, done_at. Argument: key.
	Holder string
	// Extend, Complete and Release change the row of a claim that is still the
	// caller's; no row: it is not. Arguments: key, owner, token, and lease in
	// microseconds; fingerprint, reply, retention in microseconds; unknown.
	Extend, Complete, Release string
	// Prune deletes what is done and has expired. Argument: how many rows.
	Prune string
}

// NewLease returns the statements for the tables of a set.
func NewLease(s *migrate.Set) LeaseStatements {
	fill := strings.NewReplacer("{{lease}}", s.Table("unecho_lease"),
		"{{token}}", strings.ReplaceAll(s.Table("unecho_token"), "'", "''")).Replace
	const now = "clock_timestamp()"
	const ours = ` where key = $1::uuid and owner = $2::text and token = $3::bigint`
	return LeaseStatements{
		// A row that expired is another event's time: it begins anew, and what
		// was unknown is not, because nobody can be asked about it any more.
		Acquire: fill(`insert into {{lease}} as l (key, state, owner, token, attempt, unknown, lease_until, fingerprint, tenant, consumer, source, id)
values ($1::uuid, 'r', $3::text, nextval('{{token}}'), 1, false, ` + now + ` + $4::bigint * interval '1 microsecond', $2::bytea, $5::text, $6::text, $7::text, $8::text)
on conflict (key) do update set state = 'r', owner = excluded.owner, token = excluded.token,
	attempt = case when l.state = 'd' then 1 else l.attempt + 1 end,
	unknown = l.state = 'r' or l.state = 'f' and l.unknown,
	lease_until = excluded.lease_until, done_at = null, expires_at = null, reply = null, fingerprint = excluded.fingerprint
	where l.state = 'f' or l.state = 'r' and l.lease_until <= ` + now + ` or l.state = 'd' and l.expires_at <= ` + now + `
returning token, attempt, unknown`),
		Holder: fill(`select state::text, owner, token, attempt, unknown, fingerprint, reply, done_at from {{lease}} where key = $1::uuid`),
		Extend: fill(`update {{lease}} set lease_until = ` + now + ` + $4::bigint * interval '1 microsecond'` + ours + ` and state = 'r'`),
		Complete: fill(`update {{lease}} set state = 'd', unknown = false, done_at = coalesce(done_at, ` + now + `), fingerprint = $4::bytea,
	reply = $5::bytea, expires_at = ` + now + ` + $6::bigint * interval '1 microsecond'` + ours + ` and state in ('r', 'd')`),
		Release: fill(`update {{lease}} set state = 'f', unknown = $4::boolean` + ours + ` and state = 'r'`),
		Prune: fill(`delete from {{lease}} where key in
	(select key from {{lease}} where expires_at <= ` + now + ` and state = 'd' limit $1::bigint for update skip locked)`),
	}
}
