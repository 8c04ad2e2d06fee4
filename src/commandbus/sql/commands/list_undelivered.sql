-- Replies that could not be delivered, newest first, before a given id. Locks: none. Index: the key, backwards.
SELECT id, queue, message::text, reason, created_at
  FROM commandbus.undelivered_reply
 WHERE %(before_id)s::bigint IS NULL OR id < %(before_id)s
 ORDER BY id DESC
 LIMIT %(limit)s
