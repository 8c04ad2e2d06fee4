-- How many wait for the same limit ahead of each of these commands of one domain. Reads the lines of those limits once,
-- however many commands are given. Locks: none. Index: parked_limit, in its order.
SELECT msg_id, ahead
  FROM (SELECT domain, msg_id,
               pg_catalog.row_number() OVER (PARTITION BY limit_name ORDER BY since, seq) - 1 AS ahead
          FROM commandbus.parked
         WHERE limit_name = ANY (%(names)s::text[]) AND woken_at IS NULL) line
 WHERE domain = %(domain)s AND msg_id = ANY (%(msg_ids)s::bigint[])
