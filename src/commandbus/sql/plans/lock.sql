-- Looks up commands `p` of a plan: `t`, if it still needs a person, since the same moment; `f`, if this transaction could lock it. A part
-- of other statements.
-- Locks: rows of tsq, command and process that nobody else has locked. It waits for none of them, so their order does not matter.
  LEFT JOIN LATERAL (
       SELECT t.command
         FROM commandbus.tsq t
        WHERE t.command = p.command AND t.entered_at = p.entered_at AND t.domain = %(domain)s
       OFFSET 0) t ON true
  LEFT JOIN LATERAL (
       SELECT l.command, c.process
         FROM commandbus.tsq l
         JOIN commandbus.command c ON c.id = l.command
        WHERE l.command = t.command AND l.entered_at = p.entered_at
          FOR UPDATE OF l SKIP LOCKED
          FOR NO KEY UPDATE OF c SKIP LOCKED) g ON true
  LEFT JOIN LATERAL (
       SELECT r.id
         FROM commandbus.process r
        WHERE r.id = g.process
          FOR NO KEY UPDATE SKIP LOCKED) r ON true
  LEFT JOIN LATERAL (SELECT g.command WHERE g.process IS NULL OR r.id IS NOT NULL) f ON true
