-- Forgets programs of which nothing is left. Only under the lock of limit_mode. Locks: their rows.
-- Index: limit_client_pkey.
DELETE FROM commandbus.limit_client WHERE id = ANY (%(ids)s::text[])
