-- Messages that were set aside, newest first, before a given id. It reads their previews, never the whole messages.
-- Locks: none. Index: the key, backwards.
SELECT id, domain, msg_id, preview, reason, rejected_at
  FROM commandbus.rejected_message
 WHERE (%(domain)s::text IS NULL OR domain = %(domain)s)
   AND (%(before_id)s::bigint IS NULL OR id < %(before_id)s)
 ORDER BY id DESC
 LIMIT %(limit)s
