"""What the web application and the worker process are made of: native sync parts on one pool for each process."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from handlers import DOMAIN, registry
from psycopg_pool import ConnectionPool

from commandbus.sync import SyncCommandBus, SyncWorker, WorkerWatchdog, create_pool

CONCURRENCY = 4


@cache
def get_pool() -> ConnectionPool[Any]:
    """This process's pool: min_size=max(4, concurrency), checked connections, reconnect_timeout=300."""
    return create_pool(os.environ["COMMANDBUS_DATABASE_URL"], concurrency=CONCURRENCY)


@cache
def get_bus() -> SyncCommandBus:
    """The bus on that pool."""
    return SyncCommandBus(get_pool())


@cache
def get_worker() -> SyncWorker:
    """The worker on that pool."""
    return SyncWorker(get_pool(), DOMAIN, registry, concurrency=CONCURRENCY)


@cache
def get_watchdog() -> WorkerWatchdog:
    """It stops a worker that is CRITICAL, so that a service manager starts a fresh process."""
    return WorkerWatchdog(get_worker())
