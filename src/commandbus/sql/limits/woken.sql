-- Writes for which commands the turn has come, and under which token a permit is reserved for each; counts how long they
-- have waited. Callers inside programs are notified by their token. Locks: the limit's row (the caller has locked it), then
-- rows of parked. Index: parked_pkey. PostgreSQL estimates an array from a subquery as ten keys; with a join, or an array
-- whose length it knows, it would read all of `parked`.
WITH woken AS (
    UPDATE commandbus.parked
       SET woken_at = pg_catalog.now(),
           token = (%(tokens)s::text[])[pg_catalog.array_position(%(seqs)s::bigint[], seq)]
     WHERE seq = ANY (ARRAY(SELECT pg_catalog.unnest(%(seqs)s::bigint[])))
    RETURNING domain, token, extract(epoch FROM pg_catalog.now() - parked_at)::float8 AS waited
), counted AS (
    UPDATE commandbus.limits
       SET waits = waits + (SELECT pg_catalog.count(*) FROM woken),
           waited_seconds = waited_seconds + (SELECT COALESCE(pg_catalog.sum(greatest(waited, 0)), 0) FROM woken)
     WHERE name = %(name)s
)
SELECT pg_catalog.pg_notify('commandbus_limits', 'token ' || token) FROM woken WHERE domain = ''
