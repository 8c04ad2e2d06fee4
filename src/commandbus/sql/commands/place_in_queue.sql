-- Where a command stands that could run now: how many messages of its domain are due before it (counted up to `most`), how many live
-- workers have its domain, how much they settle per second, and whether one of them has a handler for its type. No row if it does not
-- wait in its queue, or is not due. The bands of higher priorities come first (ADR 27).
-- Locks: none. Indexes: command_domain_command_id_key, the queue's key, q_*_vt_idx.
SELECT (SELECT pg_catalog.sum(b.number)::bigint
          FROM (SELECT (SELECT pg_catalog.count(*)
                          FROM (SELECT FROM pgmq.{queue} o
                                 WHERE o.vt >= band.low AND o.vt <= least(mine.vt, pg_catalog.now() + band.shift)
                                   AND o.msg_id <> mine.msg_id
                                 ORDER BY o.vt
                                 LIMIT %(most)s) ahead) AS number
                  FROM (VALUES ('-infinity'::timestamptz, - {millennium}), ({early}, interval '0'), ({late}, {millennium}))
                       AS band (low, shift)) b),
       w.workers, w.rate, w.knows
  FROM (SELECT c.command_type, q.msg_id, q.vt
          FROM commandbus.command c
         CROSS JOIN LATERAL (SELECT msg_id, vt, headers, {due_at} AS due FROM pgmq.{queue} WHERE msg_id = c.msg_id OFFSET 0) q
         WHERE c.domain = %(domain)s AND c.command_id = %(command_id)s AND c.status OPERATOR(pg_catalog.=) 'PENDING'
           AND q.headers IS NULL AND q.due <= pg_catalog.now()) mine
 CROSS JOIN LATERAL (
       SELECT pg_catalog.count(*) AS workers, COALESCE(pg_catalog.sum((k.rates ->> %(domain)s::text)::float8), 0) AS rate,
              COALESCE(pg_catalog.bool_or(%(domain)s::text || '/' || mine.command_type = ANY (k.types)), false) AS knows
         FROM commandbus.worker k
        WHERE %(domain)s = ANY (k.domains) AND k.state = 'ACTIVE'
          AND k.heartbeat_at > pg_catalog.now() - pg_catalog.make_interval(secs => %(alive)s)) w
