-- Removes a schedule that no worker has declared for so many seconds, and its declarations.
--
-- Locks: the rows that it removes. Indexes: the keys.
WITH gone AS (
    DELETE FROM commandbus.schedule s
     WHERE s.domain = %(domain)s AND s.name = %(name)s AND s.is_declared
       AND NOT EXISTS (SELECT FROM commandbus.schedule_declaration d
                        WHERE d.domain = s.domain AND d.name = s.name
                          AND d.seen_at >= pg_catalog.now() - pg_catalog.make_interval(secs => %(grace)s))
    RETURNING s.domain, s.name
), old AS (
    DELETE FROM commandbus.schedule_declaration d USING gone WHERE d.domain = gone.domain AND d.name = gone.name
)
SELECT domain, name FROM gone
