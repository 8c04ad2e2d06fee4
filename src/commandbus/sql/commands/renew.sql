-- Extends the leases that a worker still holds, and stores the progress that their handlers reported. Returns those that
-- were not renewed (they are lost, or were skipped), and those that somebody asked to cancel.
--
-- SKIP LOCKED: the other leases must not wait for a row that another transaction has locked. Such a row is neither lost nor renewed; the
-- caller tries again. A lease is never shortened. Locks: queue rows. Index: the queue's key.
WITH input AS MATERIALIZED (
    SELECT * FROM unnest(%(msg_ids)s::bigint[], %(read_cts)s::integer[], %(commands)s::bigint[]) AS x(m, r, c)
), held AS MATERIALIZED (
    SELECT q.msg_id, q.read_ct, q.message -> 'command'::text AS command
      FROM pgmq.{queue} q
     WHERE q.msg_id = ANY (%(msg_ids)s::bigint[])
       AND q.headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
       FOR UPDATE SKIP LOCKED
), renewed AS (
    UPDATE pgmq.{queue}
       SET vt = greatest(vt, pg_catalog.now() + pg_catalog.make_interval(secs => %(lease)s) + {own_shift}),
           headers = CASE WHEN %(progress)s::jsonb ? msg_id::text
                          THEN headers || pg_catalog.jsonb_build_object(
                                   'progress', %(progress)s::jsonb -> msg_id::text)
                          ELSE headers END
     WHERE msg_id = ANY (ARRAY(SELECT h.msg_id FROM held h JOIN input i ON i.m = h.msg_id AND i.r = h.read_ct
                                                             AND pg_catalog.to_jsonb(i.c) = h.command))
    RETURNING msg_id, read_ct
)
SELECT i.m, i.r, CASE WHEN i.is_renewed THEN 'renewed' WHEN q.headers IS NULL THEN 'lost' ELSE 'skipped' END,
       q.headers ? 'cancel'::text, q.headers -> 'cancel'::text ->> 'by'::text,
       q.headers -> 'cancel'::text ->> 'reason'::text
  FROM (SELECT m, r, c, (m, r) IN (SELECT msg_id, read_ct FROM renewed) AS is_renewed FROM input) i
  LEFT JOIN LATERAL (
       SELECT headers
         FROM pgmq.{queue}
        WHERE msg_id = i.m AND read_ct = i.r AND headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
          AND message -> 'command'::text = pg_catalog.to_jsonb(i.c)
       OFFSET 0) q ON true
 WHERE NOT i.is_renewed OR q.headers ? 'cancel'::text
