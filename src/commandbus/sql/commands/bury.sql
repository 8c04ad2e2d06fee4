-- A worker is dead: the registry says so at once, and nobody notifies it any more. Locks: its row in `worker`, its
-- rows in `waiting`. Index: their keys.
WITH forgotten AS (
    DELETE FROM commandbus.waiting WHERE worker = %(worker)s
)
UPDATE commandbus.worker SET state = 'STOPPED', running = 0 WHERE id = %(worker)s AND state <> 'STOPPED'
