-- How far each consumer has come in each partition, one row for each; times of records are microseconds since 1970.
create table if not exists {{unecho_position}} (
	`key` binary(16) not null primary key,
	next_offset bigint not null,
	max_time bigint,
	fingerprint binary(32),
	tenant text,
	consumer text,
	topic text,
	number integer,
	moved_at bigint not null
) engine = InnoDB, character set utf8mb4, collate utf8mb4_bin;
