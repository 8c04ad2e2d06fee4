"""Parts: a running worker's insides, put together and taken apart. What flows between them goes through here.

The claimer asks for room and delivers rows; lanes run them and hand the outcome to the settler; what is held is
known in one set, which the monitor reads.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from psycopg_pool import ConnectionPool

from commandbus.db.link import Link
from commandbus.flow.register import WorkerIdentity
from commandbus.model.retry import RetryPolicy
from commandbus.runtime.attempt import Attempt
from commandbus.runtime.claimer import Claimer
from commandbus.runtime.connections import HandlerConnections
from commandbus.runtime.context import Services
from commandbus.runtime.execute import Executor
from commandbus.runtime.handlers import HandlerRegistry
from commandbus.runtime.loop import AsyncSlots
from commandbus.runtime.monitor import Figures, Monitor
from commandbus.runtime.places import Places
from commandbus.runtime.settler import Settler
from commandbus.runtime.slots import Slots
from commandbus.settings import Settings

SETTLE_RESERVE_SECONDS = 2.0
STALE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is to do, and whom to tell when it must end."""

    id: str
    domains: Sequence[str]
    handlers: HandlerRegistry
    policy: RetryPolicy
    pool: ConnectionPool[Any] | None
    ends_idle: bool
    fail: Callable[[BaseException], None]
    request_stop: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StopReport:
    """How a worker's life ended. `abandoned` attempts were still running, `unwritten` outcomes were lost sight of:
    their commands are tried again when their leases run out."""

    reason: str
    settled: int
    given_back: int
    abandoned: int
    unwritten: int

    @property
    def is_clean(self) -> bool:
        """Nothing was left behind."""
        return self.abandoned == 0 and self.unwritten == 0


