-- The command types of a domain that are known: those that live workers handle, and those of the newest commands.
-- Locks: none. Index: the key of command, backwards, for %(most)s entries; worker is small.
SELECT pg_catalog.substr(said.name, pg_catalog.length(%(domain)s::text) + 2)
  FROM commandbus.worker w
 CROSS JOIN LATERAL pg_catalog.unnest(w.types) AS said(name)
 WHERE w.heartbeat_at > pg_catalog.now() - pg_catalog.make_interval(secs => %(alive)s) AND w.state <> 'STOPPED'::text
   AND pg_catalog.starts_with(said.name, %(domain)s::text || '/'::text)
 UNION
SELECT newest.command_type
  FROM (SELECT c.domain, c.command_type FROM commandbus.command c ORDER BY c.id DESC LIMIT %(most)s) newest
 WHERE newest.domain = %(domain)s::text
