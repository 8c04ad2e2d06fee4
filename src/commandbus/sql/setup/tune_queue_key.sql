-- Leaves room in the pages of a queue's key: each claim of a message adds an entry beside the one of its sending. Without
-- room, the claims split nearly every page, and search it for entries to delete before that. Locks: SHARE UPDATE EXCLUSIVE
-- on the index, once, at its creation.
ALTER INDEX pgmq.{queue}_pkey SET (fillfactor = 50)
