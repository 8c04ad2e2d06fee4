-- Removes a bite of the oldest rows of a table of things that were set aside, if it has more than `count` rows
-- (estimated by its ids) or more than `bytes` (as stored, without reading them). Row sizes are added up only if the whole
-- table is larger than that.
-- Locks: rows that no other transaction has locked; the others go the next time. Index: the key.
WITH newest AS MATERIALIZED (
    SELECT pg_catalog.max(id) AS id FROM commandbus.{table}
), beyond AS MATERIALIZED (
    SELECT greatest(
        (SELECT id FROM newest) - %(count)s::bigint,
        CASE WHEN pg_catalog.pg_table_size('commandbus.{table}') > %(bytes)s::bigint THEN
            (SELECT pg_catalog.max(id)
               FROM (SELECT id, pg_catalog.sum(COALESCE(pg_catalog.pg_column_size(message), 0)
                                    + pg_catalog.pg_column_size(reason) + 100) OVER (ORDER BY id DESC) AS so_far
                       FROM commandbus.{table}) sized
              WHERE so_far > %(bytes)s::bigint) END) AS id
)
DELETE FROM commandbus.{table}
 WHERE id = ANY (ARRAY(SELECT id FROM commandbus.{table}
                        WHERE id <= (SELECT id FROM beyond) ORDER BY id LIMIT %(bite)s
                          FOR UPDATE SKIP LOCKED))
RETURNING id
