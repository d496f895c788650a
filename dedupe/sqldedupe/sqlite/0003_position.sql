-- How far each consumer has come in each partition, one row for each; times of records are microseconds since 1970.
create table {{unecho_position}} (
	key blob not null primary key,
	next_offset integer not null,
	max_time integer,
	fingerprint blob,
	tenant text,
	consumer text,
	topic text,
	number integer,
	moved_at integer not null
) without rowid;
