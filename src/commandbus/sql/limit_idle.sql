-- Does nobody hold a place of a limit, or wait for one? Where its places are in Redis (not is_here), nobody who uses Redis
-- may be there, or have been within a lease. Locks: none (the caller holds the row). Indexes: limits_pkey, parked_limit.
SELECT NOT EXISTS (SELECT FROM commandbus.parked WHERE limit_name = %(name)s AND woken_at IS NULL)
       AND CASE WHEN %(is_here)s
                THEN NOT EXISTS (SELECT FROM jsonb_each(l.holders) WHERE value::float8 > date_part('epoch', clock_timestamp()))
                ELSE NOT EXISTS (SELECT FROM commandbus.limit_client
                                  WHERE beat_at > now() - make_interval(secs => l.lease + 10)) END
  FROM commandbus.limits l
 WHERE l.name = %(name)s
