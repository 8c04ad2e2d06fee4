-- The text of raw messages that this worker has just claimed: as many of them, in their order, as fit into one bite. For
-- a message that is too long, only the length is returned. Two kinds of messages are never turned into text: those
-- nested too deeply for the server's own stack ('deep'), and those with a number whose text is far longer than the number
-- itself (1e131071: 'number'). A text that is too long is dropped before the statement sorts or copies it, so the server
-- holds only one large message at a time.
-- Locks: none. Index: the queue's key.
SELECT msg_id, flaw, size, text
  FROM (SELECT msg_id, flaw, size, text,
               pg_catalog.sum(least(size, %(most)s::bigint)) OVER (ORDER BY msg_id) AS so_far,
               pg_catalog.row_number() OVER (ORDER BY msg_id) AS place
          FROM (SELECT msg_id, flaw, pg_catalog.octet_length(text)::bigint AS size,
                       CASE WHEN pg_catalog.octet_length(text) <= %(most)s::bigint THEN text END AS text
                  FROM (SELECT msg_id, flaw,
                               CASE WHEN flaw IS NULL THEN COALESCE(message, 'null')::text END AS text
                          FROM (SELECT msg_id, message,
                                       CASE WHEN pg_catalog.jsonb_path_exists(message, '$.**{300}') THEN 'deep'
                                            WHEN pg_catalog.jsonb_path_exists(message,
                                                     '$.**{0 to 300} ? (@.type() == "number" &&
                                                     (@.abs() > 1e400 || @ != 0 && @.abs() < 1e-400))') THEN 'number'
                                       END AS flaw
                                  FROM pgmq.{queue}
                                 WHERE msg_id = ANY (%(msg_ids)s::bigint[])
                                   AND headers -> 'held_by'::text = pg_catalog.to_jsonb(%(worker)s::text)
                                OFFSET 0) q
                        OFFSET 0) r
                OFFSET 0) s) t
 WHERE place = 1 OR so_far IS NULL OR so_far <= %(bite)s::numeric
