"""backend: an attempt's database session, seen from outside: what it does, how it is cancelled and ended."""

from __future__ import annotations

from typing import Any

from psycopg import errors as pg

from commandbus import sql
from commandbus.flow.statement import Statement, Steps, operation
from commandbus.model import payload


@operation(atomic=False)
def find_backend(pid: int, key: int | None) -> Steps[int | None]:
    """The pid of an attempt's backend: remembered, or by its advisory lock behind PgBouncer."""
    if key is None:
        return pid
    rows = yield Statement(sql.text("lock_holder"), {"key": key})
    return rows[0][0] if rows else None


@operation(atomic=False)
def look_at_backend(pid: int) -> Steps[dict[str, Any] | None]:
    """Query, wait event and blockers of a backend; None if it is gone."""
    rows = yield Statement(sql.text("backend"), {"pid": pid})
    if not rows:
        return None
    _, state, query, wait_type, wait_event, seconds, blockers = rows[0]
    return {
        "pid": pid,
        "state": state,
        "query": query,
        "wait_event_type": wait_type,
        "wait_event": wait_event,
        "xact_seconds": seconds,
        "blocked_by": [] if blockers is None else payload.loads(blockers),
    }


@operation(atomic=False)
def cancel_backend(pid: int) -> Steps[bool]:
    """Cancel what a backend runs; False if this role may not, or it is gone."""
    return (yield from _signal(b"SELECT pg_cancel_backend(%(pid)s)", pid))


@operation(atomic=False)
def terminate_backend(pid: int) -> Steps[bool]:
    """End a backend and wait until it is gone (2 s at most); False if this role may not, or it was gone."""
    return (yield from _signal(b"SELECT pg_terminate_backend(%(pid)s, 2000)", pid))


def _signal(text: bytes, pid: int) -> Steps[bool]:
    try:
        rows = yield Statement(text, {"pid": pid})
    except pg.InsufficientPrivilege:
        return False
    found: bool = rows[0][0]
    return found
