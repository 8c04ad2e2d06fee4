"""ProcessReplyRouter: a worker that does nothing but move processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from commandbus.processes.manager import BaseProcessManager
from commandbus.worker.execution.handlers import HandlerRegistry
from commandbus.worker.worker import Worker


class ProcessReplyRouter(Worker):
    """Handles the messages of processes: give it their managers.

    Everything else is as with `Worker`: it has connections of its own, runs inside an application or under a
    supervisor, and stops in order. A worker whose registry has processes moves them, too.
    """

    def __init__(self, managers: Iterable[BaseProcessManager[Any]], **options: Any) -> None:
        registry = HandlerRegistry()
        for manager in managers:
            registry.register_process(manager)
        super().__init__(registry, **options)
