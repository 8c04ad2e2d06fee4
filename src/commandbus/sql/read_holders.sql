-- Who held queue rows before, last first, as far as their headers say so: a worker that died before it could record its
-- predecessor left a chain. A foreign client may have written anything: only what looks like ours is told, and no more of
-- it than we would write.
-- Locks: none. Index: the queue's key.
WITH RECURSIVE chain AS (
    SELECT msg_id, 1 AS level, headers -> 'before' AS b
      FROM pgmq.{queue}
     WHERE msg_id = ANY (%(msg_ids)s::bigint[]) AND headers -> 'held_by' = to_jsonb(%(worker)s::text)
    UNION ALL
    SELECT msg_id, level + 1, b -> 'before' FROM chain WHERE level < 100 AND jsonb_typeof(b) = 'object'
)
SELECT msg_id,
       json_agg(json_build_object(
           'held_by', CASE WHEN jsonb_typeof(b -> 'held_by') = 'string' THEN left(b ->> 'held_by', 200) END,
           'since', CASE WHEN jsonb_typeof(b -> 'since') = 'string'
                              AND b ->> 'since' ~ '^[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9][0-9.:+-]{0,16}$'
                         THEN b ->> 'since' END,
           'alone', b -> 'alone' IS NOT DISTINCT FROM 'true',
           'cancel', CASE WHEN jsonb_typeof(b -> 'cancel') = 'object' THEN json_build_object(
               'by', CASE WHEN jsonb_typeof(b #> '{cancel,by}') = 'string' THEN left(b #>> '{cancel,by}', 200) END,
               'reason', CASE WHEN jsonb_typeof(b #> '{cancel,reason}') = 'string'
                              THEN left(b #>> '{cancel,reason}', 2000) END) END)
           ORDER BY level)::text
  FROM chain
 WHERE jsonb_typeof(b) = 'object'
 GROUP BY msg_id
