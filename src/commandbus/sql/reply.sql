-- Sends replies to one queue, and wakes whoever listens for them. Locks: new queue rows.
WITH queued AS (
    INSERT INTO pgmq.{queue} (vt, message)
    SELECT clock_timestamp(), value FROM jsonb_array_elements(%(messages)s::jsonb)
    RETURNING msg_id
)
SELECT pg_notify('commandbus_r_' || %(queue)s, count(*)::text) FROM queued
