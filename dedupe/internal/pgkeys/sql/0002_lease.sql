-- Leases, for effects that no transaction can hold. state is r (running), f (free again) or d (done). What came of a
-- running row whose lease has run out is not known, so age alone never deletes it.
create table {{unecho_lease}} (
	key uuid primary key,
	state "char" not null,
	owner text not null,
	token bigint not null,
	attempt integer not null,
	unknown boolean not null,
	lease_until timestamptz not null,
	done_at timestamptz,
	expires_at timestamptz,
	fingerprint bytea not null,
	reply bytea,
	tenant text,
	consumer text,
	source text,
	id text
);
create index unecho_lease_expires on {{unecho_lease}} (expires_at) where expires_at is not null;

-- Tokens rise over all keys, so they rise for a key whose row was deleted as well.
create sequence {{unecho_token}};