class Parts:
    """The running insides of a worker."""

    def __init__(self, spec: WorkerSpec, settings: Settings) -> None:
        self._spec = spec
        self._settings = settings
        self._handlers = spec.handlers
        self.held: set[Attempt] = set()
        self._low = 0
        self._places = Places(settings.concurrency)
        self._connections = HandlerConnections(settings, size=settings.concurrency, lent=spec.pool)
        services = Services(
            worker=spec.id,
            connections=self._connections,
            pool_timeout=settings.pool_timeout,
            max_payload_bytes=settings.max_payload_bytes,
            default_max_attempts=spec.policy.max_attempts,
            extend=self._extend,
            extend_timeout=settings.visibility_timeout,
        )
        self._executor = Executor(services, spec.policy)
        link = Link(settings, name=f"{spec.id} settler")
        on_settled = self._settled_towards_idle if spec.ends_idle else self.held.discard
        self.settler = Settler(
            link,
            spec.id,
            on_settled=on_settled,
            # An idle claimer looked at what is due before this retry was: it must look again.
            on_again=self._look_again,
            on_error=spec.fail,
            name=spec.id,
        )
        self._slots = Slots(self._places, self._run, name=spec.id)
        self._loop: AsyncSlots | None = None
        if any(handler.is_async for handler in spec.handlers):
            self._loop = AsyncSlots(self._places, self._run_async, name=spec.id)
            self._slots.share_with_others()
            self._loop.share_with_others()
        self._claimer = Claimer(
            settings,
            spec.id,
            spec.domains,
            room=self._room,
            finished=self._finished,
            deliver=self._deliver,
            on_idle=self._check_idle,
            on_error=spec.fail,
            name=spec.id,
        )
        self._monitor = Monitor(
            settings,
            _identity(spec, settings),
            held=self.held.copy,
            figures=Figures(lambda: self._places.taken, lambda: dict(self.settler.settled)),
            on_limit=spec.request_stop,
            name=spec.id,
        )

    def start(self) -> None:
        """Start all threads."""
        self._slots.start()
        if self._loop is not None:
            self._loop.start()
        self.settler.start()
        self._monitor.start()
        self._claimer.start()

    def stop(self, limit: float, reason: str, *, hurry: Callable[[], bool]) -> StopReport:
        """Take everything apart in order, within the limit; `hurry` says not to wait for what runs."""
        deadline = time.monotonic() + limit
        self._monitor.state = "STOPPING"
        self._claimer.stop(max(0.1, limit - SETTLE_RESERVE_SECONDS))
        back = self._slots.take_back() + (self._loop.take_back() if self._loop is not None else [])
        for attempt in back:
            self.settler.add(attempt, attempt.give_back())
        self._drain(deadline - min(SETTLE_RESERVE_SECONDS, limit / 2), hurry)
        abandoned = self._places.taken
        self.settler.close(max(0.1, deadline - time.monotonic() - 0.5))
        unwritten = max(0, len(self.held) - abandoned)
        self._slots.stop()
        if self._loop is not None:
            self._loop.stop(max(0.1, deadline - time.monotonic() - 0.2))
        self._monitor.stop(max(0.1, deadline - time.monotonic()))
        self._connections.close()
        settled = sum(self.settler.settled.values()) - len(back)
        return StopReport(reason, settled, len(back), abandoned, unwritten)

    def _drain(self, until: float, hurry: Callable[[], bool]) -> None:
        """Wait until no attempt runs. The last slot to finish says so; the poll is for a hurried stop."""
        while self._places.taken and time.monotonic() < until and not hurry():
            self._places.wait_until_free(min(0.1, max(0.001, until - time.monotonic())))

    def _look_again(self) -> None:
        self._claimer.wake()

    def _extend(self, attempt: Attempt, seconds: float) -> Future[bool]:
        return self._monitor.extend(attempt, seconds)

    def _check_idle(self) -> None:
        if self._spec.ends_idle and not self.held:
            self._spec.request_stop("nothing is left that could run now")

    def _settled_towards_idle(self, attempt: Attempt) -> None:
        self.held.discard(attempt)
        if not self.held:
            self._claimer.wake()

    # --- called by the claimer ----------------------------------------------------------------------------

    def _room(self, prefetch: int) -> int:
        """How many attempts to claim now; nothing while more than half of what is prefetched still waits."""
        waiting = len(self._slots.waiting) + (len(self._loop.waiting) if self._loop is not None else 0)
        self._low = prefetch // 2
        if waiting > self._low:
            self._return_stale()
            return 0
        return self._places.total - self._places.taken + prefetch - waiting

    def _return_stale(self) -> None:
        """What was prefetched should have started long ago: handlers have become slow, and another worker may
        be idle."""
        stale_before = time.monotonic() - STALE_SECONDS
        for lane in (self._slots, self._loop):
            if lane is not None and lane.waiting and lane.waiting[0].renewed_at < stale_before:
                for attempt in lane.take_back():
                    self.settler.add(attempt, attempt.give_back())

    def _finished(self) -> int:
        return self._slots.finished + (self._loop.finished if self._loop is not None else 0)

    def _deliver(self, domain: str, rows: Iterable[tuple[Any, ...]], claimed_at: float) -> None:
        sync: list[Attempt] = []
        asynchronous: list[Attempt] = []
        get = self._handlers.get
        for row in rows:
            handler = get(domain, row[4])
            attempt = Attempt(domain, row, handler, claimed_at)
            self.held.add(attempt)
            if attempt.charge > 1 and self._executor.is_exhausted(attempt):
                self.settler.add(attempt, self._executor.exhaust(attempt))
            elif handler is not None and handler.is_async:
                asynchronous.append(attempt)
            else:
                sync.append(attempt)
        if sync:
            self._slots.push(sync)
        if asynchronous and self._loop is not None:
            self._loop.push(asynchronous)

    # --- called by the lanes ------------------------------------------------------------------------------

    def _run(self, attempt: Attempt) -> None:
        self.settler.add(attempt, self._executor.run(attempt))
        if self._claimer.is_waiting_for_room:
            self._offer_room()

    async def _run_async(self, attempt: Attempt) -> None:
        self.settler.add(attempt, await self._executor.run_async(attempt))
        if self._claimer.is_waiting_for_room:
            self._offer_room()

    def _offer_room(self) -> None:
        waiting = len(self._slots.waiting) + (len(self._loop.waiting) if self._loop is not None else 0)
        if waiting <= self._low:
            self._claimer.is_waiting_for_room = False
            self._claimer.wake()


def _identity(spec: WorkerSpec, settings: Settings) -> WorkerIdentity:
    try:
        release = version("commandbus")
    except PackageNotFoundError:
        release = "unknown"
    return WorkerIdentity(spec.id, socket.gethostname(), os.getpid(), spec.domains, settings.concurrency, release)
