"""Databases for tests: a fresh one costs ten times as much as emptying one that a test has used.

A test worker keeps one used database, and another one with the domain `orders`: making and dropping a domain costs
as much as the rest of a small test. The next test gets it under a new name, so that nothing which an earlier
test left behind can connect again, with every other session ended and every row gone. Whatever else a test changed
(a trigger, a grant, a setting) shows in the fingerprint; such a database is dropped, and a new copy is made.

The session that empties a database stays in it: a new one would read the catalogs anew, which takes four times as
long as the work. A test looks at the tables in this session, too (`looking`), by a connection that is new to it.
If a test ends that session, the next one gets a new one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

# Few rows are deleted: a TRUNCATE makes new files for a table and each of its indexes, which takes much longer.
# Foreign keys and triggers have no say meanwhile.
_EMPTY = """
DO $$
DECLARE
    item record;
    large_tables text[] := '{}';
    queues text;
BEGIN
    SET LOCAL session_replication_role = replica;
    SET LOCAL client_min_messages = warning;
    SET LOCAL lock_timeout = '5s';
    -- pgmq.drop_queue would do so in three times the time.
    SELECT string_agg(format('pgmq.%I, pgmq.%I', 'q_' || lower(queue_name), 'a_' || lower(queue_name)), ', ')
      INTO queues FROM pgmq.meta WHERE queue_name <> ALL ({queues});
    IF queues IS NOT NULL THEN
        EXECUTE format('DROP TABLE IF EXISTS %s CASCADE', queues);
        DELETE FROM pgmq.meta WHERE queue_name <> ALL ({queues});
    END IF;
    DELETE FROM commandbus.setting WHERE setting.name NOT LIKE 'pgmq%';
    DELETE FROM commandbus.domain WHERE domain.name <> ALL ({domains});
    FOR item IN SELECT relnamespace::regnamespace AS schema, relname, pg_relation_size(oid) AS size FROM pg_class
                 WHERE relkind = 'r'
                   AND (relnamespace = 'commandbus'::regnamespace
                        AND relname NOT IN ('migration', 'setting', 'domain')
                        OR relnamespace = 'pgmq'::regnamespace AND relname ~ '^[aq]_') LOOP
        IF item.size > 65536 THEN
            large_tables := large_tables || format('%s.%I', item.schema, item.relname);
        ELSIF item.size > 0 THEN
            EXECUTE format('DELETE FROM %s.%I', item.schema, item.relname);
        END IF;
    END LOOP;
    IF large_tables <> '{}' THEN
        EXECUTE 'TRUNCATE ' || array_to_string(large_tables, ', ') || ' CASCADE';
    END IF;
    PERFORM setval(oid::regclass, 1, false) FROM pg_class
      WHERE relkind = 'S' AND relnamespace IN ('commandbus'::regnamespace, 'pgmq'::regnamespace);
    FOR item IN SELECT oid::regclass AS name FROM pg_class
                 WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') LOOP
        EXECUTE format('DROP TABLE IF EXISTS %s CASCADE', item.name);
    END LOOP;
