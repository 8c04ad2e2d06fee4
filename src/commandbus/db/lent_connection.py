"""A caller's connection, whatever wraps it: psycopg's own, a SQLAlchemy 2 session or connection, or Django's.

Only the psycopg connection inside is used, in its current transaction. Nothing is committed, rolled back or
configured. A SQLAlchemy connection begins its transaction, as it does at its own first statement.
"""

from __future__ import annotations

import inspect
from typing import Any

from psycopg import AsyncConnection, Connection

from commandbus.db.drivers import AnyAsyncConnection, AnyConnection

_HOW = (
    "pass a psycopg connection, a SQLAlchemy 2 session or connection (driver `postgresql+psycopg`), "
    "Django's `connection` (engine postgresql, psycopg 3), or the `tx` of ctx.transaction() or of a "
    "handler with transaction=True"
)


def borrow(conn: object) -> AnyConnection:
    """The psycopg connection in `conn`."""
    if _is_async_session(conn) or _is_lazy(conn) or hasattr(conn, "sync_connection"):
        raise TypeError(f"conn is {_kind(conn)}, which is async: use AsyncCommandBus with it")
    found = _unwrap(conn)
    if isinstance(found, Connection):
        return found
    if isinstance(found, AsyncConnection):
        raise TypeError("conn is an AsyncConnection: use AsyncCommandBus with it")
    raise TypeError(f"conn is {_kind(conn)}, in which there is no psycopg 3 connection; {_HOW}")


async def borrow_async(conn: Any) -> AnyAsyncConnection:
    """The psycopg async connection in `conn`."""
    if _is_async_session(conn):  # it may have none yet
        conn = await conn.connection()
    elif _is_lazy(conn):
        conn = await conn.open()
    found = _unwrap(conn)
    if isinstance(found, AsyncConnection):
        return found
    if isinstance(found, Connection):
        raise TypeError("conn is a sync Connection: use CommandBus with it")
    raise TypeError(f"conn is {_kind(conn)}, in which there is no psycopg 3 async connection; {_HOW}")


def _is_async_session(conn: Any) -> bool:
    """Is it a SQLAlchemy AsyncSession, or an async_scoped_session?"""
    return hasattr(conn, "get_bind") and inspect.iscoroutinefunction(getattr(conn, "connection", None))


def _is_lazy(conn: Any) -> bool:
    """Is it the tx of an async handler with transaction=True, which takes its connection on first use?"""
    return inspect.iscoroutinefunction(getattr(conn, "open", None)) and hasattr(conn, "savepoint")


def _unwrap(conn: Any) -> Any:
    if isinstance(conn, Connection | AsyncConnection):
        return conn
    if hasattr(conn, "ensure_connection"):  # Django opens lazily
        conn.ensure_connection()
        return _unwrap(conn.connection)
    if hasattr(conn, "sync_connection"):  # SQLAlchemy AsyncConnection
        return _unwrap(conn.sync_connection)
    if hasattr(conn, "get_bind") and callable(getattr(conn, "connection", None)):  # SQLAlchemy Session
        return _unwrap(conn.connection())
    if hasattr(conn, "exec_driver_sql") and not conn.in_transaction():
        conn.begin()  # SQLAlchemy Connection: begin as its own execute would, or its commit() would commit nothing
    if hasattr(conn, "driver_connection"):  # SQLAlchemy's pool proxy
        return _unwrap_driver(conn.driver_connection)
    inner = getattr(conn, "connection", None)
    return None if inner is None or inner is conn else _unwrap(inner)


def _unwrap_driver(driver: Any) -> Any:
    return driver if isinstance(driver, Connection | AsyncConnection) else getattr(driver, "_connection", None)


def _kind(conn: object) -> str:
    return f"{type(conn).__module__}.{type(conn).__qualname__}"
