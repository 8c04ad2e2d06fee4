-- Renews the leases of permits that are held, and returns the tokens that hold none any more. A permit whose lease has
-- ended is renewed if nobody has taken it yet.
-- Locks: the limit's row. Index: limits_pkey.
WITH renewed AS (
    UPDATE commandbus.limits l
       SET holders = l.holders || COALESCE(
               (SELECT pg_catalog.jsonb_object_agg(
                           token, pg_catalog.date_part('epoch', pg_catalog.clock_timestamp())
                                  + COALESCE(%(seconds)s, l.lease))
                  FROM pg_catalog.unnest(%(tokens)s::text[]) AS token WHERE l.holders ? token), '{}'),
           probe_until = CASE WHEN l.probe = ANY (%(tokens)s)
                              THEN pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => l.lease)
                              ELSE l.probe_until END
     WHERE l.name = %(name)s AND (l.holders ?| %(tokens)s::text[] OR l.probe = ANY (%(tokens)s))
    RETURNING l.holders
)
SELECT token FROM pg_catalog.unnest(%(tokens)s::text[]) AS token
 WHERE NOT EXISTS (SELECT FROM renewed WHERE holders ? token)
