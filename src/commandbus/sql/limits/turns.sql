-- What is known about commands that come to a limit and were claimed before: the permit that is reserved for them, how
-- long ago they were first parked, and how often the API has refused them (also as the probe). Their rows of parked are
-- deleted.
-- Locks: rows of parked, of commands that the caller holds. Indexes: parked_domain_msg_id_key, attempt_pkey.
WITH input AS MATERIALIZED (
    SELECT * FROM pg_catalog.json_to_recordset(%(rows)s::json) AS x(m bigint, c bigint, b integer)
), woken AS (
    DELETE FROM commandbus.parked
     WHERE domain = %(domain)s AND msg_id = ANY (ARRAY(SELECT m FROM input)) AND limit_name IS NOT NULL
    RETURNING msg_id, limit_name, token
)
SELECT i.m, w.limit_name, w.token, a.waited, a.tries
  FROM input i
  LEFT JOIN woken w ON w.msg_id = i.m
 CROSS JOIN LATERAL (
       SELECT extract(epoch FROM pg_catalog.now() - pg_catalog.min(finished_at))::float8 AS waited,
              pg_catalog.count(*) FILTER (WHERE error_code = 'RATE_LIMITED') AS tries
         FROM commandbus.attempt
        WHERE command = i.c AND number > i.b AND verdict = 'PARKED'
          AND pg_catalog.left(error_code, 5) IN ('LIMIT', 'RATE_')) a
