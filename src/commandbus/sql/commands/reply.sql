-- Sends replies to one queue, and notifies the programs that wait for them. Locks: new queue rows.
WITH queued AS (
    INSERT INTO pgmq.{queue} (vt, message)
    SELECT pg_catalog.clock_timestamp(), value FROM pg_catalog.jsonb_array_elements(%(messages)s::jsonb)
    RETURNING msg_id
)
SELECT pg_catalog.pg_notify('commandbus_r_' || %(queue)s, pg_catalog.count(*)::text) FROM queued
