-- One domain's figures. Whose turn has come (woken_at) is parked no more. Locks: none. Reads the queue once.
SELECT count(*) FILTER (WHERE NOT held AND vt <= now()),
       count(*) FILTER (WHERE NOT held AND vt > now())
           - (SELECT count(*) FROM commandbus.parked WHERE domain = %(domain)s AND woken_at IS NULL),
       count(*) FILTER (WHERE held),
       (SELECT count(*) FROM commandbus.parked WHERE domain = %(domain)s AND woken_at IS NULL),
       (SELECT count(*) FROM commandbus.tsq WHERE domain = %(domain)s),
       extract(epoch FROM now() - min(greatest(vt, 'epoch')) FILTER (WHERE NOT held AND vt <= now()))::float8,
       (SELECT coalesce(sum((rates ->> %(domain)s)::float8), 0) FROM commandbus.worker
         WHERE heartbeat_at > now() - make_interval(secs => %(alive)s) AND state <> 'STOPPED'),
       EXISTS (SELECT FROM commandbus.pause WHERE domain = %(domain)s AND command_type = ''),
       ARRAY(SELECT command_type FROM commandbus.pause
              WHERE domain = %(domain)s AND command_type <> '' ORDER BY 1),
       (SELECT count(*) FROM commandbus.rejected_message WHERE domain = %(domain)s)
  FROM (SELECT vt, COALESCE(headers ? 'held_by', false) AS held FROM pgmq.{queue}) q
