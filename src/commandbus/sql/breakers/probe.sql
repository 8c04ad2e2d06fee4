-- Makes one command that a breaker has parked its probe. Returns no row if none is parked. It chooses the command that was
-- parked first among those that have never failed as the probe, or else the one with the fewest failed probes (`vain` has
-- one entry for each failed probe).
-- Locks: its queue row (skips a command that somebody is canceling), then its parked row. Indexes: parked_reason, in its
-- order, the queue's key. With `=` on the type, the planner might read and sort all parked rows.
WITH fresh AS MATERIALIZED (
    SELECT p.seq, p.command, q.msg_id
      FROM commandbus.parked p JOIN pgmq.{queue} q ON q.msg_id = p.msg_id
     WHERE (p.reason, p.domain, p.command_type, p.seq) > ('breaker'::text, %(domain)s::text, %(type)s::text, 0::bigint)
       AND (p.reason, p.domain, p.command_type) <= ('breaker'::text, %(domain)s::text, %(type)s::text)
       AND p.command <> ALL (%(vain)s::bigint[])
     ORDER BY p.reason, p.domain, p.command_type, p.seq
     LIMIT 1
       FOR UPDATE OF q SKIP LOCKED
), tired AS MATERIALIZED (
    SELECT p.seq, p.command, q.msg_id
      FROM (SELECT command, pg_catalog.count(*) AS times FROM pg_catalog.unnest(%(vain)s::bigint[]) command
             GROUP BY command) v
      JOIN commandbus.parked p ON p.command = v.command
      JOIN pgmq.{queue} q ON q.msg_id = p.msg_id
     WHERE p.reason = 'breaker' AND p.domain = %(domain)s AND p.command_type = %(type)s
       AND NOT EXISTS (SELECT FROM fresh)
     ORDER BY v.times, p.seq
     LIMIT 1
       FOR UPDATE OF q SKIP LOCKED
), chosen AS MATERIALIZED (
    SELECT * FROM fresh UNION ALL SELECT * FROM tired
), freed AS (
    DELETE FROM commandbus.parked WHERE seq = (SELECT seq FROM chosen)
), woken AS (
    UPDATE pgmq.{queue} SET vt = pg_catalog.now() + {own_shift} WHERE msg_id = (SELECT msg_id FROM chosen)
)
SELECT command, pg_catalog.pg_notify('commandbus_' || %(domain)s, '0') FROM chosen
