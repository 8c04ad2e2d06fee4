"""The base of the parts of the data-access layer: each works through a bus, which may be made from a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg_pool import AsyncConnectionPool, ConnectionPool

from commandbus.bus.base import BusBase
from commandbus.lazy import lazy

if TYPE_CHECKING:
    from commandbus.bus import asynchronous as async_bus
    from commandbus.bus import sync as sync_bus
    from commandbus.bus.asynchronous import AsyncCommandBus
    from commandbus.bus.sync import CommandBus
else:
    async_bus = lazy("commandbus.bus.asynchronous")
    sync_bus = lazy("commandbus.bus.sync")


class Repository:
    """For sync code; made with a bus or with a psycopg ConnectionPool, which the caller must close."""

    __slots__ = ("_bus",)

    def __init__(self, source: CommandBus | ConnectionPool[Any]) -> None:
        self._bus = source if isinstance(source, BusBase) else sync_bus.CommandBus(pool=source)


class AsyncRepository:
    """For async code; made with a bus or with a psycopg AsyncConnectionPool, which the caller must close."""

    __slots__ = ("_bus",)

    def __init__(self, source: AsyncCommandBus | AsyncConnectionPool[Any]) -> None:
        self._bus = source if isinstance(source, BusBase) else async_bus.AsyncCommandBus(pool=source)
