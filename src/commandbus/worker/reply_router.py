"""ProcessReplyRouter: a worker that does nothing but move processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict, Unpack

from psycopg_pool import ConnectionPool

from commandbus.model.retry import RetryPolicy
from commandbus.processes.manager import BaseProcessManager
from commandbus.settings import Settings
from commandbus.worker.execution.handlers import HandlerRegistry
from commandbus.worker.worker import Worker
from commandbus.worker.worker_options import Supervision


class WorkerOptions(TypedDict, total=False):
    """The options of a `Worker`, each by its name."""

    domains: Sequence[str] | None
    concurrency: int | None
    database_url: str | None
    settings: Settings | None
    retry_policy: RetryPolicy | None
    pool: ConnectionPool[Any] | None
    name: str | None
    supervision: Supervision | None


class ProcessReplyRouter(Worker):
    """Handles the messages of processes: give it their managers.

    Everything else is as with `Worker`: it has connections of its own, runs inside an application or under a
    supervisor, and stops in order. A worker whose registry has processes moves them, too.
    """

    def __init__(self, managers: Iterable[BaseProcessManager[Any]], **options: Unpack[WorkerOptions]) -> None:
        registry = HandlerRegistry()
        for manager in managers:
            registry.register_process(manager)
        super().__init__(registry, **options)
