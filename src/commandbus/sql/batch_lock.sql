-- A batch that is to be changed, and whether this transaction sees what others commit (READ COMMITTED): who closes a
-- batch must see every member that was added before.
--
-- Locks: the batch row. FOR KEY SHARE (who adds) lets others add, settle and fold, and keeps the batch open until our
-- commit; FOR UPDATE (who closes or cancels) waits for those who add. Index: batch_domain_batch_id_key.
SELECT id, is_open, status, finished_at IS NOT NULL, holds, cancel::text,
       pg_catalog.current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
  FROM commandbus.batch
 WHERE domain = %(domain)s AND batch_id = %(batch_id)s
   FOR {locking}
