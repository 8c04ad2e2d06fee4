-- Stores a plan with exactly the commands that it chooses now. If there are more than `most`, the caller refuses it and rolls back.
-- Locks: none that others wait for. Index: see plans/chosen.sql.
WITH chosen AS MATERIALIZED (
    SELECT t.command, t.entered_at, t.command_type, t.error_code
      FROM commandbus.tsq t
     WHERE {chosen}
     LIMIT %(most)s + 1
), grouped AS (
    SELECT command_type, error_code, pg_catalog.count(*) AS number
      FROM chosen
     GROUP BY command_type, error_code
     ORDER BY number DESC, command_type, error_code
     LIMIT 20
), made AS (
    INSERT INTO commandbus.plan (domain, action, filter, result, seconds, total, groups, previewed_by, reason)
    SELECT %(domain)s, %(action)s, %(filter)s::json, %(result)s::json, %(seconds)s, (SELECT pg_catalog.count(*) FROM chosen),
           (SELECT COALESCE(pg_catalog.json_agg(pg_catalog.json_build_array(command_type, error_code, number)), '[]') FROM grouped),
           %(operator)s, %(reason)s
    RETURNING id, total
), held AS (
    INSERT INTO commandbus.plan_command (plan, command, entered_at)
    SELECT made.id, chosen.command, chosen.entered_at FROM chosen CROSS JOIN made
)
SELECT id, total FROM made
