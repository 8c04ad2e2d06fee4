-- Deletes programs that hold nothing any more. Only under the lock of limit_mode. Locks: their rows.
-- Index: limit_client_pkey.
DELETE FROM commandbus.limit_client WHERE id = ANY (%(ids)s::text[])
