"""SyncWorker(pool, domain, registry): a worker on the application's own pool, told as its specification says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from psycopg_pool import ConnectionPool

from commandbus.bus.call_listener import address_of
from commandbus.db.database_address import Database
from commandbus.errors import ConfigurationError
from commandbus.settings import Settings, load_settings
from commandbus.worker.execution.handlers import HandlerRegistry
from commandbus.worker.worker import Worker


class SyncWorker(Worker):
    """`Worker` for one domain. Handlers get their connections from `pool`; its own threads have a few beside it.

    `poll_interval` and `visibility_timeout` are seconds, `statement_timeout` milliseconds; it must be shorter than
    the visibility timeout. A handler waits for a connection as long as the pool's own `timeout` says, and never
    longer than its attempt may take. After `max_messages` commands the worker asks to be restarted: `run` returns.
    All else comes from the settings, as with `Worker`.
    """

    def __init__(
        self,
        pool: ConnectionPool[Any],
        domain: str,
        registry: HandlerRegistry,
        *,
        concurrency: int = 4,
        poll_interval: float = 1.0,
        visibility_timeout: float = 30,
        statement_timeout: int = 25000,
        max_messages: int | None = None,
    ) -> None:
        settings = worker_settings(
            pool,
            concurrency=concurrency,
            poll_interval=poll_interval,
            visibility_timeout=visibility_timeout,
            statement_timeout=statement_timeout,
            max_messages=max_messages,
        )
        super().__init__(registry, domains=[domain], settings=settings, pool=pool)


def worker_settings(
    pool: ConnectionPool[Any],
    *,
    concurrency: int,
    poll_interval: float,
    visibility_timeout: float,
    statement_timeout: int,
    max_messages: int | None,
) -> Settings:
    """The settings that these arguments mean; the database and the wait for a connection are the pool's."""
    if statement_timeout >= visibility_timeout * 1000:
        raise ConfigurationError(
            f"statement_timeout ({statement_timeout}ms) must be less than "
            f"visibility_timeout ({visibility_timeout}s = {visibility_timeout * 1000:g}ms)"
        )
    given = {
        "concurrency": concurrency,
        "poll_interval": poll_interval,
        "visibility_timeout": visibility_timeout,
        "statement_timeout": statement_timeout / 1000,
        "max_messages": max_messages,
        "pool_timeout": pool.timeout or None,
    }
    settings = replace(load_settings(given), database_url=None)
    return address_of(Database(settings), settings, pool)
