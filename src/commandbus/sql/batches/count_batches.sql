-- Notes what happened to the members of batches. Locks: new rows only.
INSERT INTO commandbus.batch_delta (batch, total, completed, failed, canceled, in_tsq)
SELECT b, COALESCE(t, 0), COALESCE(c, 0), COALESCE(f, 0), COALESCE(x, 0), COALESCE(q, 0)
  FROM pg_catalog.json_to_recordset(%(rows)s::json) AS r(b bigint, t integer, c integer, f integer, x integer,
                                                         q integer)
