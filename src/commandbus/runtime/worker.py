"""Worker: one process with slots. It puts claimer, lanes, settler and monitor together, and takes them apart.

    worker = Worker(handlers, domains=["orders"], concurrency=8)
    worker.run()              # until SIGTERM, SIGINT or stop(); or start() … stop() inside an application

Stopping, in order: claim nothing more → give back what has not started → let what runs finish (until
`shutdown_timeout`) → write the last outcomes → say good-bye in the registry. What did not finish is reported; its
lease runs out and another worker takes it.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import FrameType, TracebackType
from typing import Any, Self

from psycopg_pool import ConnectionPool

from commandbus.db.drive import run
from commandbus.db.link import Link
from commandbus.db.resolve import Database
from commandbus.errors import ConfigurationError, SchemaError, UnknownDomainError
from commandbus.flow.domains import create_domain, list_domains
from commandbus.flow.migrate import look
from commandbus.flow.register import WorkerIdentity
from commandbus.model.names import check_domain
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
from commandbus.settings import Settings, load_settings

logger = logging.getLogger("commandbus.worker")

SETTLE_RESERVE_SECONDS = 2.0
STALE_SECONDS = 0.5


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


class Worker:
    """Runs the handlers of a registry for some domains (all that the registry has, by default)."""

    def __init__(
        self,
        handlers: HandlerRegistry,
        *,
        domains: Sequence[str] | None = None,
        concurrency: int | None = None,
        database_url: str | None = None,
        settings: Settings | None = None,
        retry_policy: RetryPolicy | None = None,
        pool: ConnectionPool[Any] | None = None,
        name: str | None = None,
    ) -> None:
        overrides = {"database_url": database_url, "concurrency": concurrency}
        if settings is None:
            settings = load_settings(overrides)
        elif database_url is not None or concurrency is not None:
            raise TypeError("give settings, or database_url and concurrency, not both")
        self.settings = settings
        self.domains = _check_domains(domains or settings.domains or handlers.domains, handlers)
        self.id = f"{name or socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._handlers = handlers
        self._policy = retry_policy or settings.retry_policy
        self._pool = pool
        self._database = Database(settings)
        self._stop_asked = threading.Event()
        self._stop_reason = "stop() was called"
        self._error: BaseException | None = None
        self._parts: _Parts | None = None
        self._signals = 0
        self._ends_idle = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        """Has it been started, and not stopped?"""
        return self._parts is not None

    @property
    def settled(self) -> int:
        """How many attempts this worker has settled."""
        return 0 if self._parts is None else sum(self._parts.settler.settled.values())

    def start(self) -> None:
        """Start the threads and return."""
        if self._parts is not None:
            raise RuntimeError("this worker has been started already")
        settings = self._database.resolve()
        try:
            self._check_database(settings)
        except BaseException:
            self._database.close()
            raise
        self._stop_asked.clear()
        self._error = None
        self._parts = _Parts(self, settings)
        self._parts.start()
        logger.info(
            "worker %s runs %d handlers for %s with %d slots",
            self.id,
            len(self._handlers),
            ", ".join(self.domains),
            settings.concurrency,
        )

    def request_stop(self, reason: str) -> None:
        """Ask `run` to end; safe from any thread and from a signal handler."""
        self._stop_reason = reason
        self._stop_asked.set()

    def stop(self, timeout: float | None = None) -> StopReport:
        """Stop in order, within `timeout` (default: shutdown_timeout); raises the error that ended it, if any."""
        if self._parts is None:
            raise RuntimeError("this worker is not running")
        self._stop_asked.set()
        parts, self._parts = self._parts, None
        limit = self.settings.shutdown_timeout if timeout is None else timeout
        report = parts.stop(limit, self._stop_reason, hurry=lambda: self._signals > 1)
        self._database.close()
        level = logging.INFO if report.is_clean else logging.WARNING
        logger.log(
            level,
            "worker %s stopped (%s): %d settled, %d given back, %d abandoned, %d outcomes unwritten",
            self.id,
            report.reason,
            report.settled,
            report.given_back,
            report.abandoned,
            report.unwritten,
        )
        if self._error is not None:
            raise self._error
        return report

    def run(self, *, until_idle: bool = False) -> StopReport:
        """Start, wait for SIGTERM, SIGINT, `request_stop` or a limit, and stop.

        `until_idle` also ends it when nothing is left that could run now: for scripts and tests.
        """
        restore = self._catch_signals()
        try:
            self._ends_idle = until_idle
            self.start()
            self._stop_asked.wait()
            return self.stop()
        finally:
            restore()

    def fail(self, error: BaseException) -> None:
        """Something of ours broke: the worker ends, and `stop` raises it."""
        self._error = error
        logger.error("worker %s ends: %s", self.id, error)
        self.request_stop(f"error: {error}")

    def _catch_signals(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        def caught(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
            self._signals += 1
            self.request_stop(signal.Signals(number).name)

        before = {number: signal.signal(number, caught) for number in (signal.SIGTERM, signal.SIGINT)}

        def restore() -> None:
            for number, previous in before.items():
                signal.signal(number, previous)

        return restore

    def _check_database(self, settings: Settings) -> None:
        """The schema is there and current, and every domain has its queue (created, if this role may)."""
        link = Link(settings, name="worker start")
        try:
            state = run(link.conn, look())
            if state.missing:
                raise SchemaError(
                    f"the schema lacks migration {state.missing[0]}; run `commandbus migrate` before the worker"
                )
            known = {domain.name for domain in run(link.conn, list_domains())}
            for domain in self.domains:
                if domain not in known:
                    try:
                        run(link.conn, create_domain(domain))
                    except SchemaError as error:
                        raise UnknownDomainError(domain) from error
        finally:
            link.close()


class _Parts:
    """The running insides of a worker."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self._worker = worker
        self._settings = settings
        self._handlers = worker._handlers
        self.held: set[Attempt] = set()
        self._low = 0
        self._places = Places(settings.concurrency)
        self._connections = HandlerConnections(settings, size=settings.concurrency, lent=worker._pool)
        services = Services(
            worker=worker.id,
            connections=self._connections,
            pool_timeout=settings.pool_timeout,
            max_payload_bytes=settings.max_payload_bytes,
            default_max_attempts=worker._policy.max_attempts,
            extend=self._extend,
            extend_timeout=settings.visibility_timeout,
        )
        self._executor = Executor(services, worker._policy)
        link = Link(settings, name=f"{worker.id} settler")
        on_settled = self._settled_towards_idle if worker._ends_idle else self.held.discard
        self.settler = Settler(
            link,
            worker.id,
            on_settled=on_settled,
            # An idle claimer looked at what is due before this retry was: it must look again.
            on_again=self._look_again,
            name=worker.id,
        )
        self._slots = Slots(self._places, self._run, name=worker.id)
        self._loop: AsyncSlots | None = None
        if any(handler.is_async for handler in worker._handlers):
            self._loop = AsyncSlots(self._places, self._run_async, name=worker.id)
            self._slots.share_with_others()
            self._loop.share_with_others()
        self._claimer = Claimer(
            settings,
            worker.id,
            worker.domains,
            room=self._room,
            finished=self._finished,
            deliver=self._deliver,
            on_idle=self._check_idle,
            on_error=worker.fail,
            name=worker.id,
        )
        self._monitor = Monitor(
            settings,
            _identity(worker, settings),
            held=self.held.copy,
            figures=Figures(lambda: self._places.taken, lambda: dict(self.settler.settled)),
            on_limit=worker.request_stop,
            name=worker.id,
        )

    def start(self) -> None:
        self._slots.start()
        if self._loop is not None:
            self._loop.start()
        self.settler.start()
        self._monitor.start()
        self._claimer.start()

    def stop(self, limit: float, reason: str, *, hurry: Any) -> StopReport:
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

    def _drain(self, until: float, hurry: Any) -> None:
        """Wait until no attempt runs. The last slot to finish says so; the poll is for a hurried stop."""
        while self._places.taken and time.monotonic() < until and not hurry():
            self._places.wait_until_free(min(0.1, max(0.001, until - time.monotonic())))

    def _look_again(self) -> None:
        self._claimer.wake()

    def _extend(self, attempt: Attempt, seconds: float) -> Future[bool]:
        return self._monitor.extend(attempt, seconds)

    def _check_idle(self) -> None:
        if self._worker._ends_idle and not self.held:
            self._worker.request_stop("nothing is left that could run now")

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


def _identity(worker: Worker, settings: Settings) -> WorkerIdentity:
    try:
        release = version("commandbus")
    except PackageNotFoundError:
        release = "unknown"
    return WorkerIdentity(
        worker.id, socket.gethostname(), os.getpid(), worker.domains, settings.concurrency, release
    )


def _check_domains(domains: Iterable[str], handlers: HandlerRegistry) -> list[str]:
    if isinstance(domains, str):
        raise ConfigurationError(f"domains must be a list of names, not the text {domains!r}")
    found = sorted({check_domain(domain) for domain in domains})
    if not found:
        raise ConfigurationError(
            "this worker has no domain: its registry has no handlers; register some, or name domains"
        )
    if silent := [domain for domain in found if domain not in handlers.domains]:
        logger.warning(
            "no handler is registered for domain %s: its commands will go to the troubleshooting queue",
            ", ".join(silent),
        )
    return found
