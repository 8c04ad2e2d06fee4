-- Is a plan of these domains under way? Locks: none. Index: plan_running.
SELECT EXISTS (SELECT FROM commandbus.plan WHERE state = 'RUNNING' AND domain = ANY (%(domains)s::text[]))
