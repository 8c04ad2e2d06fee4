"""ServiceOnDemand: a thread that most workers do not need. A worker has none, and loads nothing of it, until a
domain of its needs one. The maintenance thread finds out: it is notified when that may be, and looks now and then.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Final, Generic, TypeVar

from commandbus.clock import monotonic
from commandbus.db.service import DatabaseService
from commandbus.db.service_connection import LastingConnection
from commandbus.flow.operation import Operation
from commandbus.settings import Settings
from commandbus.worker.worker_options import WorkerSpec

LISTENING_LOOK_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 3.0  # behind a pooler, where nobody can be notified
S = TypeVar("S", bound=DatabaseService)


class ServiceOnDemand(ABC, Generic[S]):
    """The service of one worker, if it needs it. `services` is the list of the worker's own threads."""

    def __init__(self, spec: WorkerSpec, settings: Settings, services: list[DatabaseService]) -> None:
        self.service: S | None = None
        self._spec = spec
        self._settings = settings
        self._services = services
        self._look_at = 0.0
        self._asked = 0  # how often somebody found out that it may be needed
        self._looked_after = -1  # how often that was before the last look
        self._changing = threading.Lock()
        self._is_stopped = False

    @abstractmethod
    def _is_needed(self) -> Operation[bool]:
        """Does one of the worker's domains need it?"""

    @abstractmethod
    def _make(self) -> S:
        """The service, not started."""

    @property
    def has_looked(self) -> bool:
        """Has the maintenance thread looked since somebody last found out that the service may be needed?"""
        return self._looked_after == self._asked

    def look_soon(self) -> None:
        """It may be needed now. Called by the maintenance thread."""
        self._look_at = 0.0

    def look(self, connection: LastingConnection) -> None:
        """Start it if it is needed. Called by the maintenance thread."""
        if self.service is not None or (now := monotonic()) < self._look_at:
            return
        self._look_at = now + (LISTENING_LOOK_SECONDS if self._settings.prepared_statements else LOOK_SECONDS)
        asked = self._asked
        if connection.run(self._is_needed()):
            self._begin()
        self._looked_after = asked

    def stop(self, timeout: float) -> None:
        """End it, if there is one. The owner of the worker calls it."""
        with self._changing:
            self._is_stopped = True
        if self.service is not None:
            self.service.stop(timeout)

    def _begin(self) -> None:
        with self._changing:
            if self._is_stopped or self.service is not None:
                return
            service = self._make()
            service.start()  # a RuntimeError if no thread is left; the next look tries again
            self.service = service
            self._services.append(service)
