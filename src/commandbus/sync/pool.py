"""create_pool: a psycopg pool with the specification's parameters, which tells a worker's health of an outage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psycopg import Connection
from psycopg_pool import ConnectionPool

from commandbus.db.pool import lasting_conninfo
from commandbus.logger import safe_logger
from commandbus.worker.health import HealthStatus

logger = safe_logger("commandbus.worker")

UNREACHABLE = "database_unreachable"
LEAST_CONNECTIONS = 4

check_connection = ConnectionPool.check_connection


def create_pool(
    conninfo: str,
    *,
    concurrency: int | None = None,
    min_size: int | None = None,
    max_size: int | None = None,
    timeout: float = 30.0,
    max_lifetime: float = 3600.0,
    max_idle: float = 600.0,
    num_workers: int = 3,
    check: Callable[[Connection[Any]], None] | None = check_connection,
    reconnect_timeout: float = 300.0,
    reconnect_failed: Callable[[ConnectionPool[Any]], None] | None = None,
    health_status: HealthStatus | None = None,
    **more: Any,
) -> ConnectionPool[Any]:
    """An open pool: 4 connections that are always there, 16 at most; with `concurrency` max(4, concurrency), and
    twice as many. Whatever else psycopg's ConnectionPool takes is passed on.

    `check` asks the server before a connection is handed out, which costs a round trip. With `health_status` a
    database that could not be reached for `reconnect_timeout` makes that CRITICAL, and the next connection that
    works clears it; `reconnect_failed` is called as well.
    """
    least = max(LEAST_CONNECTIONS, concurrency or 0) if min_size is None else min_size
    most = (16 if concurrency is None else 2 * least) if max_size is None else max_size

    def checked(conn: Connection[Any]) -> None:
        if check is not None:
            check(conn)
        if health_status is not None:
            health_status.clear(UNREACHABLE)

    def failed(pool: ConnectionPool[Any]) -> None:
        logger.critical("the database could not be reached for %g seconds", pool.reconnect_timeout)
        if health_status is not None:
            health_status.set_critical(UNREACHABLE)
        if reconnect_failed is not None:
            reconnect_failed(pool)

    options: dict[str, Any] = {
        "min_size": least,
        "max_size": max(most, least),
        "timeout": timeout,
        "max_lifetime": max_lifetime,
        "max_idle": max_idle,
        "num_workers": num_workers,
        "reconnect_timeout": reconnect_timeout,
        "reconnect_failed": failed,
        "open": True,
    }
    is_checked = check is not None or health_status is not None
    return ConnectionPool(lasting_conninfo(conninfo), check=checked if is_checked else None, **options | more)
