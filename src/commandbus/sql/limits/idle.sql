-- Is a limit unused: does nobody hold a permit of it, or wait for one? If its permits are in Redis (not is_here), it counts
-- as used while a program that uses Redis is alive, and for one lease after that.
-- Locks: none (the caller holds the row). Indexes: limits_pkey, parked_limit.
SELECT NOT EXISTS (SELECT FROM commandbus.parked WHERE limit_name = %(name)s AND woken_at IS NULL)
       AND CASE WHEN %(is_here)s
                THEN NOT EXISTS (SELECT FROM pg_catalog.jsonb_each(l.holders)
                                  WHERE value::float8 > pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()))
                ELSE NOT EXISTS (SELECT FROM commandbus.limit_client
                                  WHERE beat_at > pg_catalog.now()
                                                  - pg_catalog.make_interval(secs => l.lease + 10::float8)) END
  FROM commandbus.limits l
 WHERE l.name = %(name)s
