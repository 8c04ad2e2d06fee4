-- Did this attempt complete its command? The worker asks this after a connection broke during COMMIT.
-- Locks: the command row, FOR SHARE: waits until a transaction that may still be committing is over.
WITH settled AS MATERIALIZED (
    SELECT id, status, attempt, worker FROM commandbus.command WHERE id = %(id)s FOR SHARE
)
SELECT id FROM settled
 WHERE status OPERATOR(pg_catalog.=) 'COMPLETED' AND attempt = %(number)s AND worker = %(worker)s
