"""Resets a database session between two handlers, so that the second sees nothing of the first.

In our own pool everything is reset: user, role, settings (custom ones, too), cursors, temporary objects,
sequences, channels and advisory locks. That is one round trip, or part of the one that commits
(`CommitAndReset`); what is not there costs a few microseconds. The answer names the session's prepared statements.
If they are the ones that psycopg knows, they are kept, because they make the next handler faster. Else all of them
are dropped.

A session of a lent pool belongs to the application: it gets back the user, the role and the settings that it had.
It loses the cursors, prepared statements, channels and temporary objects that it did not have. There are two
exceptions. All session-level advisory locks are released, because reading the list of locks blocks everybody who
locks something. And custom settings such as `app.tenant` stay as they are, because PostgreSQL does not list them.

`Habits` is what psycopg keeps about a connection on the client's side.

Nothing here is called behind PgBouncer: there a session belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final, NamedTuple, TypeAlias

from psycopg import Connection
from psycopg._preparing import PrepareManager
from psycopg.abc import PQGen
from psycopg.adapt import AdaptersMap
from psycopg.pq import ExecStatus

from commandbus.worker.execution.one_transaction import INTRANS, AnyKind, raise_first_error, send_together

Ask: TypeAlias = "tuple[bytes, dict[str, Any] | None]"
Rows: TypeAlias = "list[tuple[Any, ...]]"
TUPLES_OK: Final = ExecStatus.TUPLES_OK

# The names come first: psycopg shows the first result of many. RESET ALL spares role and session authorization.
_PREPARED = b"SELECT (pg_catalog.pg_prepared_statement()).name"
_RESETS = (
    _PREPARED,
    b"RESET SESSION AUTHORIZATION",
    b"RESET ROLE",
    b"RESET ALL",
    b"CLOSE ALL",
    b"DISCARD TEMP",
    b"DISCARD SEQUENCES",
    b"UNLISTEN *",
    b"SELECT pg_catalog.pg_advisory_unlock_all(), pg_catalog.current_setting('default_transaction_isolation')",
)
_DROP_PREPARED = b"DEALLOCATE ALL"

# What is in the session, as the statements that remove it. (A protocol's own cursor has no name.)
_CONTENTS = b"""ARRAY(
    SELECT 'CLOSE ' || pg_catalog.quote_ident(name) FROM pg_catalog.pg_cursor() WHERE name <> ''
     UNION ALL SELECT 'DEALLOCATE ' || pg_catalog.quote_ident(name) FROM pg_catalog.pg_prepared_statement()
     UNION ALL SELECT 'UNLISTEN ' || pg_catalog.quote_ident(channel)
                 FROM pg_catalog.pg_listening_channels() channel
     UNION ALL SELECT 'DROP ' || found.type || ' IF EXISTS ' || found.identity || ' CASCADE'
                 FROM pg_catalog.pg_depend d,
                      LATERAL pg_catalog.pg_identify_object(d.classid, d.objid, 0) found
                WHERE d.refclassid = 'pg_catalog.pg_namespace'::pg_catalog.regclass::oid
                  AND d.refobjid = pg_catalog.pg_my_temp_schema() AND d.deptype = 'n')"""
REMEMBER = (
    b"""SELECT session_user::text, pg_catalog.current_setting('role'),
    (SELECT coalesce(pg_catalog.json_object_agg(name, setting), '{}')::text
       FROM pg_catalog.pg_settings WHERE source = 'session'),
    """
    + _CONTENTS
)
_WHO_IT_WAS = b"""SELECT pg_catalog.pg_advisory_unlock_all(),
    CASE WHEN session_user <> %(user)s
         THEN pg_catalog.set_config('session_authorization', %(user)s, false) END,
    CASE WHEN pg_catalog.current_setting('role') <> %(role)s
         THEN pg_catalog.set_config('role', %(role)s, false) END"""
# What was set since and not before gets its default (NULL); what was set before gets that value.
_AS_IT_WAS = (
    b"""WITH was AS (SELECT key AS name, value AS setting FROM pg_catalog.json_each_text(%(settings)s::json)),
    is_now AS MATERIALIZED (SELECT name, setting FROM pg_catalog.pg_settings WHERE source = 'session'),
    made AS MATERIALIZED (SELECT pg_catalog.set_config(name, was.setting, false)
                            FROM is_now FULL JOIN was USING (name)
                           WHERE is_now.setting IS DISTINCT FROM was.setting)
