package pgoutbox

import (
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

type pgxTag = pgconn.CommandTag

// sqlTexts are the statements with the names of the tables filled in. There
// is one shard, 0; the column is there so that more of them are no migration
// of the rows.
type sqlTexts struct {
	acquire, renew, release, load, snapshot, window, due, page string
	advance, remove, change, move, promote                     string
	prune, parked, lock, requeue, drop                         string
	rebase                                                     []string
}

func statements(n names) sqlTexts {
	fill := strings.NewReplacer("OUTBOX", n.outbox, "SHARD", n.shard, "HELD", n.held, "COLUMNS", readColumns).Replace
	sizeOf := func(alias string) string {
		return strings.ReplaceAll("coalesce(octet_length(A.key), 0) + octet_length(A.meta) + coalesce(octet_length(A.body), 0)", "A.", alias+".")
	}
	// Text has no NUL in PostgreSQL, so no two pairs of topic and key are alike.
	laneOf := func(alias string) string {
		return strings.ReplaceAll(`sha256(convert_to(A.topic, 'UTF8') || '\x00'::bytea || A.key)`, "A.", alias+".")
	}
	// The first row that blocks a lane. A lane is asked for by the order of
	// (lane, id) and compared afterwards: asked for the first id of a lane, the
	// planner takes the primary key, and passes by all the rows of a long one.
	firstOf := func(alias string) string {
		return strings.ReplaceAll(`(select f.id from (select i.lane, i.id from HELD i
			where i.shard = 0 and i.blocks and (i.lane, i.id) >= (A.lane, 0) order by i.lane, i.id limit 1) f where f.lane = A.lane)`, "A.", alias+".")
	}
	columnsOf := func(alias string) string {
		return alias + "." + strings.ReplaceAll(readColumns, ", ", ", "+alias+".")
	}
	return sqlTexts{
		acquire: fill(`update SHARD set owner = $1, epoch = epoch + 1, lease_until = clock_timestamp() + $2::interval
			where shard = 0 and lease_until < clock_timestamp() returning epoch`),
		renew:   fill(`update SHARD set lease_until = clock_timestamp() + $2::interval where shard = 0 and epoch = $1`),
		release: fill(`update SHARD set lease_until = '-infinity' where shard = 0 and epoch = $1`),
		load: fill(`select epoch = $1, prev::text, coalesce(cur::text, ''), last_id,
				pg_snapshot_xmax(prev) > pg_snapshot_xmax(pg_current_snapshot())
				or exists (select 1 from OUTBOX where shard = 0 and xid >= pg_snapshot_xmax(pg_current_snapshot()))
			from SHARD where shard = 0`),
		snapshot: `select pg_current_snapshot()::text`,
		// What became visible between two snapshots: what began after the old
		// one, and what was in progress in it. Both parts are ranges of the
		// primary key, so neither a transaction that stays open for hours nor
		// the rows that were passed long ago cost anything. (Asked for
		// o.xid = late.xid, the planner reads the table when transactions are large.)
		window: fill(`select x, id from (
				select xid::text as x, id from OUTBOX
				where shard = 0 and xid >= pg_snapshot_xmax($1::text::pg_snapshot) and xid < pg_snapshot_xmax($2::text::pg_snapshot)
					and pg_visible_in_snapshot(xid, $2::text::pg_snapshot) and id > $3
				union all
				select p.xid::text, p.id from (select pg_snapshot_xip($1::text::pg_snapshot) as xid) late
				cross join lateral (
					select o.xid, o.id from OUTBOX o
					where o.shard = 0 and (o.xid, o.id) > (late.xid, $3) and (o.xid, o.id) < (late.xid, 9223372036854775807)
						and pg_visible_in_snapshot(o.xid, $2::text::pg_snapshot)
					order by o.xid, o.id limit $4) p
			) w order by id limit $4`),
		// First the heads that are due, those that became due long ago before the
		// others, so that a row that is refused again and again has its turn and no
		// more; then of each lane what may go behind its head, an equal share.
		//
		// One reading of the clock for the whole statement: with one for each
		// row a head could be judged not due and the row behind it, a moment
		// later, free to go.
		due: fill(`with heads as materialized (
				select h.id, h.lane from HELD h where h.shard = 0 and not h.parked and not h.waits and h.due_at <= statement_timestamp()
					and (h.lane is null or h.id = ` + firstOf("h") + `)
				order by h.due_at limit $1),
			free as (
				select id from heads where lane is null
				union
				select c.id from heads cross join lateral (
					select e.id, bool_and(not e.parked and e.due_at <= statement_timestamp()) over (order by e.id) as goes from (
						select f.id, f.lane, f.parked, f.due_at from HELD f
						where f.shard = 0 and f.blocks and (f.lane, f.id) >= (heads.lane, heads.id)
						order by f.lane, f.id limit (select greatest(1, $1 / count(*)) from heads)) e
					where e.lane = heads.lane) c
				where c.goes)
			select ` + columnsOf("b") + `, b.attempts from (
				select d.*, sum(d.size) over (order by d.id) - d.size as before from (
					select h.*, ` + sizeOf("h") + ` as size from free join HELD h on h.shard = 0 and h.id = free.id) d) b
			where b.before < $2 order by b.id`),
		// The last of the held rows that block a row, 0 if there is none.
		page: fill(`select ` + columnsOf("b") + `, b.xid::text, coalesce((select l.id from (
					select h.lane, h.id from HELD h where h.shard = 0 and h.blocks and (h.lane, h.id) < (b.lane, 9223372036854775807)
					order by h.lane desc, h.id desc limit 1) l where l.lane = b.lane), 0)
			from (
				select p.*, sum(p.size) over (order by p.id) - p.size as before from (
					select o.*, ` + sizeOf("o") + ` as size, ` + laneOf("o") + ` as lane from unnest($1::text[], $2::bigint[]) as k(xid, id)
					join OUTBOX o on o.shard = 0 and o.xid = k.xid::xid8 and o.id = k.id) p) b
			where b.before < $3 order by b.id`),
		advance: fill(`update SHARD set lease_until = clock_timestamp() + $2::interval,
				prev = $3::text::pg_snapshot, cur = $4::text::pg_snapshot, last_id = $5
			where shard = 0 and epoch = $1`),
		remove: fill(`delete from HELD where shard = 0 and id = any($1::bigint[])`),
		change: fill(`update HELD h set attempts = h.attempts + c.counted::int, due_at = clock_timestamp() + c.after,
				parked = c.parked, blocks = c.blocks, reason = c.reason
			from unnest($1::bigint[], $2::boolean[], $3::interval[], $4::boolean[], $5::boolean[], $6::text[])
				as c(id, counted, after, parked, blocks, reason)
			where h.shard = 0 and h.id = c.id`),
		// The lane of a row without a key is null, as its key is.
		move: fill(`insert into HELD (shard, COLUMNS, created_at, lane, attempts, due_at, parked, blocks, waits, reason)
			select 0, ` + columnsOf("o") + `, o.created_at, ` + laneOf("o") + `, c.counted::int, clock_timestamp() + c.after, c.parked, c.blocks, c.blocks, c.reason
			from unnest($1::bigint[], $2::boolean[], $3::interval[], $4::boolean[], $5::boolean[], $6::text[], $7::text[])
				as c(id, counted, after, parked, blocks, reason, xid)
			join OUTBOX o on o.shard = 0 and o.xid = c.xid::xid8 and o.id = c.id
			on conflict do nothing`),
		promote: fill(`update HELD h set waits = false from (
				select ` + firstOf("l") + ` as id
				from (select ` + laneOf("k") + ` as lane from unnest($1::text[], $2::bytea[]) as k(topic, key)) l) n
			where h.shard = 0 and h.id = n.id and h.waits`),
		// Only the oldest rows are looked at, in the order of the primary key, or
		// a table without rows to delete would be read from end to end each
		// time (measured, a thousand of a million: 600 ms and 3 ms).
		prune: fill(`delete from OUTBOX o using (
				select q.xid, q.id, q.created_at from OUTBOX q
				where q.shard = 0 and q.xid < (select pg_snapshot_xmax(prev) from SHARD where shard = 0)
					and pg_visible_in_snapshot(q.xid, (select prev from SHARD where shard = 0))
				order by q.xid, q.id limit $2) d
			where o.shard = 0 and o.xid = d.xid and o.id = d.id and d.created_at < clock_timestamp() - $1::interval`),
		parked: fill(`select id, topic, type, attempts, reason, coalesce(length(body), 0) from HELD
			where shard = 0 and parked and id > $1 order by id limit $2`),
		lock: fill(`select 1 from SHARD where shard = 0 for update`),
		requeue: fill(`update HELD set parked = false, blocks = key is not null, attempts = 0, due_at = clock_timestamp()
			where shard = 0 and id = $1 and parked returning topic, key`),
		drop: fill(`delete from HELD where shard = 0 and id = $1 and parked returning topic, key`),
		rebase: []string{
			fill(`delete from OUTBOX using SHARD s where s.shard = 0 and pg_visible_in_snapshot(xid, s.prev)`),
			fill(`delete from OUTBOX using SHARD s where s.shard = 0 and s.cur is not null and pg_visible_in_snapshot(xid, s.cur) and id <= s.last_id`),
			fill(`update OUTBOX set xid = pg_current_xact_id()`),
			fill(`update SHARD set prev = '1:1:', cur = null, last_id = 0, epoch = epoch + 1, lease_until = '-infinity'`),
		},
	}
}
