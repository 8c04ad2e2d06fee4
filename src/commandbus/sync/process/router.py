"""SyncProcessReplyRouter(pool, managers): a worker that does nothing but move processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from psycopg_pool import ConnectionPool

from commandbus.processes.manager import BaseProcessManager
from commandbus.sync.worker import worker_settings
from commandbus.worker.reply_router import ProcessReplyRouter


class SyncProcessReplyRouter(ProcessReplyRouter):
    """`ProcessReplyRouter` on the application's own pool, with the arguments of `SyncWorker`."""

    def __init__(
        self,
        pool: ConnectionPool[Any],
        managers: Iterable[BaseProcessManager[Any]],
        *,
        concurrency: int = 4,
        poll_interval: float = 1.0,
        visibility_timeout: float = 30,
        statement_timeout: int = 25000,
    ) -> None:
        settings = worker_settings(
            pool,
            concurrency=concurrency,
            poll_interval=poll_interval,
            visibility_timeout=visibility_timeout,
            statement_timeout=statement_timeout,
            max_messages=None,
        )
        super().__init__(managers, settings=settings, pool=pool)
