-- Keeps messages in their bands of vt, whoever writes vt (ADR 27): those with a priority in theirs, and all others, whatever
-- moment a foreign client writes, in the normal one. Locks: SHARE ROW EXCLUSIVE on the queue, once, at its creation. The
-- condition is all that it costs a message without a priority.
CREATE OR REPLACE TRIGGER commandbus_keep_band BEFORE INSERT OR UPDATE ON pgmq.{queue}
   FOR EACH ROW WHEN (pg_catalog.pg_column_size(NEW.message) <= 80 AND NEW.message ? 'p'::text
                      OR NEW.vt < 'epoch' OR NEW.vt >= timestamptz 'epoch' + {millennium})
   EXECUTE FUNCTION commandbus.keep_band()
