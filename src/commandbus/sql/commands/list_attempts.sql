-- Every attempt of a command that did not simply complete, in order, with its traceback and autopsy. Locks: none.
-- Index: command_domain_command_id_key, then attempt's key; the worker's key.
SELECT a.number, a.verdict, a.started_at, a.finished_at, a.retry_at, a.worker, a.error_type, a.error_code, a.error,
       a.details::text, a.traceback, a.rung, a.duration_ms, a.autopsy::text, a.fingerprint, a.own_frame,
       (SELECT w.code_version FROM commandbus.worker w WHERE w.id = a.worker)
  FROM commandbus.command c
  JOIN commandbus.attempt a ON a.command = c.id
 WHERE c.domain = %(domain)s AND c.command_id = %(command_id)s
 ORDER BY a.number, a.finished_at
