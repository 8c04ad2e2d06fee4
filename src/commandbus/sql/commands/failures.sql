-- Failures that are alike, by their fingerprints, the one that was seen last first: how many attempts failed like this since a moment
-- (counted up to `most`), the first and the last, the versions of their workers' code, how many of their commands need a person, and
-- which share of the attempts of their type failed like this. The share is that among the newest commands of all types.
--
-- {failed_in} is attempt or tsq: all failures, or those of commands that need a person.
-- Locks: none. Indexes: attempt_fingerprint and tsq_fingerprint, from one fingerprint to the next; the keys of command, attempt and
-- worker. So it reads a bounded number of rows, however many attempts there are.
WITH RECURSIVE prints AS (
    (SELECT fingerprint, 1 AS n FROM commandbus.{failed_in} WHERE fingerprint >= ''::text ORDER BY fingerprint LIMIT 1)
    UNION ALL
    SELECT next.fingerprint, p.n + 1
      FROM prints p
     CROSS JOIN LATERAL (SELECT t.fingerprint FROM commandbus.{failed_in} t
                          WHERE t.fingerprint > p.fingerprint ORDER BY t.fingerprint LIMIT 1) next
     WHERE p.n < %(prints)s
), newest AS MATERIALIZED (
    SELECT id, domain, command_type, status OPERATOR(pg_catalog.=) 'COMPLETED' AND attempt IS NOT NULL AS is_completed
      FROM commandbus.command ORDER BY id DESC LIMIT %(newest)s
), failed AS MATERIALIZED (
    SELECT n.domain, n.command_type, a.fingerprint
      FROM newest n
     CROSS JOIN LATERAL (SELECT fingerprint FROM commandbus.attempt  -- by its key: the condition outside would offer another index
                          WHERE command = n.id ORDER BY number DESC LIMIT 20) a
     WHERE a.fingerprint IS NOT NULL
), tries AS MATERIALIZED (
    SELECT domain, command_type, pg_catalog.count(*)::float8 AS number
      FROM (SELECT domain, command_type FROM newest WHERE is_completed
            UNION ALL
            SELECT domain, command_type FROM failed) t
     GROUP BY domain, command_type
), shares AS MATERIALIZED (
    SELECT f.fingerprint, pg_catalog.count(*)::float8 / pg_catalog.max(t.number) AS share
      FROM failed f JOIN tries t ON t.domain = f.domain AND t.command_type = f.command_type
     GROUP BY f.fingerprint
)
SELECT p.fingerprint, c.domain, c.command_type, last.error_type, last.error_code, last.error, last.own_frame, c.command_id,
       (SELECT pg_catalog.count(*) FROM (SELECT FROM commandbus.attempt a
                                          WHERE a.fingerprint = p.fingerprint AND a.finished_at >= %(since)s::timestamptz
                                          LIMIT %(most)s) counted),
       first.finished_at, last.finished_at,
       (SELECT w.code_version FROM commandbus.worker w WHERE w.id = first.worker),
       (SELECT w.code_version FROM commandbus.worker w WHERE w.id = last.worker),
       (SELECT pg_catalog.count(*) FROM (SELECT FROM commandbus.tsq t WHERE t.fingerprint = p.fingerprint LIMIT %(most)s) waiting),
       CASE WHEN EXISTS (SELECT FROM tries t WHERE t.domain = c.domain AND t.command_type = c.command_type)
            THEN COALESCE((SELECT s.share FROM shares s WHERE s.fingerprint = p.fingerprint), 0::float8) END
  FROM prints p
 CROSS JOIN LATERAL (
       SELECT command, error_type, error_code, error, own_frame, finished_at, worker FROM commandbus.attempt a
        WHERE a.fingerprint = p.fingerprint ORDER BY a.finished_at DESC LIMIT 1) last
 CROSS JOIN LATERAL (
       SELECT finished_at, worker FROM commandbus.attempt a
        WHERE a.fingerprint = p.fingerprint ORDER BY a.finished_at LIMIT 1) first
 CROSS JOIN LATERAL (
       SELECT domain, command_type, command_id FROM commandbus.command k WHERE k.id = last.command OFFSET 0) c
 WHERE last.finished_at >= %(since)s::timestamptz
   AND (%(domain)s::text IS NULL OR c.domain = %(domain)s)
   AND (%(command_type)s::text IS NULL OR c.command_type = %(command_type)s)
 ORDER BY last.finished_at DESC, p.fingerprint
 LIMIT %(limit)s
