-- Probes of limits rotate, and waiting for a limit ends. Purpose: one bad command holds up nobody, nothing waits for ever.
--
-- Compatible: yes
--
-- Locks: ACCESS EXCLUSIVE on limits and parked for a moment (new columns without a default that must be computed); SHARE on
-- parked while its index is made. Workers of the schema before this one can go on.

-- `blamed`: the callers of the bad answers in a row (`failures` counts them). `vain`: caller → probes of it that did not end
-- well, since the back-off or the open breaker began. A caller is the id of a command, or the token of a block in a program.
-- `good_at`: the last successful call; where places are in Redis, to the second. `tended_at`, `tended_since`: when somebody
-- last looked after those who wait, and since when without a gap: while no worker runs, nobody's wait gets longer.
ALTER TABLE commandbus.limits
    ADD COLUMN blamed        text[] NOT NULL DEFAULT '{}',
    ADD COLUMN vain          jsonb NOT NULL DEFAULT '{}',
    ADD COLUMN good_at       timestamptz,
    ADD COLUMN tended_at     timestamptz,
    ADD COLUMN tended_since  timestamptz;

-- max_wait has a default now: a day. Those who said nothing get it.
UPDATE commandbus.limits SET max_wait = 86400
 WHERE max_wait IS NULL
   AND NOT COALESCE(declared::jsonb ? 'max_wait', false) AND NOT COALESCE(override::jsonb ? 'max_wait', false);

-- When a command was first parked for a limit, over all its returns: how long it may wait counts from there, and is said by
-- its limit's row. give_up_at is of callers inside programs only; `probes` has no use any more (limits.vain).
ALTER TABLE commandbus.parked ADD COLUMN first_parked_at timestamptz;
UPDATE commandbus.parked SET first_parked_at = parked_at, give_up_at = NULL WHERE limit_name IS NOT NULL AND domain <> '';
CREATE INDEX parked_waiting ON commandbus.parked (limit_name, first_parked_at)
 WHERE limit_name IS NOT NULL AND woken_at IS NULL AND domain <> '';
