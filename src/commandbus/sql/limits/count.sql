-- Adds permits that Redis gave to the counter and to the measured rate.
-- Locks: the limit's row. Index: limits_pkey.
UPDATE commandbus.limits l
   SET granted = l.granted + %(count)s::bigint,
       flow = l.flow * pg_catalog.exp(greatest((l.flow_at - t.at) / 60::float8, -50)) + %(count)s::float8,
       flow_at = t.at,
       flow_since = CASE WHEN l.flow_at < t.at - 300::float8 THEN t.at - %(seconds)s::float8 ELSE l.flow_since END
  FROM (SELECT extract(epoch FROM pg_catalog.clock_timestamp())::float8 AS at) t
 WHERE l.name = %(name)s AND l.store <> 'postgres'
