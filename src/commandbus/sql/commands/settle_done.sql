-- commands/settle_final.sql for the usual outcome: the first attempt of a command completed, without a result, a reply
-- or a process. If some were not settled, returns those that were; the caller then runs commands/settle_final.sql for the
-- rest.
--
-- `messages` and `started` have an element for each id from first + 1 on: the msg_id of the command with that id and when
-- its attempt started, or 0 if that command is not among them. So there is no join: each table is read by an array of keys,
-- and no estimate can change that.
--
-- Fence and row writes: as in commands/settle_final.sql. The DELETE is the fence. It waits for a locked queue row as long
-- as the session's lock_timeout allows. Locks: queue rows in key order, then command rows. Indexes: the queue's key, the
-- command's key.
--
-- Each settlement must update exactly one command row. If a command row is missing, the cast in the last lines fails, and
-- nothing is settled: the caller then runs commands/settle_final.sql for each.
--
-- If members of batches are among them, batches/settle_done_batches.sql is inserted in the middle.
WITH gone AS (
    DELETE FROM pgmq.{queue}
     WHERE msg_id = ANY (%(messages)s::bigint[])
       AND read_ct = 1
       AND headers -> 'held_by'::text = (SELECT pg_catalog.to_jsonb(%(worker)s::text))
       AND msg_id = (%(messages)s::bigint[])[(message -> 'command'::text)::bigint - %(first)s::bigint]
    RETURNING (message -> 'command'::text)::bigint AS command
), settled AS (
    UPDATE commandbus.command
       SET status = 'COMPLETED', attempt = 1, worker = %(worker)s, finished_at = pg_catalog.now(),
           started_at = pg_catalog.to_timestamp((%(started)s::float8[])[id - %(first)s::bigint])
     WHERE id = ANY (ARRAY(SELECT command FROM gone))
       AND msg_id = (%(messages)s::bigint[])[id - %(first)s::bigint]
    RETURNING batch
{groups})
SELECT CASE WHEN pg_catalog.count(*) > (SELECT pg_catalog.count(*) FROM settled)
            THEN ('{a command row is missing for one of ' || pg_catalog.count(*)::text || ' settlements}')::bigint[]
            WHEN pg_catalog.count(*) < %(asked)s
            THEN ARRAY(SELECT command FROM gone) END FROM gone
