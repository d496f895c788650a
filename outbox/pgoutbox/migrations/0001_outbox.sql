-- The outbox: append-only. Nothing in it is ever updated, space comes back by deleting what was passed.
create table {{unecho_outbox}} (
	shard smallint not null default 0,
	xid xid8 not null default pg_current_xact_id(),
	id bigint generated always as identity,
	topic text not null,
	key bytea,
	event_id text not null,
	source text not null,
	type text not null,
	subject text not null,
	content_type text not null,
	data_schema text not null,
	time timestamptz not null,
	meta bytea not null,
	body bytea,
	created_at timestamptz not null default clock_timestamp(),
	primary key (shard, xid, id)
);

-- The position: what is visible in prev is settled; of what became visible between prev and cur, the ids up to last_id are.
create table {{unecho_outbox_shard}} (
	shard smallint primary key,
	epoch bigint not null default 0,
	owner text,
	lease_until timestamptz not null default '-infinity',
	prev pg_snapshot not null default '1:1:',
	cur pg_snapshot,
	last_id bigint not null default 0
) with (fillfactor = 50);
insert into {{unecho_outbox_shard}} (shard) values (0);

-- Rows that cannot go now, so that the position always advances. A lane is a topic and a key, hashed because a key may be
-- longer than an index takes, and null without a key. Rows that wait are not looked at, however many stand behind one that
-- is parked: of those that block a lane, the first never waits.
create table {{unecho_outbox_held}} (
	shard smallint not null,
	id bigint not null,
	topic text not null,
	key bytea,
	event_id text not null,
	source text not null,
	type text not null,
	subject text not null,
	content_type text not null,
	data_schema text not null,
	time timestamptz not null,
	meta bytea not null,
	body bytea,
	created_at timestamptz not null,
	lane bytea,
	attempts integer not null,
	due_at timestamptz not null,
	parked boolean not null,
	blocks boolean not null,
	waits boolean not null,
	reason text not null,
	primary key (shard, id)
);
create index on {{unecho_outbox_held}} (shard, lane, id) where blocks;
create index on {{unecho_outbox_held}} (shard, due_at) where not parked and not waits;
create index on {{unecho_outbox_held}} (shard, id) where parked;