SELECT (SELECT pg_catalog.count(*) FROM made), """
    + _CONTENTS
)


class Remembered(NamedTuple):
    """The session of a lent connection when we got it: its user, its role, what was set in it (as JSON), and what
    was in it (as the statements that would remove that)."""

    user: str
    role: str
    settings: str
    contents: list[str]


def put_back(before: Remembered | None, prepared: PrepareManager) -> Generator[Ask, Rows, None]:
    """Reset the session: completely in our own pool (`before` is None), to what it had in a lent pool.

    Yields statements and gets their rows. `prepared` is what psycopg knows of the session's prepared statements.
    """
    return _reset(prepared) if before is None else _restore(before, prepared)


class CommitAndReset:
    """Ends a transaction in a session of our own pool and resets the session, in one round trip.

    After an error nothing is known of the session. `level` is what its next transaction has by default.
    """

    __slots__ = ("_names", "level")

    def __init__(self) -> None:
        self._names: set[str] | None = None
        self.level = ""

    def commit(self, conn: AnyKind) -> PQGen[None]:
        """Raises if it was not committed."""
        if conn._pipeline or conn._num_transactions or conn._tpc or conn.pgconn.transaction_status != INTRANS:
            yield from conn._commit_gen()
            return
        results = yield from send_together(conn, (b"COMMIT", *_RESETS))
        raise_first_error(results[:1], conn.pgconn._encoding)
        if len(results) == 1 + len(_RESETS) and results[-1].status == TUPLES_OK:
            names, last = results[1], results[-1]
            self._names = {_text(names.get_value(row, 0) or b"") for row in range(names.ntuples)}
            self.level = _text(last.get_value(0, 1) or b"")

    def is_clean(self, prepared: PrepareManager) -> bool:
        """Is the session ready for the next handler?"""
        return self._names is not None and self._names == _known(prepared)


def _reset(prepared: PrepareManager) -> Generator[Ask, Rows, None]:
    names = yield b"; ".join(_RESETS), None
    if {_text(name) for (name,) in names} != _known(prepared):
        yield _DROP_PREPARED, None
        _forget(prepared)


def _restore(before: Remembered, prepared: PrepareManager) -> Generator[Ask, Rows, None]:
    yield _WHO_IT_WAS, {"user": before.user, "role": before.role}
    ((_, contents),) = yield _AS_IT_WAS, {"settings": before.settings}
    known = {f"DEALLOCATE {name}" for name in _known(prepared)}
    if not known.issubset(contents):
        _forget(prepared)
    if left := [removal for removal in contents if removal not in before.contents and removal not in known]:
        yield "; ".join(left).encode(), None


def _known(prepared: PrepareManager) -> set[str]:
    """The names of the statements that psycopg has prepared in this session."""
    return {name.decode() for name in prepared._names.values()}


def _forget(prepared: PrepareManager) -> None:
    """They are not there any more; nor is there anything left to deallocate."""
    prepared.clear()
    prepared._to_flush.clear()


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode(errors="replace")  # bytes, if the encoding is SQL_ASCII


_NAMES = (
    "autocommit",
    "row_factory",
    "cursor_factory",
    "server_cursor_factory",
    "prepare_threshold",
    "prepared_max",
    "isolation_level",
    "read_only",
    "deferrable",
)


class Habits:
    """What psycopg keeps of a connection on our side. A handler may change all of it."""

    __slots__ = ("_adapters", "_listeners", "_notice_handlers", "_notify_handlers", "_values")

    def __init__(self, conn: Connection[Any]) -> None:
        self._values = [getattr(conn, name) for name in _NAMES]
        self._listeners = conn.pgconn.notice_handler, conn.pgconn.notify_handler
        self._notice_handlers = conn._notice_handlers
        self._notify_handlers = conn._notify_handlers
        self._adapters = conn._adapters
        conn._notice_handlers = self._notice_handlers.copy()
        conn._notify_handlers = self._notify_handlers.copy()
        if self._adapters is not None:
            conn._adapters = AdaptersMap(self._adapters)  # copied only when somebody writes

    @property
    def autocommit(self) -> bool:
        """Whether the connection was in autocommit mode."""
        return bool(self._values[0])

    def restore(self, conn: Connection[Any]) -> None:
        """Give all of it back. The connection is idle."""
        conn.pgconn.notice_handler, conn.pgconn.notify_handler = self._listeners
        conn._notice_handlers = self._notice_handlers
        conn._notify_handlers = self._notify_handlers
        conn._adapters = self._adapters
        if conn._notifies_backlog:
            conn._notifies_backlog.clear()
        for name, value in zip(_NAMES, self._values, strict=True):
            if getattr(conn, name) != value:
                setattr(conn, name, value)
