"""ServiceWatch: health names what does not work in a worker. The ladder's thread calls it at each tick. A thread
that asks for the health calls `troubles`, because the ladder may have stopped, too.

A supervised worker with a part that will not work again drains, so that its supervisor replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commandbus.db.service import DatabaseService
from commandbus.settings import Settings
from commandbus.worker.board import State
from commandbus.worker.claim_pause import ClaimPause
from commandbus.worker.claimer import Claimer
from commandbus.worker.dispatcher import Dispatcher
from commandbus.worker.isolation.quarantine import Quarantine
from commandbus.worker.limits import LIMITS_DEGRADED, LimitedWork
from commandbus.worker.settler import Settler
from commandbus.worker.worker_options import WorkerSpec

UNREACHABLE = "database_unreachable"
UNWRITTEN = "outcomes_unwritten"
CLAIMLESS = "claims"
CLAIMLESS_SECONDS = 10.0
BEHIND_SECONDS = 2.0
"""The settler may be behind for so long. For a moment it often is: when a disk is slow to flush."""
NAMED_SECONDS = 2.0
"""A part that does not recover is named for so long before its worker is replaced: a supervisor whose workers are
idle looks at them about once a second, and who asks it for their health must be told the reason."""


class ServiceWatch:
    """Looks at the threads of one worker that have a connection."""

    def __init__(
        self,
        spec: WorkerSpec,
        settings: Settings,
        services: Sequence[DatabaseService],
        *,
        claimer: Claimer,
        settler: Settler,
        dispatcher: Dispatcher,
        limited: LimitedWork,
        quarantine: Quarantine,
        pause: ClaimPause,
        drain: Callable[[str], None],
    ) -> None:
        self._health = spec.health
        self._is_supervised = spec.supervision is not None
        self._patience = settings.pool_reconnect_timeout
        self._own = services
        self._claimer = claimer
        self._settler = settler
        self._dispatcher = dispatcher
        self._limited = limited
        self._quarantine = quarantine
        self._pause = pause
        self._drain = drain
        self._was_unreachable = False
        self._was_degraded = False
        self._named_at: dict[str, float] = {}  # since when a part is in trouble
        self._behind_since: float | None = None

    @property
    def is_database_lost(self) -> bool:
        """Is the database out of reach at this moment?"""
        return any(service.is_down for service in self._own)

    @property
    def claimless_seconds(self) -> float:
        """For how long there has been room, and nothing could be claimed."""
        is_claiming = self._dispatcher.state is State.ACTIVE and not self._pause.is_on
        return self._claimer.claimless_seconds if is_claiming else 0.0

    def troubles(self) -> dict[str, str]:
        """The services that do not work, by name, with a sentence each. Any thread may ask."""
        services = [*self._own, *self._limited.services]
        return {_name(service): text for service in services if (text := service.trouble) is not None}

    def look(self, now: float) -> None:
        """Tell health what does not work, and what works again."""
        services = [*self._own, *self._limited.services]
        for service in services:
            self._look_at(service, now)
        self._look_at_claims()
        self._look_at_outcomes(now)
        if self._quarantine.is_turn_lost or any(service.descriptors_lost for service in services):
            # Each part recovers by itself, but open files of this process and of handlers' libraries do not.
            self._be_replaced("a handler has closed descriptors that are not its own")
        self._look_at_database(now)
        self._look_at_limits()

    def _look_at(self, service: DatabaseService, now: float) -> None:
        trouble, reason = service.trouble, _name(service)
        if trouble is not None:
            self._health.set_critical(reason, trouble)
            named_for = now - self._named_at.setdefault(reason, now)
            if service.is_broken and (service.ended is not None or named_for >= NAMED_SECONDS):
                self._be_replaced(trouble)
            return
        self._named_at.pop(reason, None)
        if service.is_away:
            self._health.set_degraded(reason, f"the {service.part} cannot reach the database")
        else:
            self._health.clear(reason)

    def _be_replaced(self, reason: str) -> None:
        if self._is_supervised and self._dispatcher.state is State.ACTIVE:
            self._drain(reason)

    def _look_at_claims(self) -> None:
        """A worker that has room but asks for nothing does not work, whatever the reason is."""
        if (seconds := self.claimless_seconds) >= CLAIMLESS_SECONDS and not self._claimer.is_down:
            text = f"slots are free, but nothing could be claimed for {seconds:.0f} s"
            self._health.set_critical(CLAIMLESS, text)
        else:
            self._health.clear(CLAIMLESS)

    def _look_at_outcomes(self, now: float) -> None:
        if not self._dispatcher.is_behind:
            self._behind_since = None
            self._health.clear(UNWRITTEN)
            return
        if self._behind_since is None:
            self._behind_since = now
        if now - self._behind_since >= BEHIND_SECONDS:
            text = f"{self._settler.backlog} outcomes are not written yet: nothing is claimed"
            self._health.set_critical(UNWRITTEN, text)

    def _look_at_database(self, now: float) -> None:
        down = [service.down_since for service in self._own if service.down_since is not None]
        if down and now - min(down) >= self._patience:
            self._health.set_critical(UNREACHABLE)
            self._was_unreachable = True
        elif self._was_unreachable and not down:
            self._health.clear(UNREACHABLE)
            self._was_unreachable = False

    def _look_at_limits(self) -> None:
        is_degraded = self._limited.is_degraded
        if is_degraded != self._was_degraded:
            self._was_degraded = is_degraded
            if is_degraded:
                self._health.set_degraded(LIMITS_DEGRADED, self._limited.trouble)
            else:
                self._health.clear(LIMITS_DEGRADED)


def _name(service: DatabaseService) -> str:
    return service.part.replace(" ", "_")
