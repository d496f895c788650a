package pgkeys

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/internal/migrate"
)

// AdminStatements are the texts of what an admin sends.
type AdminStatements struct {
	// Find reads an entry, see ScanEntry. Argument: key.
	Find string
	// lists are the lists by state, in conflict under the zero state.
	// Arguments: the key after which to begin, how many.
	lists map[dedupe.State]string
	// Release makes an unknown or parked lease free. Argument: key.
	Release string
	// Evict are the steps of one transaction that leave nothing of a key. It
	// locks the leases before it deletes one: that waits for the claims that
	// are being made, and lets none begin. Without it the tokens of a key could
	// fall: claim A draws token 5 and is not scheduled; claim B inserts the key
	// with 6; the key is evicted; A finds no row and inserts with 5. The lock is
	// taken last, for while it waits no other claim is made.
	Evict []Step
	// Conflicts reads the conflicts of a key, see ScanConflict. Argument: key.
	Conflicts string
	// Settle deletes the conflicts of a key. Argument: key.
	Settle string
	// Counts reads one row, in the order of the fields of dedupe.Counts.
	Counts string
}

// Step is a statement of a transaction.
type Step struct {
	Text string
	Key  bool // its argument is the key; without, it has none
	// Counts says that its rows are among those that the caller asked for.
	Counts bool
}

// unknownLease is what a lease is of which nobody knows what came.
const unknownLease = `(state = 'r' and lease_until <= clock_timestamp() or state = 'f' and unknown)`

var openStates = map[dedupe.State]string{
	dedupe.StateRunning: `state = 'r' and lease_until > clock_timestamp()`,
	dedupe.StateFree:    `state = 'f' and not unknown`,
	dedupe.StateUnknown: unknownLease,
	dedupe.StateParked:  `state = 'p'`,
}

// The columns of an entry, of either table.
const (
	keyEntry = `key::text, 'd' as state, 0 as attempt, 0::bigint as token, '' as owner, null::timestamptz as lease_until,
	done_at, expires_at, fingerprint, coalesce(length(reply), -1) as reply_size, tenant, consumer, source, id,
	(select count(*) from {{conflict}} c where c.key = e.key) as conflicts`
	leaseEntry = `key::text, case when ` + unknownLease + ` then 'u' else state::text end as state, attempt, token, owner,
	case when state = 'r' then lease_until end as lease_until, done_at, expires_at, fingerprint,
	case when state = 'd' then coalesce(length(reply), -1) else -1 end as reply_size, tenant, consumer, source, id,
	(select count(*) from {{conflict}} c where c.key = e.key) as conflicts`
)

// NewAdmin returns the statements for the tables of a set.
func NewAdmin(s *migrate.Set) AdminStatements {
	fill := strings.NewReplacer("{{key}}", s.Table("unecho_key"), "{{lease}}", s.Table("unecho_lease"), "{{conflict}}", s.Table("unecho_conflict"),
		"{{keyname}}", strings.ReplaceAll(s.Table("unecho_key"), "'", "''"), "{{leasename}}", strings.ReplaceAll(s.Table("unecho_lease"), "'", "''")).Replace
	lists := map[dedupe.State]string{
		dedupe.StateDone: fill(`select * from (
	(select ` + keyEntry + ` from {{key}} e where key > $1::uuid order by e.key limit $2::bigint) union all
	(select ` + leaseEntry + ` from {{lease}} e where key > $1::uuid and state = 'd' order by e.key limit $2::bigint)) as e
order by e.key::uuid limit $2::bigint`),
		0: fill(`with met as (select distinct key from {{conflict}} where key > $1::uuid order by key limit $2::bigint)
select ` + keyEntry + ` from {{key}} e where key in (select key from met) union all
select ` + leaseEntry + ` from {{lease}} e where key in (select key from met) order by key`),
	}
	counts := make(map[dedupe.State]string)
	for state, condition := range openStates {
		lists[state] = fill(`select ` + leaseEntry + ` from {{lease}} e where state <> 'd' and key > $1::uuid and ` + condition + ` order by e.key limit $2::bigint`)
		counts[state] = `(select count(*) from (select from {{lease}} where state <> 'd' and ` + condition + ` limit ` + strconv.Itoa(dedupe.CountCap) + `) as n)`
	}
	settle := fill(`delete from {{conflict}} where key = $1::uuid`)
	return AdminStatements{
		Find: fill(`select ` + leaseEntry + ` from {{lease}} e where key = $1::uuid union all
select ` + keyEntry + ` from {{key}} e where key = $1::uuid limit 1`),
		lists:   lists,
		Release: fill(`update {{lease}} set state = 'f', unknown = false where key = $1::uuid and (state = 'p' or ` + unknownLease + `)`),
		Evict: []Step{
			{Text: fill(`delete from {{key}} where key = $1::uuid`), Key: true, Counts: true},
			{Text: settle, Key: true},
			{Text: fill(`lock table {{lease}} in share row exclusive mode`)},
			{Text: fill(`delete from {{lease}} where key = $1::uuid`), Key: true, Counts: true},
		},
		Conflicts: fill(`select tenant, consumer, source, id, fingerprint, first_fingerprint, reason, fields, seen_at
from {{conflict}} where key = $1::uuid order by seen_at, fingerprint`),
		Settle: settle,
		Counts: fill(`select (select sum(reltuples)::bigint from pg_class where oid in ('{{keyname}}'::regclass, '{{leasename}}'::regclass) having min(reltuples) >= 0),
	` + counts[dedupe.StateRunning] + `, ` + counts[dedupe.StateFree] + `, ` + counts[dedupe.StateUnknown] + `, ` + counts[dedupe.StateParked] + `,
	(select count(*) from (select from {{conflict}} limit ` + strconv.Itoa(dedupe.CountCap) + `) as n)`),
	}
}

