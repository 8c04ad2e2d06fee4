-- Records that a worker is dead. From now on nobody notifies it. Locks: its row in `worker`, its rows in `waiting`.
-- Indexes: their keys.
WITH forgotten AS (
    DELETE FROM commandbus.waiting WHERE worker = %(worker)s
)
UPDATE commandbus.worker SET state = 'STOPPED', running = 0 WHERE id = %(worker)s AND state <> 'STOPPED'
