-- Breakers open on trouble of a command type. Purpose: bad attempts with their commands and starts, and what workers count.
--
-- Locks: ACCESS EXCLUSIVE on breaker and worker for a moment: columns only, no row is rewritten.
-- What breakers have counted in the old columns is forgotten: it had neither commands nor starts.

-- recent: attempts that ended badly, [command, is stuck, began, ended] with epoch seconds, in the order of their ends.
-- counted_until: when the last of them leaves the window. vain: the commands that were the probe in vain since it opened,
-- one entry for each time.
ALTER TABLE commandbus.breaker
    DROP COLUMN stuck_at,
    DROP COLUMN failed_at,
    ADD COLUMN recent         jsonb NOT NULL DEFAULT '[]',
    ADD COLUMN counted_until  timestamptz,
    ADD COLUMN vain           bigint[] NOT NULL DEFAULT '{}';

-- counts: 'DOMAIN/COMMAND_TYPE' → how many attempts ended and were not stuck since some moments (model/trouble.py). Null
-- as long as no type has a bad attempt in its window.
ALTER TABLE commandbus.worker ADD COLUMN counts jsonb;
