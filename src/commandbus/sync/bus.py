"""SyncCommandBus(pool): the bus for sync code on the application's own pool."""

from __future__ import annotations

from typing import Any

from psycopg_pool import ConnectionPool

from commandbus.bus import CommandBus
from commandbus.settings import Settings


class SyncCommandBus(CommandBus):
    """`CommandBus` with the pool as its first argument; the pool stays the caller's."""

    def __init__(self, pool: ConnectionPool[Any], *, settings: Settings | None = None) -> None:
        super().__init__(pool=pool, settings=settings)
