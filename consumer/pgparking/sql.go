package pgparking

import (
	"strings"

	"github.com/unecho/unecho/internal/migrate"
)

// sqlTexts are the statements.
type sqlTexts struct {
	park, find, list, update, replace, counts string
	start, end                                string
	pruneParked, pruneStarts                  string
}

// statements returns the texts for the tables of a set.
func statements(s *migrate.Set) sqlTexts {
	fill := strings.NewReplacer("{{parked}}", s.Table("unecho_parked"), "{{start}}", s.Table("unecho_start"), "{{columns}}", columns).Replace
	return sqlTexts{
		// The state is not touched: a decision outlives a redelivery.
		park: fill(`insert into {{parked}} as p (id, consumer, class, reason, attempts, error, topic, position, key, body, meta, edit_of)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, nullif($12, ''))
on conflict (id) do update set class = excluded.class, reason = excluded.reason, error = excluded.error,
	attempts = greatest(p.attempts, excluded.attempts), last_at = now(), version = p.version + 1`),
		find: fill(`select {{columns}}, key, body, meta from {{parked}} where id = $1`),
		list: fill(`select {{columns}}, topic, position from {{parked}}
where state = $1 and ($2 = '' or consumer = $2) and seq > $3 order by seq limit $4`),
		update: fill(`update {{parked}} set state = $3, class = $4, reason = $5, attempts = $6, error = $7,
	settled_at = case when $3 <> 'parked' then coalesce(settled_at, now()) end, version = version + 1
where id = $1 and version = $2`),
		// One statement: the new record is there if and only if the old one was changed.
		replace: fill(`with old as (
	update {{parked}} set state = 'edited', edited_into = $3, settled_at = now(), version = version + 1
	where id = $1 and version = $2 and state = 'parked' returning id
)
insert into {{parked}} (id, consumer, class, reason, attempts, error, topic, position, key, body, meta, edit_of)
select $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, id from old`),
		// Counted up to a bound, each by the index.
		counts: fill(`select s.state, (select count(*) from (select from {{parked}} p where p.state = s.state limit $2) c),
	(select p.parked_at from {{parked}} p where p.state = s.state order by p.seq limit 1)
from unnest($1::text[]) as s (state)`),
		// Both lock their rows in the order of the places, so that two batches that share some do not deadlock.
		// What is not counted is read as it was when the statement began; a row that is newer has at least one start.
		start: fill(`with given as (select * from unnest($1::bytea[], $2::text[]) as p (place, readable)),
counted as (
	insert into {{start}} as s (place, readable, starts, started_at)
	select place, readable, 1, now() from given order by place
	on conflict (place) do update set starts = s.starts + 1, started_at = excluded.started_at where s.starts < $3
	returning place, starts
)
select g.place, coalesce(c.starts, greatest(s.starts, $3) + 1, $3 + 1) from given g
left join counted c on c.place = g.place left join {{start}} s on s.place = g.place`),
		end: fill(`delete from {{start}} where place in
	(select place from {{start}} where place = any($1::bytea[]) order by place for update)`),
		pruneParked: fill(`delete from {{parked}} where id in
	(select id from {{parked}} where settled_at is not null and settled_at < now() - $1::interval and last_at < now() - $1::interval
	limit $2 for update skip locked)`),
		pruneStarts: fill(`delete from {{start}} where place in
	(select place from {{start}} where started_at < now() - $1::interval limit $2 for update skip locked)`),
	}
}

// columns are what a record has without its message, in the order in which
// scanRecord reads them.
const columns = `id, seq, consumer, state, class, reason, attempts, error, coalesce(edit_of, ''), coalesce(edited_into, ''),
	parked_at, last_at, settled_at, extract(epoch from clock_timestamp() - parked_at)::float8, version, coalesce(length(body), -1)`