END $$
"""

# A catalog's row that was written since the copy has a higher xmin than all that were copied, and one that is gone
# is missing in the count. pg_class rows are written by TRUNCATE and ANALYZE, too: their content counts.
_FINGERPRINT = """
WITH changed(catalog, state) AS (
    SELECT 'trigger', concat_ws(' ', count(*), max(xmin::text::bigint)) FROM pg_trigger
    UNION ALL SELECT 'constraint', concat_ws(' ', count(*), max(xmin::text::bigint)) FROM pg_constraint
    UNION ALL SELECT 'function', concat_ws(' ', count(*), max(xmin::text::bigint)) FROM pg_proc WHERE oid >= 16384
    UNION ALL SELECT 'type', concat_ws(' ', count(*), max(xmin::text::bigint)) FROM pg_type WHERE oid >= 16384
    UNION ALL SELECT 'schema', concat_ws(' ', count(*), max(xmin::text::bigint)) FROM pg_namespace
               WHERE nspname !~ '^pg_(toast_)?temp'
    UNION ALL SELECT 'extension', concat_ws(' ', count(*), max(xmin::text::bigint)) FROM pg_extension
    UNION ALL SELECT 'default grant', concat_ws(' ', count(*), max(xmin::text::bigint)) FROM pg_default_acl
    UNION ALL SELECT 'class', md5(string_agg(concat_ws(' ', oid, relname, relkind, relowner, relacl, reloptions,
                                                       relhastriggers, relnatts), ' ' ORDER BY oid))
                FROM pg_class
               WHERE relnamespace IN ('commandbus'::regnamespace, 'pgmq'::regnamespace, 'public'::regnamespace)
    UNION ALL SELECT 'database', concat_ws(' ', datdba, datacl) FROM pg_database WHERE datname = current_database()
    UNION ALL SELECT 'migration', string_agg(concat_ws(' ', migration.*), ' ' ORDER BY migration::text)
                FROM commandbus.migration
    UNION ALL SELECT 'row', string_agg(concat_ws(' ', setting.*), ' ' ORDER BY setting::text)
                FROM commandbus.setting
    UNION ALL SELECT 'domain', string_agg(concat_ws(' ', domain.*), ' ' ORDER BY domain::text)
                FROM commandbus.domain
    UNION ALL SELECT 'queue', string_agg(concat_ws(' ', meta.*), ' ' ORDER BY meta::text) FROM pgmq.meta
    UNION ALL SELECT 'setting', concat_ws(' ', setconfig) FROM pg_db_role_setting s
                JOIN pg_database d ON d.oid = s.setdatabase AND d.datname = current_database()
)
SELECT string_agg(concat_ws(' ', catalog, state), E'\n' ORDER BY catalog, state) FROM changed
"""

_END_SESSIONS = """
SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity WHERE datname = %s AND pid <> %s
"""

# ALTER DATABASE … RENAME refuses while a session is in it, though it would harm none.
_RENAME = "UPDATE pg_catalog.pg_database SET datname = %s WHERE datname = %s"


class Databases:
    """Lends databases that are copies of a template; used by one test worker, one test at a time.

    `domains` are in the template; so they are in every copy.
    """

    def __init__(self, server: str, template: str, *, domains: Sequence[str] = ()) -> None:
        self._server = server.removesuffix("/postgres")
        self._template = template
        queues = [f"{domain}__commands" for domain in domains]
        self._empty = _EMPTY.replace("{domains}", _array(domains)).replace("{queues}", _array(queues))
        self._admin = psycopg.connect(server, autocommit=True)
        self._admin.execute("SET allow_system_table_mods = on")
        self._sweeper: psycopg.Connection[Any] | None = None
        self._swept = ""  # the database in which the sweeper's session is
        self._used: str | None = None
        self._lent: str | None = None
        self._fingerprint: str | None = None

    @contextmanager
    def lend(self, *, used: bool = True) -> Iterator[str]:
        """The address of a database with nothing in it but the schema of commandbus, and the domains; `used`
        allows one that has the statistics of earlier tests."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        if not (used and self._take_used(name)):
            self._run("CREATE DATABASE {} TEMPLATE {}", name, self._template)
        self._lent = name
        try:
            yield self._address(name)
        finally:
            self._lent = None
            self._take_back(name)

    @contextmanager
    def looking(self, address: str) -> Iterator[psycopg.Connection[Any]]:
        """A connection in autocommit mode to the database at this address."""
        name = address.rpartition("/")[2]
        is_lent = name == self._lent and address == self._address(name)
        if not is_lent or (self._sweeper is not None and self._swept != name):
            with psycopg.connect(address, autocommit=True) as connection:
                yield connection
            return
        connection = psycopg.Connection(self._session_in(name).pgconn)
        connection.autocommit = True
        try:
            yield connection
        finally:
            _forget(connection)

    def close(self) -> None:
        """Drop what is left."""
        if self._used is not None:
            self._drop(self._used)
        self._admin.close()

    def _take_back(self, name: str) -> None:
        if self._used is None:
            self._used = name
        else:
            self._run("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def _take_used(self, name: str) -> bool:
        """Whether the used database could be made as good as new, under this name."""
        used, self._used = self._used, None
        if used is None:
            return False
        with suppress(psycopg.Error):
            self._admin.execute(_RENAME, [name, used])
            used = name
            if self._is_as_new(name):
                return True
        self._drop(used)
        return False

    def _is_as_new(self, name: str) -> bool:
        self._swept = name
        sweeper = self._session_in(name)
        self._admin.execute(_END_SESSIONS, [name, sweeper.info.backend_pid])
        sweeper.execute(self._empty.encode())
        return _one(sweeper, _FINGERPRINT) == self._expected()

    def _session_in(self, name: str) -> psycopg.Connection[Any]:
        """The session that stays in the database, if it is alive; else a new one."""
        if self._sweeper is not None:
            with suppress(psycopg.Error):
                self._sweeper.execute("SELECT")
                return self._sweeper
            self._sweeper.close()
        self._sweeper = psycopg.connect(self._address(name), autocommit=True, application_name="tests")
        self._sweeper.prepare_threshold = None  # a test's connection gives its statements the same names
        self._swept = name
        return self._sweeper

    def _drop(self, name: str) -> None:
        if self._sweeper is not None:
            self._sweeper.close()
            self._sweeper = None
        self._run("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def _expected(self) -> str:
        """The fingerprint of a copy of the template that nobody has used."""
        if self._fingerprint is None:
            name = f"test_{uuid.uuid4().hex[:12]}"
            self._run("CREATE DATABASE {} TEMPLATE {}", name, self._template)
            with psycopg.connect(self._address(name)) as conn:
                self._fingerprint = _one(conn, _FINGERPRINT)
            self._run("DROP DATABASE {} WITH (FORCE)", name)
        return self._fingerprint

    def _run(self, statement: str, *names: str) -> None:
        self._admin.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def _address(self, name: str) -> str:
        return f"{self._server}/{name}"


def _forget(connection: psycopg.Connection[Any]) -> None:
    """The session forgets what the test has done in it, and ends if it cannot. The connection loses it, or would
    close it at its own end."""
    pgconn = connection.pgconn
    try:
        if connection.info.transaction_status != TransactionStatus.IDLE:
            connection.rollback()
        connection.execute("DISCARD ALL", prepare=False)
        while pgconn.notifies():
            pass
    except psycopg.Error:
        connection.close()
    del connection.pgconn


@contextmanager
def another_session(db: psycopg.Connection[Any]) -> Iterator[psycopg.Connection[Any]]:
    """Beside one that is there, in the same database: that has a new name since the session began. Unlike the
    first, it is in a transaction from its first statement on."""
    with psycopg.connect(db.info.dsn, dbname=_one(db, "SELECT current_database()")) as connection:
        yield connection


def _array(names: Sequence[str]) -> str:
    return "'{" + ",".join(names) + "}'::text[]"


def _one(conn: psycopg.Connection[Any], query: str) -> str:
    row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return str(row[0])