// List returns the statement for a filter, and the key after which it begins.
func (s AdminStatements) List(f dedupe.Filter) (statement string, after dedupe.KeyID, err error) {
	after, err = After(f)
	return s.lists[f.State], after, err
}

// After checks a filter and reads where it begins.
func After(f dedupe.Filter) (after dedupe.KeyID, err error) {
	if err := f.Check(); err != nil || f.After == "" {
		return after, err
	}
	if after, err = dedupe.ParseKeyID(f.After); err != nil {
		return after, fmt.Errorf("%w: After: %w", dedupe.ErrInvalidFilter, err)
	}
	return after, nil
}

// ScanEntry reads a row of Find or of a list.
func ScanEntry(scan func(dest ...any) error) (dedupe.Entry, error) {
	var (
		e                            dedupe.Entry
		id, state                    string
		lease, done, expires         *time.Time
		fingerprint                  []byte
		tenant, consumer, source, of *string
	)
	if err := scan(&id, &state, &e.Attempt, &e.Token, &e.Holder, &lease, &done, &expires, &fingerprint, &e.ReplySize,
		&tenant, &consumer, &source, &of, &e.Conflicts); err != nil {
		return dedupe.Entry{}, err
	}
	var err error
	e.ID, err = dedupe.ParseKeyID(id)
	copy(e.Fingerprint[:], fingerprint)
	e.State = map[string]dedupe.State{"d": dedupe.StateDone, "r": dedupe.StateRunning, "f": dedupe.StateFree, "u": dedupe.StateUnknown, "p": dedupe.StateParked}[state]
	e.LeaseUntil, e.DoneAt, e.ExpiresAt = orZero(lease), orZero(done), orZero(expires)
	e.Key = dedupe.Key{Tenant: orZero(tenant), Consumer: orZero(consumer), Source: orZero(source), ID: orZero(of)}
	return e, err
}

// ScanConflict reads a row of Conflicts.
func ScanConflict(scan func(dest ...any) error) (dedupe.ConflictRecord, error) {
	var (
		r                            dedupe.ConflictRecord
		tenant, consumer, source, of *string
		fingerprint, first           []byte
		fields                       *string
	)
	if err := scan(&tenant, &consumer, &source, &of, &fingerprint, &first, &r.Reason, &fields, &r.SeenAt); err != nil {
		return dedupe.ConflictRecord{}, err
	}
	r.Key = dedupe.Key{Tenant: orZero(tenant), Consumer: orZero(consumer), Source: orZero(source), ID: orZero(of)}
	copy(r.Fingerprint[:], fingerprint)
	copy(r.First[:], first)
	r.Fields = ParseFields(fields)
	return r, nil
}

func orZero[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}
