-- A program ends while something of it still counts: it is dead from now on. Only under the lock of limit_mode.
-- Locks: its row. Index: limit_client_pkey.
UPDATE commandbus.limit_client SET beat_at = 'epoch' WHERE id = %(id)s
