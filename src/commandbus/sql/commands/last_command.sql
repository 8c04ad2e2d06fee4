-- The last command that was sent, before a rehearsal begins. Locks: none. Index: the key.
SELECT COALESCE(pg_catalog.max(id), 0) AS commandbus_rehearsal FROM commandbus.command
