-- The plan whose portion is due first, locked for this transaction, and how many commands the portion has. A plan that another worker
-- works on is passed by. After a time without workers a plan goes on at its pace: at most one second is made up for.
-- Locks: the plan's row, before all other rows. Index: plan_running.
SELECT id, domain, action, result::text, started_by, reason, total, reached,
       CASE WHEN seconds = 0::float8 THEN %(bite)s::integer
            ELSE least(%(bite)s::integer, 1 + pg_catalog.floor(
                 extract(epoch FROM least(pg_catalog.clock_timestamp() - next_at, interval '1 second'))::float8 * total::float8 / seconds)::integer) END
  FROM commandbus.plan
 WHERE state = 'RUNNING' AND domain = ANY (%(domains)s::text[]) AND next_at <= pg_catalog.clock_timestamp()
 ORDER BY next_at
 LIMIT 1
   FOR UPDATE SKIP LOCKED
