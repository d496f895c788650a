-- How far each consumer has come in each partition, one row for each; times of records are microseconds since 1970. A
-- row is updated by every commit, so a page is mostly left free for its versions, and no index but the key's is there
-- to be kept up. The four columns before the last one are for people; nothing reads them.
create table {{unecho_position}} (
	key uuid primary key,
	next_offset bigint not null,
	max_time bigint,
	fingerprint bytea,
	tenant text,
	consumer text,
	topic text,
	number integer,
	moved_at timestamptz not null
) with (fillfactor = 10);
