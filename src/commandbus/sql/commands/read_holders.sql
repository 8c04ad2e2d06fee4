-- Who held queue rows before, last first, as far as the headers say so. A worker that died before it could record its
-- predecessor has left a chain. Another client may have written anything, so this returns only what looks like ours,
-- and no more than we would write.
-- Locks: none. Index: the queue's key.
WITH RECURSIVE chain AS (
    SELECT msg_id, 1 AS level, headers -> 'before'::text AS b
      FROM pgmq.{queue}
     WHERE msg_id = ANY (%(msg_ids)s::bigint[])
       AND headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
    UNION ALL
    SELECT msg_id, level + 1, b -> 'before'::text FROM chain
     WHERE level < 100 AND pg_catalog.jsonb_typeof(b) = 'object'
)
SELECT msg_id,
       pg_catalog.json_agg(pg_catalog.json_build_object(
           'held_by', CASE WHEN pg_catalog.jsonb_typeof(b -> 'held_by'::text) = 'string'
                           THEN pg_catalog.left(b ->> 'held_by'::text, 200) END,
           'since', CASE WHEN pg_catalog.jsonb_typeof(b -> 'since'::text) = 'string'
                              AND b ->> 'since'::text ~ '^[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9][0-9.:+-]{0,16}$'
                         THEN b ->> 'since'::text END,
           'alone', b -> 'alone'::text IS NOT DISTINCT FROM 'true',
           'cancel', CASE WHEN pg_catalog.jsonb_typeof(b -> 'cancel'::text) = 'object' THEN pg_catalog.json_build_object(
               'by', CASE WHEN pg_catalog.jsonb_typeof(b #> '{cancel,by}'::text[]) = 'string'
                          THEN pg_catalog.left(b #>> '{cancel,by}'::text[], 200) END,
               'reason', CASE WHEN pg_catalog.jsonb_typeof(b #> '{cancel,reason}'::text[]) = 'string'
                              THEN pg_catalog.left(b #>> '{cancel,reason}'::text[], 2000) END) END)
           ORDER BY level)::text
  FROM chain
 WHERE pg_catalog.jsonb_typeof(b) = 'object'
 GROUP BY msg_id
