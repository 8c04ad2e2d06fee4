"""KeyReleasing: starts a worker's KeyReleaser when a key limit exists. A worker without one pays nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from commandbus.clock import monotonic
from commandbus.db.service import DatabaseService
from commandbus.db.service_connection import LastingConnection
from commandbus.flow.commands.claimed_row import OPTIONS
from commandbus.flow.keys.exist import exist
from commandbus.settings import Settings
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.worker_options import WorkerSpec

if TYPE_CHECKING:
    from commandbus.worker.key_releaser import KeyReleaser

LISTENING_LOOK_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 3.0  # behind a pooler, where nobody can be notified


class KeyReleasing:
    """The key releaser of one worker, if it needs one. `services` is the list of the worker's own threads."""

    def __init__(self, spec: WorkerSpec, settings: Settings, services: list[DatabaseService]) -> None:
        self._spec = spec
        self._settings = settings
        self._services = services
        self._look_at = 0.0
        self._changing = threading.Lock()
        self._is_stopped = False
        self._releaser: KeyReleaser | None = None
        self._has_looked = False

    @property
    def is_busy(self) -> bool:
        """May a command become visible because its turn in its line comes?"""
        return not self._has_looked if self._releaser is None else self._releaser.is_busy

    def look_soon(self) -> None:
        """Somebody may have created a key limit. Called by the maintenance thread."""
        self._look_at = 0.0

    def look(self, connection: LastingConnection) -> None:
        """Start the releaser if a key limit exists. Called by the maintenance thread."""
        if self._releaser is not None or (now := monotonic()) < self._look_at:
            return
        self._look_at = now + (LISTENING_LOOK_SECONDS if self._settings.prepared_statements else LOOK_SECONDS)
        if connection.run(exist(self._spec.domains)):
            self._begin()
        self._has_looked = True

    def settled(self, attempts: Iterable[Attempt]) -> None:
        """Attempts were settled: their keys may have a free place. Called by any thread; never waits."""
        if self._releaser is None:
            return
        if self._spec.ends_idle:
            self._releaser.stir()  # a handler may have sent commands with keys
        from commandbus.flow.keys.release import LineKey

        for attempt in attempts:
            if attempt.row[OPTIONS] is None:
                continue
            options = attempt.options
            if options.key_limit is not None and options.key is not None:
                self._releaser.look_at(attempt.domain, LineKey(options.key_limit, options.key))

    def joined(self) -> None:
        """Claimed commands have joined lines. Called by the claimer."""
        if self._releaser is not None:
            self._releaser.stir()
            self._releaser.wake()

    def stop(self, timeout: float) -> None:
        """End the releaser, if there is one. The owner of the worker calls it."""
        with self._changing:
            self._is_stopped = True
        if self._releaser is not None:
            self._releaser.stop(timeout)

    def _begin(self) -> None:
        from commandbus.worker.key_releaser import KeyReleaser

        spec = self._spec
        with self._changing:
            if self._is_stopped or self._releaser is not None:
                return
            releaser = KeyReleaser(self._settings, spec.domains, on_error=spec.fail, name=spec.id)
            releaser.start()  # a RuntimeError if no thread is left; the next look tries again
            self._releaser = releaser
            self._services.append(releaser)
