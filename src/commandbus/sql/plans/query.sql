-- Plans, newest first; or one. {locking} is empty, or locks the plan's row, which is locked before all other rows. Index: the key.
SELECT id, domain, action, filter::text, result::text, seconds, state, total, moved, skipped, locked, groups::text, previewed_by, reason, created_at,
       started_by, started_at, stopped_by, note, finished_at
  FROM commandbus.plan
 WHERE (%(id)s::bigint IS NULL OR id = %(id)s)
   AND (%(domain)s::text IS NULL OR domain = %(domain)s)
   AND (%(before_id)s::bigint IS NULL OR id < %(before_id)s)
 ORDER BY id DESC
 LIMIT %(limit)s
{locking}
