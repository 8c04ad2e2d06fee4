-- Deploys. Purpose: workers of different releases work side by side, and find out which command types the others know.
--
-- Compatible: yes
--
-- Locks: ACCESS EXCLUSIVE on worker and parked for a moment (new columns without a default rewrite nothing).
-- Indexes: parked_reason finds what waits for a handler, type by type.

-- types: the command types that a worker has handlers for, as 'orders/ship'; types of processes, too.
ALTER TABLE commandbus.worker ADD COLUMN types text[];

-- reason 'handler': the worker that claimed it has no handler for its type. Workers that have one lease such rows from here
-- (sql/commands/take_unhandled.sql). kept_limit: the limit of which a place was kept for it under `token` when that happened.
ALTER TABLE commandbus.parked ADD COLUMN kept_limit text;

-- The command types of these domains whose commands wait for a handler: how many wait (counted up to p_most), since when
-- the first of them does, how many live workers have a handler, and for how many seconds none had. A worker that stopped or
-- died counts until its last heartbeat. Domains that are not the caller's are left out; all workers are counted, whoever
-- may see them.
--
-- Index: parked_reason, one entry per type. Its columns are compared as a row: no other index offers that, so that no
-- estimate can lead the planner astray. Workers are read only if something waits.
CREATE FUNCTION commandbus.unhandled_types(p_domains text[], p_most integer)
    RETURNS TABLE (domain text, command_type text, waiting bigint, since timestamptz, workers bigint, seconds float8)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH RECURSIVE found AS (
        SELECT d.name AS domain, first.reason, first.domain AS its_domain, first.command_type, first.parked_at
          FROM unnest(p_domains) AS d(name)
         CROSS JOIN LATERAL (
               SELECT p.reason, p.domain, p.command_type, p.parked_at FROM commandbus.parked p
                WHERE (p.reason, p.domain, p.command_type, p.seq) > ('handler', d.name, '', 0)
                ORDER BY p.reason, p.domain, p.command_type, p.seq LIMIT 1) first
         WHERE commandbus.caller_may(d.name, 'SELECT')
        UNION ALL
        SELECT f.domain, next.reason, next.domain, next.command_type, next.parked_at
          FROM found f
         CROSS JOIN LATERAL (
               SELECT p.reason, p.domain, p.command_type, p.parked_at FROM commandbus.parked p
                WHERE (p.reason, p.domain, p.command_type, p.seq)
                      > ('handler', f.domain, f.command_type, 9223372036854775807)
                ORDER BY p.reason, p.domain, p.command_type, p.seq LIMIT 1) next
         WHERE f.reason = 'handler' AND f.its_domain = f.domain
    )
    SELECT f.domain, f.command_type,
           (SELECT count(*) FROM (
                SELECT FROM commandbus.parked p
                 WHERE (p.reason, p.domain, p.command_type, p.seq) > ('handler', f.domain, f.command_type, 0)
                   AND (p.reason, p.domain, p.command_type) <= ('handler', f.domain, f.command_type)
                 ORDER BY p.reason, p.domain, p.command_type, p.seq LIMIT p_most) counted),
           f.parked_at, known.workers,
           CASE WHEN known.workers > 0 THEN 0
                ELSE extract(epoch FROM now() - greatest(f.parked_at, known.last_at))::float8 END
      FROM found f
     CROSS JOIN LATERAL (
           SELECT count(*) FILTER (WHERE w.state = 'ACTIVE' AND w.heartbeat_at > now() - interval '15 seconds') AS workers,
                  max(w.heartbeat_at) AS last_at
             FROM commandbus.worker w
            WHERE f.domain || '/' || f.command_type = ANY (w.types)) known
     WHERE f.reason = 'handler' AND f.its_domain = f.domain
$$;
REVOKE ALL ON FUNCTION commandbus.unhandled_types FROM PUBLIC;
