-- One row per key. Times are milliseconds since 1970. The last four columns are
-- for people who look into the table; nothing reads them.
create table {{unecho_key}} (
	key blob not null primary key,
	done_at integer not null,
	expires_at integer not null,
	fingerprint blob not null,
	reply blob,
	tenant text,
	consumer text,
	source text,
	id text
);

create index {{unecho_key_expires}} on unecho_key (expires_at);

-- One row per key and content that met the key done with another content.
create table {{unecho_conflict}} (
	key blob not null,
	seen_at integer not null,
	expires_at integer not null,
	fingerprint blob not null,
	first_fingerprint blob not null,
	tenant text,
	consumer text,
	source text,
	id text,
	primary key (key, fingerprint)
);
