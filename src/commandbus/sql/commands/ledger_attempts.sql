-- The newest attempts of a command that did not simply complete, without their texts, for its ledger.
-- Locks: none. Index: attempt's key.
SELECT number, verdict, finished_at, started_at, retry_at, worker, error_code, limit_name, spans::text
  FROM commandbus.attempt
 WHERE command = %(command)s
 ORDER BY number DESC, verdict DESC
 LIMIT %(limit)s
