-- Schedules of these domains that workers once declared, but that no worker has declared for so many seconds.
--
-- Locks: none. Indexes: the keys; both tables are small.
SELECT s.domain, s.name
  FROM commandbus.schedule s
 WHERE s.domain = ANY (%(domains)s::text[]) AND s.is_declared
   AND NOT EXISTS (SELECT FROM commandbus.schedule_declaration d
                    WHERE d.domain = s.domain AND d.name = s.name
                      AND d.seen_at >= pg_catalog.now() - pg_catalog.make_interval(secs => %(grace)s))
