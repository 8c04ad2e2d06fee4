-- Creates a schedule, or changes its definition. If its times change, firings count from now: firings that the old times
-- have missed are not made up for. `next_at` was computed from the server's clock in this transaction.
--
-- Returns a row if anything was changed. Nothing changes if the definition is the same, or if the schedule is of the other
-- kind (declared by workers, or created at run time).
--
-- Locks: its row. Index: schedule_pkey.
INSERT INTO commandbus.schedule AS s
       (domain, name, command_type, cron, every, timezone, missed, overlap, most, timeout, max_attempts, expires,
        on_exhausted, priority, correlation_id, reply_to, headers, data, is_declared, fingerprint, passed_at, next_at)
VALUES (%(domain)s, %(name)s, %(command_type)s, %(cron)s, %(every)s, %(timezone)s, %(missed)s, %(overlap)s, %(most)s,
        %(timeout)s, %(max_attempts)s, %(expires)s, %(on_exhausted)s, %(priority)s, %(correlation_id)s, %(reply_to)s, %(headers)s::json, %(data)s::json,
        %(is_declared)s, %(fingerprint)s, %(now)s, %(next_at)s)
ON CONFLICT (domain, name) DO UPDATE
   SET command_type = excluded.command_type, cron = excluded.cron, every = excluded.every, timezone = excluded.timezone,
       missed = excluded.missed, overlap = excluded.overlap, most = excluded.most, timeout = excluded.timeout,
       max_attempts = excluded.max_attempts, expires = excluded.expires, on_exhausted = excluded.on_exhausted, priority = excluded.priority, correlation_id = excluded.correlation_id, reply_to = excluded.reply_to,
       headers = excluded.headers, data = excluded.data, fingerprint = excluded.fingerprint, version = s.version + 1,
       changed_at = pg_catalog.now(),
       passed_at = CASE WHEN s.cron IS NOT DISTINCT FROM excluded.cron AND s.every IS NOT DISTINCT FROM excluded.every
                             AND s.timezone = excluded.timezone THEN s.passed_at ELSE excluded.passed_at END,
       next_at = CASE WHEN s.cron IS NOT DISTINCT FROM excluded.cron AND s.every IS NOT DISTINCT FROM excluded.every
                             AND s.timezone = excluded.timezone THEN s.next_at ELSE excluded.next_at END
 WHERE s.fingerprint <> excluded.fingerprint AND s.is_declared = excluded.is_declared
RETURNING s.version
