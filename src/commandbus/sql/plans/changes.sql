-- How many commands the filter of a plan chooses now that its preview did not show, and how many of the preview it does not choose any more.
-- Locks: none. Indexes: see plans/chosen.sql; the key of plan_command.
WITH today AS MATERIALIZED (
    SELECT t.command, t.entered_at
      FROM commandbus.tsq t
     WHERE {chosen}
), shown AS MATERIALIZED (
    SELECT command, entered_at FROM commandbus.plan_command WHERE plan = %(plan)s
)
SELECT (SELECT pg_catalog.count(*) FROM (SELECT * FROM today EXCEPT SELECT * FROM shown) AS entered),
       (SELECT pg_catalog.count(*) FROM (SELECT * FROM shown EXCEPT SELECT * FROM today) AS gone)
