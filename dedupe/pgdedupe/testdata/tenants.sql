-- Row-level security: a program that works for one tenant sees, replays, releases and prunes nothing of another's keys,
-- whatever it asks for. Run it as the owner of the tables, after Migrate.
--
-- The program connects as a role that neither owns the tables nor may bypass row security, and says whose it is when it
-- connects: postgres://app@host/db?app.tenant=acme. A program that works for several tenants takes a pool
-- for each, or sets app.tenant with set_config(..., true) in transactions of its own and claims there, by a Claimer.
grant select, insert, update, delete on unecho_key, unecho_conflict, unecho_lease to app;
grant usage on sequence unecho_token to app;
grant select on unecho_migration to app;

alter table unecho_key enable row level security;
alter table unecho_conflict enable row level security;
alter table unecho_lease enable row level security;

-- One policy for reading and writing: what does not match is invisible, and cannot be written.
create policy tenant on unecho_key to app using (tenant = current_setting('app.tenant'));
create policy tenant on unecho_conflict to app using (tenant = current_setting('app.tenant'));
create policy tenant on unecho_lease to app using (tenant = current_setting('app.tenant'));
