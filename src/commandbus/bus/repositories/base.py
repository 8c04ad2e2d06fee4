"""What the parts of the data-access layer work through: a bus, which may be made of a pool."""

from __future__ import annotations

from typing import Any

from psycopg_pool import AsyncConnectionPool, ConnectionPool

from commandbus.bus.asynchronous import AsyncCommandBus
from commandbus.bus.sync import CommandBus


class Repository:
    """For sync code; made with a bus or with a psycopg ConnectionPool, which stays the caller's."""

    def __init__(self, source: CommandBus | ConnectionPool[Any]) -> None:
        self._bus = source if isinstance(source, CommandBus) else CommandBus(pool=source)


class AsyncRepository:
    """For async code; made with a bus or with a psycopg AsyncConnectionPool, which stays the caller's."""

    def __init__(self, source: AsyncCommandBus | AsyncConnectionPool[Any]) -> None:
        self._bus = source if isinstance(source, AsyncCommandBus) else AsyncCommandBus(pool=source)
