-- Writes down a step that sends no command: it waits for a signal, sleeps, or waits for a nested process. If the process
-- already has a step with this number, another worker has moved it, and processes/advance.sql will refuse.
--
-- Locks: a new row. Index: process_step's key.
INSERT INTO commandbus.process_step (process, number, name, undoes, kind, timer, domain, command_id, command_type, has_undo,
                                     deadline_at)
VALUES (%(process)s, %(number)s, %(name)s, %(undoes)s, %(kind)s, %(timer)s, %(domain)s, %(command_id)s, %(command_type)s, %(has_undo)s,
        pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => %(seconds)s))
ON CONFLICT (process, number) DO NOTHING
