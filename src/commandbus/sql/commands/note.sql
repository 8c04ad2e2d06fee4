-- Notes an exception that came after the completing transaction had committed. Locks: none.
INSERT INTO commandbus.attempt (command, number, verdict, worker, started_at, error_type, error_code, error,
                                details, traceback)
VALUES (%(command)s, %(number)s, 'NOTE', %(worker)s, pg_catalog.to_timestamp(%(started)s), %(error_type)s,
        %(error_code)s,
        %(error)s, %(details)s::json, %(traceback)s)
ON CONFLICT DO NOTHING
