-- Breakers open on trouble of a command type, and it is known what a batch waits for. Purpose: bad attempts with their
-- commands and starts, what workers count, and how long members of a batch have to wait as far as that is known.
--
-- Compatible: yes
--
-- Locks: ACCESS EXCLUSIVE on breaker and worker for a moment: columns only, no row is rewritten. Workers of the schema
-- before this one can go on: they still use stuck_at and failed_at, which have no use any more.

-- recent: attempts that ended badly, [command, is stuck, began, ended] with epoch seconds, in the order of their ends.
-- counted_until: when the last of them leaves the window. vain: the commands that were the probe in vain since it opened,
-- one entry for each time.
ALTER TABLE commandbus.breaker
    ADD COLUMN recent         jsonb NOT NULL DEFAULT '[]',
    ADD COLUMN counted_until  timestamptz,
    ADD COLUMN vain           bigint[] NOT NULL DEFAULT '{}';

-- counts: 'DOMAIN/COMMAND_TYPE' → how many attempts ended and were not stuck since some moments (model/breaker_rule.py). Null
-- as long as no type has a bad attempt in its window.
ALTER TABLE commandbus.worker ADD COLUMN counts jsonb;

-- What members of a batch wait for, of the newest p_most members and of the p_most messages of the domain that are delayed
-- longest. kind: 'running' (somebody holds it), 'delayed' (`seconds`: until the last of them is visible), 'limit' (one row
-- for each; `seconds`: what is left of its back-off, null if a person has to end it; `ahead`: how many wait before the last
-- of them; `rate`: places a second, null if nothing was measured), or 'unknown': it could run, or a person has to act.
--
-- Locks: none. Indexes: command_batch, q_*_vt_idx backwards, the queue's key, parked_domain_msg_id_key, parked_limit.
CREATE FUNCTION commandbus.batch_waits(p_domain text, p_batch bigint, p_most integer)
    RETURNS TABLE (kind text, members bigint, seconds float8, ahead bigint, rate float8)
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM commandbus.check_caller(p_domain, 'SELECT');
    RETURN QUERY EXECUTE format($sql$
WITH newest AS MATERIALIZED (
    SELECT id, msg_id, status
      FROM commandbus.command
     WHERE (batch, id) >= ($2, 0) AND batch <= $2
     ORDER BY batch DESC, id DESC
     LIMIT $3
), delayed AS MATERIALIZED (
    SELECT msg_id, CASE WHEN message ->> 'command' ~ '^[0-9]{1,18}$' THEN (message ->> 'command')::bigint END AS command
      FROM pgmq.%1$I
     WHERE vt > now() AND vt < now() + interval '1 year' AND headers IS NULL
     ORDER BY vt DESC
     LIMIT $3
), member AS MATERIALIZED (
    SELECT msg_id FROM newest WHERE status = 'PENDING'
    UNION
    SELECT d.msg_id
      FROM delayed d
     CROSS JOIN LATERAL (SELECT batch, msg_id, domain FROM commandbus.command WHERE id = d.command OFFSET 0) c
     WHERE c.batch = $2 AND c.msg_id = d.msg_id AND c.domain = $1
), seen AS MATERIALIZED (
    SELECT CASE WHEN p.reason = 'limit' THEN 'limit'
                WHEN p.reason IS NOT NULL OR q.vt <= now() THEN 'unknown'
                WHEN q.headers ? 'held_by' THEN 'running'
                ELSE 'delayed' END AS kind,
           q.vt, p.limit_name, p.since, p.command, p.seq
      FROM member m
     CROSS JOIN LATERAL (SELECT vt, headers FROM pgmq.%1$I WHERE msg_id = m.msg_id OFFSET 0) q
      LEFT JOIN LATERAL (
           SELECT * FROM commandbus.parked WHERE domain = $1 AND msg_id = m.msg_id AND woken_at IS NULL OFFSET 0) p ON true
), last AS (
    SELECT DISTINCT ON (limit_name) limit_name, since, command, seq, count(*) OVER (PARTITION BY limit_name) AS members
      FROM seen
     WHERE kind = 'limit'
     ORDER BY limit_name, since DESC, command DESC, seq DESC
)
SELECT kind, count(*), CASE WHEN kind = 'delayed' THEN extract(epoch FROM max(vt) - now())::float8 END, NULL::bigint,
       NULL::float8
  FROM seen
 WHERE kind <> 'limit'
 GROUP BY kind
UNION ALL
SELECT 'limit', last.members,
       CASE WHEN NOT l.is_forced
            THEN greatest(0, extract(epoch FROM greatest(l.until, CASE WHEN l.is_open THEN l.open_until END) - now()))::float8
            END,
       (SELECT count(*) FROM (SELECT FROM commandbus.parked p
                               WHERE p.limit_name = last.limit_name AND p.woken_at IS NULL
                                 AND (p.since, p.command, p.seq) < (last.since, last.command, last.seq)
                               LIMIT 100000) x),
       nullif(least(l.per_second, f.flow), 0)
  FROM last
  LEFT JOIN commandbus.limits l ON l.name = last.limit_name
 CROSS JOIN LATERAL (
       SELECT CASE WHEN l.flow_at > 0
                   THEN l.flow * exp(greatest((l.flow_at - extract(epoch FROM now())::float8) / 60, -50)) / 60
                        / (1 - exp(-least(greatest(extract(epoch FROM now())::float8 - l.flow_since, 1), 600) / 60))
                   END AS flow) f
$sql$, 'q_' || p_domain || '__commands') USING p_domain, p_batch, p_most;
END
$$;
REVOKE ALL ON FUNCTION commandbus.batch_waits FROM PUBLIC;
