-- A bite of the commands that have ended badly, newest first: by their last attempts, and by what people did to them.
-- Locks: none. Indexes: attempt_ended, operator_action_canceled.
SELECT found.command
  FROM (SELECT * FROM (SELECT a.command FROM commandbus.attempt a
                        WHERE a.verdict IN {verdicts} AND a.command < %(before_id)s::bigint
                        ORDER BY a.command DESC LIMIT %(bite)s) x
        UNION ALL
        SELECT * FROM (SELECT o.command FROM commandbus.operator_action o
                        WHERE o.action = 'CANCEL' AND %(by_people)s::boolean AND o.command < %(before_id)s::bigint
                        ORDER BY o.command DESC LIMIT %(bite)s) y) found
 ORDER BY found.command DESC
 LIMIT %(bite)s
