-- Counts places that were given elsewhere (in Redis), for the counter and for the measured rate.
-- Locks: the limit's row. Index: limits_pkey.
UPDATE commandbus.limits l
   SET granted = l.granted + %(count)s,
       flow = l.flow * exp(greatest((l.flow_at - t.at) / 60, -50)) + %(count)s,
       flow_at = t.at,
       flow_since = CASE WHEN l.flow_at < t.at - 300 THEN t.at - %(seconds)s ELSE l.flow_since END
  FROM (SELECT extract(epoch FROM clock_timestamp())::float8 AS at) t
 WHERE l.name = %(name)s AND l.backend <> 'postgres'
