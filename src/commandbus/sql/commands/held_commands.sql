-- The commands of a domain that a worker holds, of the messages that become visible next and of those that became visible last: a
-- lease is short. It looks at so many of each.
-- Locks: none. Index: q_*_vt_idx, then the command's key.
SELECT c.id
  FROM (SELECT shift FROM {bands}
         WHERE (band.shift = interval '0'
                OR CASE WHEN band.shift < interval '0'
                    THEN (SELECT true FROM pgmq.{queue} WHERE vt < {early} ORDER BY vt LIMIT 1)
                    ELSE (SELECT true FROM pgmq.{queue} WHERE vt >= {late} ORDER BY vt LIMIT 1) END) OFFSET 0) band
 CROSS JOIN LATERAL (
       SELECT * FROM (SELECT msg_id, message, headers, vt FROM pgmq.{queue}
                       WHERE vt > pg_catalog.now() + shift ORDER BY vt LIMIT %(most)s) next
        WHERE next.vt < pg_catalog.now() + shift + interval '8 years'
       UNION ALL
       SELECT * FROM (SELECT msg_id, message, headers, vt FROM pgmq.{queue}
                       WHERE vt <= pg_catalog.now() + shift ORDER BY vt DESC LIMIT %(most)s) last
        WHERE last.vt > pg_catalog.now() + shift - interval '500 years') q
  JOIN commandbus.command c
    ON c.id = CASE WHEN q.message ->> 'command'::text ~ '^[0-9]{1,18}$' THEN (q.message ->> 'command'::text)::bigint END
   AND c.msg_id = q.msg_id AND c.domain = %(domain)s
 WHERE q.headers ? 'held_by'::text
