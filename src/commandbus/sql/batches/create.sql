-- A new batch, without members yet. Returns its id, or no row if the batch_id is taken. ON CONFLICT names no columns,
-- because that would need the right to read them, which a producer does not have.
--
-- Locks: the new row. Index: batch_domain_batch_id_key: a second creator waits for the first one's commit.
INSERT INTO commandbus.batch (domain, batch_id, name, holds, is_open, custom_data, on_complete, completes_early,
                              on_exhausted, priority{column})
VALUES (%(domain)s, %(batch_id)s, %(name)s, %(holds)s, %(is_open)s, %(custom_data)s::json, %(on_complete)s::json,
        %(completes_early)s, %(on_exhausted)s, %(priority)s{value})
ON CONFLICT DO NOTHING
RETURNING id
