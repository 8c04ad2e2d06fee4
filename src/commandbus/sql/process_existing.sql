-- Processes that were started before, to compare with what is to be started. Locks: none.
SELECT process_id, id, process_type, data::text, reply_to, correlation_id, batch
  FROM commandbus.process
 WHERE domain = %(domain)s AND process_id = ANY (%(process_ids)s::text[])
