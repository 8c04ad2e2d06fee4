-- Sends messages to a PGMQ queue in their order, and notifies programs that wait for them. Locks: new queue rows.
WITH queued AS (
    INSERT INTO pgmq.{queue} (vt, message, headers)
    SELECT COALESCE(%(at)s::timestamptz,
                    pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => %(delay)s::float8)),
           m.message::jsonb, m.headers::jsonb
      FROM ROWS FROM (pg_catalog.unnest(%(messages)s::text[]), pg_catalog.unnest(%(headers)s::text[]))
           WITH ORDINALITY AS m (message, headers, place)
     ORDER BY m.place
    RETURNING msg_id
)
SELECT pg_catalog.array_agg(msg_id ORDER BY msg_id),
       CASE WHEN %(channel)s::text IS NOT NULL
            THEN pg_catalog.pg_notify(%(channel)s::text, pg_catalog.count(*)::text) END
  FROM queued
