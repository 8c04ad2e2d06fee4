-- How many wait for the same limit ahead of each of these commands of one domain. Reads the first %(most)s of each line once, however
-- many commands are given; one that is further back has at least so many ahead. Locks: none. Index: parked_limit, in its order.
SELECT wanted.msg_id, COALESCE(line.ahead, %(most)s::bigint)
  FROM pg_catalog.unnest(%(msg_ids)s::bigint[]) AS wanted (msg_id)
  LEFT JOIN (SELECT first.domain, first.msg_id, first.ahead
               FROM pg_catalog.unnest(%(names)s::text[]) AS of (name)
              CROSS JOIN LATERAL (
                    SELECT p.domain, p.msg_id,
                           pg_catalog.row_number() OVER (ORDER BY p.since, p.command, p.seq) - 1 AS ahead
                      FROM commandbus.parked p
                     WHERE p.limit_name = of.name AND p.woken_at IS NULL
                     ORDER BY p.since, p.command, p.seq
                     LIMIT %(most)s) first) line
    ON line.domain = %(domain)s AND line.msg_id = wanted.msg_id
