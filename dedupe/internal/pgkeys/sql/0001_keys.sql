-- One narrow row per key. The last four columns are for people who look into
-- the table; nothing reads them.
create table {{unecho_key}} (
	key uuid primary key,
	done_at timestamptz not null,
	expires_at timestamptz not null,
	fingerprint bytea not null,
	reply bytea,
	tenant text,
	consumer text,
	source text,
	id text
);

-- For pruning. Keys expire about in the order in which they come, so this index
-- stays a few pages and costs an insert next to nothing.
create index unecho_key_expires on {{unecho_key}} using brin (expires_at) with (autosummarize = on);

-- One row per key and content that met the key done with another content.
create table {{unecho_conflict}} (
	key uuid not null,
	seen_at timestamptz not null,
	expires_at timestamptz not null,
	fingerprint bytea not null,
	first_fingerprint bytea not null,
	tenant text,
	consumer text,
	source text,
	id text,
	primary key (key, fingerprint)
);
