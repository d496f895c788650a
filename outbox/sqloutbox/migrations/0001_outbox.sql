-- The outbox. Writers are serial in SQLite, so the order of ids is the order of commits.
create table {{unecho_outbox}} (
	id integer primary key autoincrement,
	topic text not null,
	key blob,
	event_id text not null,
	source text not null,
	type text not null,
	subject text not null,
	content_type text not null,
	data_schema text not null,
	time integer not null,
	meta blob not null,
	body blob,
	created_at integer not null
);

-- The position: what has an id up to last_id is settled. Times are milliseconds since 1970, but for those of messages, which are microseconds.
create table {{unecho_outbox_shard}} (
	shard integer primary key,
	epoch integer not null default 0,
	owner text,
	lease_until integer not null default 0,
	last_id integer not null default 0
);
insert into {{unecho_outbox_shard}} (shard) values (0);

-- Rows that cannot go now, so that the position always advances.
create table {{unecho_outbox_held}} (
	id integer primary key,
	topic text not null,
	key blob,
	event_id text not null,
	source text not null,
	type text not null,
	subject text not null,
	content_type text not null,
	data_schema text not null,
	time integer not null,
	meta blob not null,
	body blob,
	created_at integer not null,
	attempts integer not null,
	due_at integer not null,
	parked integer not null,
	blocks integer not null,
	reason text not null
);
create index unecho_outbox_held_key on {{unecho_outbox_held}} (topic, key, id);
