-- What a prune would remove now (the conditions are those of commandbus.prune_commands in 0001_schema.sql): among the oldest `walk`
-- commands, and among the oldest `most` rows of each smaller table. Locks: none. Indexes: the keys, forwards.
WITH kept AS MATERIALIZED (
    SELECT pg_catalog.now() - pg_catalog.make_interval(secs => greatest(%(age)s::float8, k.seconds)) AS before,
           pg_catalog.now() - pg_catalog.make_interval(secs => greatest(COALESCE(%(age)s::float8, 86400), k.seconds)) AS groups_before,
           pg_catalog.now() - pg_catalog.make_interval(secs => k.seconds) AS least
      FROM (SELECT COALESCE((SELECT value::float8 FROM commandbus.setting WHERE name = 'keep_seconds'), 0) AS seconds) k
), limits AS MATERIALIZED (
    SELECT CASE WHEN %(age)s::float8 IS NOT NULL THEN before END AS before, groups_before, least FROM kept
), seen AS MATERIALIZED (
    SELECT id, status, created_at, finished_at, batch, process FROM commandbus.command ORDER BY id LIMIT %(walk)s
), old AS MATERIALIZED (
    SELECT s.status, s.finished_at
      FROM seen s CROSS JOIN limits l
     WHERE s.status OPERATOR(pg_catalog.=) ANY ('{COMPLETED,FAILED,CANCELED}')
       AND (s.finished_at < l.before OR s.id <= %(through_id)s::bigint)
       AND s.finished_at <= l.least
       AND NOT EXISTS (SELECT FROM commandbus.batch b WHERE b.id = s.batch AND b.finished_at IS NULL)
       AND NOT EXISTS (SELECT FROM commandbus.process p
                        WHERE p.id = s.process
                          AND (p.finished_at IS NULL OR p.finished_at >= l.before
                               OR EXISTS (SELECT FROM commandbus.process r WHERE r.id = p.root
                                             AND (r.finished_at IS NULL OR r.finished_at >= l.before))))
), counted AS MATERIALIZED (
    SELECT pg_catalog.count(*) FILTER (WHERE status OPERATOR(pg_catalog.=) 'COMPLETED') AS completed,
           pg_catalog.count(*) FILTER (WHERE status OPERATOR(pg_catalog.=) 'FAILED') AS failed,
           pg_catalog.count(*) FILTER (WHERE status OPERATOR(pg_catalog.=) 'CANCELED') AS canceled,
           pg_catalog.min(finished_at) AS oldest, pg_catalog.max(finished_at) AS newest
      FROM old
)
SELECT l.before, c.completed, c.failed, c.canceled, c.oldest, c.newest,
       (SELECT pg_catalog.count(*) FROM seen),
       (SELECT pg_catalog.bool_and(n.id > %(through_id)s::bigint AND COALESCE(n.created_at > l.before, true))
          FROM (SELECT id, created_at FROM seen ORDER BY id DESC LIMIT 1000) n),
       (SELECT pg_catalog.count(*) FROM (SELECT finished_at FROM commandbus.batch ORDER BY id LIMIT %(most)s) b
         WHERE b.finished_at < l.groups_before),
       (SELECT pg_catalog.count(*) FROM (SELECT finished_at FROM commandbus.process ORDER BY id LIMIT %(most)s) p
         WHERE p.finished_at < l.groups_before),
       (SELECT pg_catalog.count(*) FROM (SELECT rejected_at FROM commandbus.rejected_message ORDER BY id LIMIT %(most)s) m
         WHERE m.rejected_at < l.before),
       (SELECT pg_catalog.count(*) FROM (SELECT created_at FROM commandbus.undelivered_reply ORDER BY id LIMIT %(most)s) u
         WHERE u.created_at < l.before),
       (SELECT pg_catalog.count(*) FROM (SELECT created_at, process FROM commandbus.stray_reply ORDER BY id LIMIT %(most)s) s
         WHERE s.created_at < l.before
           AND NOT EXISTS (SELECT FROM commandbus.process p WHERE p.id = s.process)),
       (SELECT pg_catalog.count(*) FROM (SELECT performed_at FROM commandbus.control_action ORDER BY id LIMIT %(most)s) a
         WHERE a.performed_at < l.before),
       (SELECT pg_catalog.count(*) FROM (SELECT at FROM commandbus.limit_backoff ORDER BY id LIMIT %(most)s) f
         WHERE f.at < l.before)
  FROM limits l CROSS JOIN counted c
