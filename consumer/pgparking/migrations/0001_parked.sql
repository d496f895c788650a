-- One row per message that cannot be handled. topic and position are for people: meta has them as they were on the wire,
-- with the header and the time, because names there may be no text.
create table {{unecho_parked}} (
	id text primary key,
	seq bigint generated always as identity,
	consumer text not null,
	state text not null default 'parked',
	class text not null,
	reason text not null,
	attempts integer not null,
	error text not null,
	topic text not null,
	position text not null,
	key bytea,
	body bytea,
	meta bytea not null,
	edit_of text,
	edited_into text,
	parked_at timestamptz not null default now(),
	last_at timestamptz not null default now(),
	settled_at timestamptz,
	version bigint not null default 1
);
create index on {{unecho_parked}} (state, seq);
create index on {{unecho_parked}} (settled_at) where settled_at is not null;

-- What was started and has not come to an end. The table is as large as what is in hand, so it needs no index for pruning.
create table {{unecho_start}} (
	place bytea primary key,
	readable text not null,
	starts integer not null,
	started_at timestamptz not null
) with (fillfactor = 70);
