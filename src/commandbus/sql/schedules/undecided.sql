-- Declarations of these domains that should be in effect and are not. For each schedule, that is the newest definition that
-- live workers declare, by its first declaration. `is_taken`: somebody created a schedule of that name at run time.
--
-- Locks: none. Indexes: the keys; both tables are small.
SELECT newest.domain, newest.name, newest.definition, s.name IS NOT NULL AND NOT s.is_declared AS is_taken
  FROM (SELECT DISTINCT ON (d.domain, d.name) d.domain, d.name, d.fingerprint, d.definition
          FROM commandbus.schedule_declaration d
         WHERE d.domain = ANY (%(domains)s::text[]) AND d.seen_at > pg_catalog.now() - interval '15 seconds'
         ORDER BY d.domain, d.name, d.first_seen DESC, d.fingerprint) newest
  LEFT JOIN commandbus.schedule s ON s.domain = newest.domain AND s.name = newest.name
 WHERE s.name IS NULL OR s.fingerprint <> newest.fingerprint OR NOT s.is_declared
