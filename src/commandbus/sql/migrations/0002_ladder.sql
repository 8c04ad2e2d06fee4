-- The ladder. Purpose: time limits of single commands, how a hanging attempt was stopped, health of workers.
--
-- Locks: ACCESS EXCLUSIVE on command, attempt, worker and operator_action for a moment (new columns without a default
-- rewrite nothing), and one scan of `attempt` to check its constraint anew. Indexes: none on columns that settling
-- changes.

-- timeout: this command's own deadline in seconds (0: none). suspect: it was held when a worker died and nobody could be
-- named, so it runs isolated; how many such crashes were waived (model/suspects.py). alone: nobody was left to look who did
-- it, so such commands run one at a time per supervisor. quarantine: an attempt got stuck or crashed its worker, so the
-- next ones run in a child process.
ALTER TABLE commandbus.command ADD COLUMN timeout float8, ADD COLUMN suspect smallint, ADD COLUMN alone boolean,
    ADD COLUMN quarantine boolean;

-- TIMED_OUT: a time-out that is final (the handler says so): the command is FAILED. WAIVED: stopped through no fault
-- of its own; tried again at once and not charged.
ALTER TABLE commandbus.attempt ADD COLUMN duration_ms bigint;
ALTER TABLE commandbus.attempt DROP CONSTRAINT attempt_verdict_check;
ALTER TABLE commandbus.attempt ADD CONSTRAINT attempt_verdict_check
    CHECK (verdict IN ('RETRY', 'EXHAUSTED', 'PERMANENT', 'UNKNOWN_TYPE', 'BUSINESS_RULE', 'TIMED_OUT', 'CANCELED',
                       'LOST', 'WAIVED', 'GIVEN_BACK', 'PARKED', 'NOTE'));
CREATE INDEX attempt_stopped ON commandbus.attempt (finished_at) WHERE rung IS NOT NULL;

ALTER TABLE commandbus.worker ADD COLUMN supervisor text, ADD COLUMN health json;

-- attempt: the attempt that was running when somebody asked to cancel its command.
ALTER TABLE commandbus.operator_action ADD COLUMN attempt integer;

CREATE OR REPLACE VIEW commandbus.audit AS
    SELECT id AS command, created_at AS at, 10 AS rank, 'SENT'::text AS event, NULL::integer AS attempt,
           NULL::text AS worker,
           json_build_object('command_type', command_type, 'correlation_id', correlation_id,
                             'reply_to', reply_to) AS details
      FROM commandbus.command
    UNION ALL
    SELECT id, started_at, attempt * 100 + 20, 'RECEIVED', attempt, worker, NULL
      FROM commandbus.command c
     WHERE started_at IS NOT NULL AND status = 'COMPLETED' AND attempt IS NOT NULL
    UNION ALL
    SELECT id, finished_at, attempt * 100 + 40, 'COMPLETED', attempt, worker, NULL
      FROM commandbus.command c
     WHERE status = 'COMPLETED' AND attempt IS NOT NULL
    UNION ALL
    SELECT command, started_at, number * 100 + 20, 'RECEIVED', number, worker, NULL
      FROM commandbus.attempt
     WHERE started_at IS NOT NULL AND verdict NOT IN ('NOTE')
    UNION ALL
    SELECT command, finished_at, number * 100 + CASE verdict WHEN 'NOTE' THEN 45 ELSE 30 END,
           CASE verdict WHEN 'BUSINESS_RULE' THEN 'BUSINESS_RULE_FAILED'
                        WHEN 'CANCELED' THEN 'CANCELED'
                        WHEN 'GIVEN_BACK' THEN 'GIVEN_BACK'
                        WHEN 'WAIVED' THEN 'WAIVED'
                        WHEN 'PARKED' THEN 'PARKED'
                        WHEN 'NOTE' THEN 'NOTE'
                        ELSE 'FAILED' END,
           number, worker,
           json_build_object('verdict', verdict, 'error_type', error_type, 'error_code', error_code,
                             'error', error, 'details', details, 'rung', rung, 'duration_ms', duration_ms)
      FROM commandbus.attempt
     WHERE NOT (verdict = 'EXHAUSTED' AND started_at IS NULL)
    UNION ALL
    SELECT command, finished_at, number * 100 + 31, 'RETRY_SCHEDULED', number, worker,
           json_build_object('retry_at', retry_at)
      FROM commandbus.attempt
     WHERE verdict = 'RETRY'
    UNION ALL
    SELECT command, finished_at, number * 100 + 32, 'RETRY_EXHAUSTED', number, worker, NULL
      FROM commandbus.attempt
     WHERE verdict = 'EXHAUSTED'
    UNION ALL
    SELECT command, finished_at, number * 100 + 33, 'MOVED_TO_TSQ', number, worker,
           json_build_object('error_type', error_type, 'error_code', error_code, 'error', error)
      FROM commandbus.attempt
     WHERE verdict IN ('EXHAUSTED', 'PERMANENT', 'UNKNOWN_TYPE')
    UNION ALL
    SELECT command, performed_at, COALESCE(attempt * 100 + 25, attempt_base * 100 + 50), 'OPERATOR_' || action,
           attempt, NULL,
           json_build_object('operator', operator, 'reason', reason)
      FROM commandbus.operator_action;
