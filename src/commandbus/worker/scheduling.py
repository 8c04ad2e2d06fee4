"""Scheduling: whether a worker needs a Scheduler. It has none, and loads nothing of it, until a domain of its has
a schedule.

The worker's own code may declare one. Otherwise the maintenance thread finds out: it is notified when somebody
creates one, and looks now and then.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from commandbus.clock import monotonic
from commandbus.db.service import DatabaseService
from commandbus.db.service_connection import LastingConnection
from commandbus.flow.schedules.exist import exist
from commandbus.settings import Settings
from commandbus.worker.worker_options import WorkerSpec

if TYPE_CHECKING:
    from commandbus.worker.scheduler import Scheduler

LISTENING_LOOK_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 3.0  # behind a pooler, where nobody can be notified


class Scheduling:
    """The scheduler of one worker, if it needs one. `services` is the list of the worker's own threads."""

    def __init__(self, spec: WorkerSpec, settings: Settings, services: list[DatabaseService]) -> None:
        self._spec = spec
        self._settings = settings
        self._services = services
        self._look_at = 0.0
        self._changing = threading.Lock()
        self._is_stopped = False
        self._scheduler: Scheduler | None = None

    def start(self) -> None:
        """Start the scheduler if this worker's code declares schedules. The owner of the worker calls it."""
        if self._spec.handlers.schedules_of(self._spec.domains):
            self._begin()

    def look_soon(self) -> None:
        """Somebody may have created a schedule. Called by the maintenance thread."""
        self._look_at = 0.0

    def look(self, connection: LastingConnection) -> None:
        """Start the scheduler if a schedule exists. Called by the maintenance thread."""
        if self._scheduler is not None or (now := monotonic()) < self._look_at:
            return
        pause = LISTENING_LOOK_SECONDS if self._settings.prepared_statements else LOOK_SECONDS
        self._look_at = now + pause
        if connection.run(exist(self._spec.domains)):
            self._begin()

    def stop(self, timeout: float) -> None:
        """End the scheduler, if there is one. The owner of the worker calls it."""
        with self._changing:
            self._is_stopped = True
        if self._scheduler is not None:
            self._scheduler.stop(timeout)

    def _begin(self) -> None:
        from commandbus.worker.scheduler import Scheduler

        spec = self._spec
        with self._changing:
            if self._is_stopped or self._scheduler is not None:
                return
            declared = spec.handlers.schedules_of(spec.domains)
            scheduler = Scheduler(self._settings, spec.domains, declared, on_error=spec.fail, name=spec.id)
            scheduler.start()  # a RuntimeError if no thread is left; the next look tries again
            self._scheduler = scheduler
            self._services.append(scheduler)
