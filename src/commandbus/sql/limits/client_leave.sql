-- Signs off a program whose permits still count: from now on it counts as dead. Only under the lock of limit_mode.
-- Locks: its row. Index: limit_client_pkey.
UPDATE commandbus.limit_client SET beat_at = 'epoch' WHERE id = %(id)s
