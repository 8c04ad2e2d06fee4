-- A part of other statements: may the turn of this parked row `p` come? Not while its domain is paused, or nobody works
-- there: a place that is kept for it would be kept in vain.
(p.domain = ''
 OR (EXISTS (SELECT FROM commandbus.worker w
              WHERE p.domain = ANY (w.domains) AND w.state = 'ACTIVE' AND w.heartbeat_at > now() - interval '15 seconds')
     AND NOT EXISTS (SELECT FROM commandbus.pause u WHERE u.domain = p.domain AND u.command_type IN ('', p.command_type))))
