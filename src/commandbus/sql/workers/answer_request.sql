-- A worker's answer. Locks: the row. Index: its key.
UPDATE commandbus.worker_request SET answered_at = pg_catalog.now(), answer = %(answer)s::json
 WHERE id = %(id)s AND answered_at IS NULL
