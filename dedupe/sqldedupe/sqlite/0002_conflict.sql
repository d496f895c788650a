-- What a conflict needs to say which fields differ, and why. A conflict stays until somebody has settled it, and its
-- key with it: age alone deletes neither.
alter table {{unecho_key}} add column fields blob;
alter table {{unecho_conflict}} drop column expires_at;
alter table {{unecho_conflict}} add column reason text not null default 'content';
alter table {{unecho_conflict}} add column fields text;
