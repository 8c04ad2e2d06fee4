-- A part of other statements: can the turn of this parked row `p` come? It cannot while its domain or type is paused,
-- or while no worker works there, because nobody would use the reserved permit. Both lists are made once, however many
-- rows are looked at.
(p.domain = ''
 OR (p.domain = ANY (ARRAY(SELECT pg_catalog.unnest(w.domains) FROM commandbus.worker w
                            WHERE w.state = 'ACTIVE'
                              AND w.heartbeat_at > pg_catalog.now() - interval '15 seconds'))
     AND NOT ARRAY[p.domain, p.domain || ' ' || p.command_type]
             OPERATOR(pg_catalog.&&) ARRAY(SELECT pg_catalog.rtrim(u.domain || ' ' || u.command_type)
                                             FROM commandbus.pause u)))
