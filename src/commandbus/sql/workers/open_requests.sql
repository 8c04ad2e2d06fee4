-- What a worker was asked, and has not answered. Locks: none. Index: worker_request_open.
SELECT id, kind, domain, msg_id, read_ct, reason
  FROM commandbus.worker_request
 WHERE worker = %(worker)s AND answered_at IS NULL AND requested_at > pg_catalog.now() - interval '1 minute'
 ORDER BY id
 LIMIT 20
