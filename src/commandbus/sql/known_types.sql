-- The command types of a domain that somebody knows: those that live workers say they handle, and those of the newest
-- commands. A registry without types (workers of an older release) counts for nothing. Locks: none. Index: the key of
-- command, backwards, for %(most)s entries; worker is small.
SELECT t.name
  FROM commandbus.worker w
 CROSS JOIN LATERAL pg_catalog.jsonb_array_elements_text(
       CASE WHEN pg_catalog.jsonb_typeof(pg_catalog.to_jsonb(w) -> 'types'::text) = 'array'::text
            THEN pg_catalog.to_jsonb(w) -> 'types'::text ELSE '[]'::jsonb END) AS said(name)
 CROSS JOIN LATERAL (SELECT pg_catalog.substr(said.name, pg_catalog.length(%(domain)s::text) + 2)) AS t(name)
 WHERE w.heartbeat_at > pg_catalog.now() - pg_catalog.make_interval(secs => %(alive)s) AND w.state <> 'STOPPED'::text
   AND pg_catalog.starts_with(said.name, %(domain)s::text || '/'::text)
 UNION
SELECT newest.command_type
  FROM (SELECT c.domain, c.command_type FROM commandbus.command c ORDER BY c.id DESC LIMIT %(most)s) newest
 WHERE newest.domain = %(domain)s::text
