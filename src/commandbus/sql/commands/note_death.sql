-- Records that the process of a worker is dead, before its commands can be claimed by others: effects outside the database
-- need to know (sql/effects/begin.sql). `death` says how, for people. Locks: its row in `worker`. Index: its key.
UPDATE commandbus.worker SET died_at = pg_catalog.now(), death = %(death)s WHERE id = %(worker)s AND died_at IS NULL
