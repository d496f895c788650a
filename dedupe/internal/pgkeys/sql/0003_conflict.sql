-- What a conflict needs to say which fields differ, and why. A conflict stays until somebody has settled it, and its
-- key with it: age alone deletes neither.
alter table {{unecho_key}} add column fields bytea;
alter table {{unecho_lease}} add column fields bytea;
alter table {{unecho_conflict}} drop column expires_at, add column reason text not null default 'content', add column fields text;

-- The few leases that are not done, which people list and count. state may be p (parked), too.
create index unecho_lease_open on {{unecho_lease}} (key) where state <> 'd';
