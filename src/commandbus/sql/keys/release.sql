-- Makes the next commands of some keys visible, as many as each key has places. This transaction has locked the keys
-- (keys/lock.sql). Returns how many were released in all; the keys that are to be looked at again, because a command in line had
-- ended or was locked; and per key limit, for how many seconds the commands that have completed had their places.
--
-- A released command counts until it has ended, whatever its worker does: so no crash can free a place too early. One that has
-- ended leaves the line here. One in the troubleshooting queue steps aside if its limit says so; an operator's retry in
-- the same moment gives it another message, and then it still counts.
-- If a command has waited for a second or more, a row of attempt says from when to when: PARKED, with the number of the attempt
-- before (0: none). A claim that put it into the line has written that row already.
-- Locks: queue rows and rows of `keyed`. Those that somebody else has locked are skipped, so it waits for nobody. Indexes: keyed_released,
-- keyed_line, the keys of keyed, command, queue and attempt, operator_action_command. The line is read from a place in keyed_line on, and the key is compared
-- outside: with `=` the planner might read and sort the whole line.
WITH target AS MATERIALIZED (
    SELECT x.key_limit, x.key, COALESCE(o.concurrency, a.concurrency, l.concurrency, 1) AS most, COALESCE(l.steps_aside, false) AS steps_aside
      FROM ROWS FROM (pg_catalog.unnest(%(limits)s::text[]), pg_catalog.unnest(%(keys)s::text[])) AS x(key_limit, key)
      LEFT JOIN commandbus.key_limit l ON l.domain = %(domain)s AND l.name = x.key_limit
      LEFT JOIN commandbus.key_override o
        ON o.domain = %(domain)s AND o.key_limit = x.key_limit AND o.key = x.key AND o.until > pg_catalog.now()
      LEFT JOIN commandbus.key_override a
        ON a.domain = %(domain)s AND a.key_limit = x.key_limit AND a.key = '' AND a.until > pg_catalog.now()
), released AS MATERIALIZED (
    SELECT t.key_limit, t.key, t.steps_aside, k.command, k.msg_id, k.released_at, c.status
      FROM target t
     CROSS JOIN LATERAL (
           SELECT command, msg_id, released_at FROM commandbus.keyed
            WHERE domain = %(domain)s AND key_limit = t.key_limit AND key = t.key AND state = 'RELEASED'
           OFFSET 0) k
      LEFT JOIN LATERAL (SELECT status, msg_id FROM commandbus.command WHERE id = k.command OFFSET 0) c ON true
), aside AS MATERIALIZED (
    SELECT k.command
      FROM commandbus.keyed k
      JOIN released r ON r.command = k.command AND r.msg_id = k.msg_id
     WHERE k.command = ANY (ARRAY(SELECT command FROM released
                                   WHERE steps_aside AND status OPERATOR(pg_catalog.=) 'IN_TROUBLESHOOTING_QUEUE'))
       FOR UPDATE OF k SKIP LOCKED
), room AS MATERIALIZED (
    SELECT t.key_limit, t.key, greatest(0::bigint, t.most - COALESCE(taken.places, 0::bigint)) AS places
      FROM target t
      LEFT JOIN (SELECT r.key_limit, r.key, pg_catalog.count(*) AS places FROM released r
                  WHERE r.status OPERATOR(pg_catalog.=) ANY ('{PENDING,IN_TROUBLESHOOTING_QUEUE}'::commandbus.command_status[])
                    AND NOT EXISTS (SELECT FROM aside a WHERE a.command = r.command)
                  GROUP BY r.key_limit, r.key) taken ON taken.key_limit = t.key_limit AND taken.key = t.key
), next AS MATERIALIZED (
    SELECT r.key_limit, r.key, n.command, n.msg_id, n.turn,
           EXISTS (SELECT FROM commandbus.command c
                    WHERE c.id = n.command AND c.msg_id = n.msg_id AND c.status OPERATOR(pg_catalog.=) 'PENDING')
               AND EXISTS (SELECT FROM pgmq.{queue} q WHERE q.msg_id = n.msg_id) AS can_run
      FROM room r
     CROSS JOIN LATERAL (
           SELECT command, msg_id, pg_catalog.row_number() OVER (ORDER BY command) AS turn
             FROM (SELECT domain, key_limit, key, command, msg_id FROM commandbus.keyed
                    WHERE (domain, key_limit, key, command) > (%(domain)s::text, r.key_limit, r.key, 0::bigint)
                      AND state IN ('NEW', 'WAITING')
                    ORDER BY domain, key_limit, key, command
                    LIMIT r.places) heads
            WHERE domain = %(domain)s AND key_limit = r.key_limit AND key = r.key) n
), free AS MATERIALIZED (
    SELECT msg_id FROM pgmq.{queue}
     WHERE msg_id = ANY (ARRAY(SELECT msg_id FROM next WHERE can_run)) AND headers IS NULL  -- nobody holds it
       FOR UPDATE SKIP LOCKED
), over AS MATERIALIZED (
    SELECT command, msg_id FROM released
     WHERE status IS NULL
        OR status OPERATOR(pg_catalog.<>) ALL ('{PENDING,IN_TROUBLESHOOTING_QUEUE}'::commandbus.command_status[])
    UNION ALL
    SELECT command, msg_id FROM next WHERE NOT can_run
), mine AS MATERIALIZED (
    SELECT command, msg_id FROM commandbus.keyed
     WHERE command = ANY (ARRAY(SELECT command FROM over UNION ALL SELECT command FROM next WHERE can_run))
       FOR UPDATE SKIP LOCKED
), heads AS MATERIALIZED (
    SELECT n.command, n.msg_id, n.key_limit, n.key, pg_catalog.row_number() OVER (ORDER BY n.turn, n.command) AS place
      FROM next n
      JOIN free f ON f.msg_id = n.msg_id
      JOIN mine m ON m.command = n.command AND m.msg_id = n.msg_id
), ended AS (
    DELETE FROM commandbus.keyed
     WHERE command = ANY (ARRAY(SELECT o.command FROM over o JOIN mine m ON m.command = o.command AND m.msg_id = o.msg_id))
), moved AS (
    UPDATE commandbus.keyed
       SET state = CASE WHEN command = ANY (ARRAY(SELECT command FROM aside)) THEN 'ASIDE' ELSE 'RELEASED' END,
           released_at = pg_catalog.clock_timestamp()
     WHERE command = ANY (ARRAY(SELECT command FROM aside UNION ALL SELECT command FROM heads))
), shown AS (
    UPDATE pgmq.{queue} q
       SET vt = pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => h.place::float8 / 1000000::float8)
                + {own_shift}
      FROM heads h
     WHERE q.msg_id = h.msg_id
), waited AS MATERIALIZED (
    SELECT h.command, c.attempt_base + q.read_ct AS number, h.key_limit, h.key,
           COALESCE(p.finished_at, r.performed_at, c.created_at) AS since
      FROM heads h
     CROSS JOIN LATERAL (SELECT attempt_base, created_at FROM commandbus.command WHERE id = h.command OFFSET 0) c
     CROSS JOIN LATERAL (SELECT read_ct FROM pgmq.{queue} WHERE msg_id = h.msg_id OFFSET 0) q
      LEFT JOIN LATERAL (SELECT pg_catalog.max(performed_at) AS performed_at FROM commandbus.operator_action
                          WHERE command = h.command AND action = 'RETRY' AND c.attempt_base > 0) r ON true
      LEFT JOIN LATERAL (SELECT finished_at FROM commandbus.attempt
                          WHERE command = h.command AND number = c.attempt_base + q.read_ct AND verdict = 'PARKED'
                         OFFSET 0) p ON true
), noted AS (
    INSERT INTO commandbus.attempt (command, number, verdict, finished_at, retry_at, error_code, error, limit_name)
    SELECT command, number, 'PARKED', since, pg_catalog.clock_timestamp(), 'KEY_LIMIT',
           'waited for its turn: ' || key_limit || ' ' || key, key_limit
      FROM waited
     WHERE since <= pg_catalog.now() - interval '1 second'
    ON CONFLICT (command, number, verdict) DO UPDATE SET retry_at = excluded.retry_at
), woken AS MATERIALIZED (
    SELECT pg_catalog.pg_notify('commandbus_' || %(domain)s, '0')
     WHERE EXISTS (SELECT FROM heads)
       AND EXISTS (SELECT FROM commandbus.waiting WHERE domain = %(domain)s AND expires_at > pg_catalog.now())
)
SELECT NULL, NULL, (SELECT pg_catalog.count(*) FROM heads)::float8, (SELECT pg_catalog.count(*) FROM woken)
UNION ALL
SELECT DISTINCT n.key_limit, n.key, 0::float8, 0::bigint FROM next n
 WHERE NOT EXISTS (SELECT FROM heads h WHERE h.msg_id = n.msg_id)
UNION ALL
SELECT key_limit, NULL, pg_catalog.avg(extract(epoch FROM pg_catalog.now() - released_at)::float8), 0::bigint
  FROM released WHERE status OPERATOR(pg_catalog.=) 'COMPLETED' AND released_at IS NOT NULL
 GROUP BY key_limit
