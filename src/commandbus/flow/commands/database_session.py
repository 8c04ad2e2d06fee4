"""database_session: the database session of an attempt, seen from outside: what it does, how to cancel and end it.

A remembered process id may belong to another session by now. So a session is identified by its process id and its
start.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from psycopg import errors as pg

from commandbus import sql
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import payload


class DatabaseSession(NamedTuple):
    """A session of the server: its process id, and its `backend_start` in microseconds since 1970."""

    pid: int
    started: int


LONGEST_NAME: Final = 63  # the longest application_name
SLACK_SECONDS: Final = 0.5  # how far the clocks may differ

_IT = b""" FROM pg_catalog.pg_stat_activity
 WHERE pid = %(pid)s AND (extract(epoch FROM backend_start) * 1000000::numeric)::bigint = %(started)s"""


@operation(atomic=False)
def find_session(pid: int, started: int, key: int | None) -> Steps[DatabaseSession | None]:
    """An attempt's session, as remembered or, behind PgBouncer, found by its advisory lock. None if it is not
    known."""
    if key is None:
        return DatabaseSession(pid, started) if started else None
    rows = yield Statement(sql.text("commands/lock_holder"), {"key": key})
    return DatabaseSession(*rows[0]) if rows else None


@operation(atomic=False)
def look_at_session(session: DatabaseSession) -> Steps[dict[str, Any] | None]:
    """Query, wait event and blockers of a session; None if it is gone."""
    rows = yield Statement(sql.text("commands/database_session"), session._asdict())
    if not rows:
        return None
    _, state, query, wait_type, wait_event, seconds, blockers = rows[0]
    return {
        "pid": session.pid,
        "state": state,
        "query": query,
        "wait_event_type": wait_type,
        "wait_event": wait_event,
        "xact_seconds": seconds,
        "blocked_by": [] if blockers is None else payload.loads(blockers),
    }


@operation(atomic=False)
def is_of_child(session: DatabaseSession, *, worker: str, youngest_seconds: float) -> Steps[bool]:
    """Can a child process of this worker that began so many seconds ago have opened this session?"""
    name = f"commandbus {worker} isolated"[:LONGEST_NAME]
    values = {**session._asdict(), "name": name, "seconds": youngest_seconds + SLACK_SECONDS}
    rows = yield Statement(sql.text("commands/child_session"), values)
    return bool(rows)


@operation(atomic=False)
def cancel_session(session: DatabaseSession) -> Steps[bool]:
    """Cancel what a session runs. Returns False if this role may not do so, or if the session is gone."""
    return (yield from _signal(b"SELECT pg_catalog.pg_cancel_backend(pid)", session))


@operation(atomic=False)
def terminate_session(session: DatabaseSession) -> Steps[bool]:
    """End a session, and wait until it is gone (2 s at most). Returns False if this role may not, or if it was
    gone."""
    return (yield from _signal(b"SELECT pg_catalog.pg_terminate_backend(pid, 2000)", session))


def _signal(text: bytes, session: DatabaseSession) -> Steps[bool]:
    try:
        rows = yield Statement(text + _IT, session._asdict())
    except pg.InsufficientPrivilege:
        return False
    return bool(rows and rows[0][0])
