package pgkeys

import (
	"bytes"
	"strings"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/internal/migrate"
)

// PositionStatements are the texts of what a driver sends for positions.
type PositionStatements struct {
	// Bound bounds every wait for a lock until LockBack. Argument: milliseconds as
	// text.
	Bound string
	// Lock locks the row of a partition and reads the transaction's id, and what
	// ScanPosition reads. No row: there is none, see Create. Argument: key.
	//
	// It is a statement of its own, because one that inserts or reads would not
	// see what another transaction has committed while it waited.
	Lock string
	// Create makes the row of a partition unless it is there. Arguments: key, next
	// offset, tenant, consumer, topic, number.
	Create string
	// Move changes a row that the transaction has locked. It fails with division
	// by zero if the row is gone. Arguments: key, next offset, time, fingerprint.
	Move string
	// List reads positions, see ScanListed. Argument: how many.
	List string
	// Reset creates or overwrites a row. Arguments: those of Create.
	Reset string
}

// NewPosition returns the statements for the tables of a set.
func NewPosition(s *migrate.Set) PositionStatements {
	fill := strings.NewReplacer("{{position}}", s.Table("unecho_position")).Replace
	const insert = `insert into {{position}} (key, next_offset, tenant, consumer, topic, number, moved_at)
values ($1::uuid, $2::bigint, $3::text, $4::text, $5::text, $6::integer, now()) on conflict (key) do `
	return PositionStatements{
		Bound: `select case when set_config('unecho.lock_timeout', current_setting('lock_timeout'), true) is not null
	then set_config('lock_timeout', $1::text, true) end`,
		Lock:   fill(`select pg_current_xact_id()::text, next_offset, max_time, fingerprint from {{position}} where key = $1::uuid for no key update`),
		Create: fill(insert + `nothing`),
		Move: fill(`with moved as (update {{position}} set next_offset = $2::bigint, max_time = $3::bigint, fingerprint = $4::bytea, moved_at = now()
	where key = $1::uuid returning 1) select 1 / count(*) from moved`),
		List: fill(`select next_offset, max_time, fingerprint, tenant, consumer, topic, number, moved_at from {{position}}
order by consumer, topic, number, tenant limit $1::bigint`),
		Reset: fill(insert + `update set next_offset = excluded.next_offset, max_time = null, fingerprint = null, moved_at = now()`),
	}
}

// Time is a time as positions have it; nil if there is none.
func Time(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t.UnixMicro()
}

// Digest is a fingerprint as positions have it; nil if it is zero.
func Digest(fp [32]byte) []byte {
	if fp == [32]byte{} {
		return nil
	}
	return bytes.Clone(fp[:])
}

// ScanPosition reads the row of a position, behind what is named by before.
func ScanPosition(scan func(dest ...any) error, before ...any) (dedupe.Position, error) {
	var p dedupe.Position
	var at *int64
	var last []byte
	err := scan(append(before, &p.Next, &at, &last)...)
	fillPosition(&p, at, last)
	return p, err
}

// ScanListed reads a row of a list of positions. moved scans when it was moved.
func ScanListed(scan func(dest ...any) error, moved any) (dedupe.Position, error) {
	var (
		p                       dedupe.Position
		at                      *int64
		last                    []byte
		tenant, consumer, topic *string
		number                  *int
	)
	err := scan(&p.Next, &at, &last, &tenant, &consumer, &topic, &number, moved)
	fillPosition(&p, at, last)
	p.Partition = dedupe.Partition{Tenant: orZero(tenant), Consumer: orZero(consumer), Topic: orZero(topic), Number: orZero(number)}
	return p, err
}

func fillPosition(p *dedupe.Position, at *int64, last []byte) {
	if at != nil {
		p.MaxTime = time.UnixMicro(*at)
	}
	copy(p.Last[:], last)
}
