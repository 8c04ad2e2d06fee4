-- Notes whose turn has come, and under which token a place is kept for it; counts how long they have waited.
-- Callers inside programs are told by their token. Locks: the limit's row (the caller holds it), then rows of parked.
-- Index: parked_pkey.
WITH woken AS (
    UPDATE commandbus.parked p SET woken_at = now(), token = x.token
      FROM unnest(%(seqs)s::bigint[], %(tokens)s::text[]) AS x(seq, token)
     WHERE p.seq = x.seq
    RETURNING p.domain, p.token, extract(epoch FROM now() - p.parked_at)::float8 AS waited
), counted AS (
    UPDATE commandbus.limits
       SET waits = waits + (SELECT count(*) FROM woken),
           waited_seconds = waited_seconds + (SELECT COALESCE(sum(greatest(waited, 0)), 0) FROM woken)
     WHERE name = %(name)s
)
SELECT pg_notify('commandbus_limits', 'token ' || token) FROM woken WHERE domain = ''
