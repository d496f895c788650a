-- One row per key. Times are milliseconds since 1970. The text columns are for people who look into the table; nothing
-- reads them. Every statement here may be run again: DDL commits by itself, and a step may end half-way.
create table if not exists {{unecho_key}} (
	`key` binary(16) not null primary key,
	done_at bigint not null,
	expires_at bigint not null,
	fingerprint binary(32) not null,
	reply longblob,
	tenant text,
	consumer text,
	source text,
	id text,
	fields blob,
	index unecho_key_expires (expires_at)
) engine = InnoDB, character set utf8mb4, collate utf8mb4_bin;

-- One row per key and content that met the key done with another content. It stays until somebody has settled it, and
-- its key with it.
create table if not exists {{unecho_conflict}} (
	`key` binary(16) not null,
	fingerprint binary(32) not null,
	first_fingerprint binary(32) not null,
	seen_at bigint not null,
	reason varchar(20) not null,
	fields text,
	tenant text,
	consumer text,
	source text,
	id text,
	primary key (`key`, fingerprint)
) engine = InnoDB, character set utf8mb4, collate utf8mb4_bin;
