-- Sets raw messages that are not commands aside, with the reason.
-- Locks: queue rows that this worker has just claimed. Index: the queue's key.
WITH input AS MATERIALIZED (
    SELECT * FROM pg_catalog.json_to_recordset(%(rows)s::json) AS x(m bigint, r integer, e text, p text)
), gone AS (
    DELETE FROM pgmq.{queue} q
     USING input i
     WHERE q.msg_id = i.m AND q.read_ct = i.r
       AND q.headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
    RETURNING q.msg_id, q.message, q.headers, i.e, i.p
)
INSERT INTO commandbus.rejected_message (domain, msg_id, message, headers, preview, reason)
SELECT %(domain)s, msg_id, message, headers, p, e FROM gone
