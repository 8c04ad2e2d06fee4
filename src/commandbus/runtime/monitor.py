"""The Monitor: leases, the heartbeat in the registry, the process's own limits, and retention in the background.

It ticks four times a second on a thread and a connection of its own, and never runs user code. A lease is renewed
when a third of it has passed, counted from when it was last *asked for*. One that was lost is marked, and said.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

import psycopg

from commandbus.db.link import Link
from commandbus.errors import CommandBusError
from commandbus.flow.prune import Retention, prune_all
from commandbus.flow.register import WorkerIdentity, beat
from commandbus.flow.renew import renew
from commandbus.model.timeouts import MONITOR_TICK
from commandbus.runtime.attempt import Attempt
from commandbus.settings import Settings

logger = logging.getLogger("commandbus.worker")

BEAT_SECONDS = 3.0
PRUNE_SECONDS = 60.0
PRUNE_PAUSE_SECONDS = 0.02


class Figures:
    """What a heartbeat reports."""

    def __init__(self, running: Callable[[], int], settled: Callable[[], dict[str, int]]) -> None:
        self.running = running
        self.settled = settled


class Monitor:
    """One thread that looks after what the others hold."""

    def __init__(
        self,
        settings: Settings,
        identity: WorkerIdentity,
        *,
        held: Callable[[], Iterable[Attempt]],
        figures: Figures,
        on_limit: Callable[[str], None],
        name: str,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._held = held
        self._figures = figures
        self._on_limit = on_limit
        self._link = Link(settings, name=f"{name} monitor")
        self._stopping = threading.Event()
        self.state = "ACTIVE"
        self._beat_at = 0.0
        self._pruned_at = time.monotonic() - random.random() * PRUNE_SECONDS  # noqa: S311 - workers spread out
        self._last: dict[str, int] = {}
        self._last_at = time.monotonic()
        self._limit_said = False
        self.first_beat = threading.Event()
        self._wake = threading.Event()
        self._extensions: SimpleQueue[tuple[Attempt, float, Future[bool]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"{name}-monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Say good-bye in the registry and end."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout)

    def extend(self, attempt: Attempt, seconds: float) -> Future[bool]:
        """Extend an attempt's lease; the answer is False if it is lost. Called by handlers' contexts."""
        answer: Future[bool] = Future()
        self._extensions.put((attempt, seconds, answer))
        self._wake.set()
        return answer

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if self.first_beat.is_set():
                self._wake.wait(MONITOR_TICK)
                self._wake.clear()
            try:
                self._tick()
            except psycopg.OperationalError as error:
                self._link.recover(self._stopping, error)
            except (psycopg.Error, CommandBusError):
                logger.exception("the monitor's tick failed")
                self._stopping.wait(BEAT_SECONDS)
        self._leave()

    def _tick(self) -> None:
        self._extend_asked()
        self._renew()
        now = time.monotonic()
        if now - self._beat_at >= BEAT_SECONDS:
            self._beat_at = now
            self._beat(self.state)
            self.first_beat.set()
        self._check_limits()
        if now - self._pruned_at >= PRUNE_SECONDS:
            self._pruned_at = now
            self._prune()

    def _renew(self) -> None:
        now = time.monotonic()
        due: dict[str, list[Attempt]] = {}
        interval = self._settings.timeouts.renewal_interval
        for attempt in self._held():
            if now - attempt.renewed_at >= interval and not attempt.is_lost:
                due.setdefault(attempt.domain, []).append(attempt)
        for domain, attempts in due.items():
            sent_at = time.monotonic()
            lost = self._link.run(
                renew(
                    domain,
                    self._identity.id,
                    [(attempt.msg_id, attempt.read_ct) for attempt in attempts],
                    lease_seconds=self._settings.visibility_timeout,
                )
            )
            gone = set(lost)
            for attempt in attempts:
                attempt.renewed_at = sent_at
                # Settled since it was listed: its row is gone because all is well.
                if (attempt.msg_id, attempt.read_ct) in gone and attempt in self._held():
                    attempt.is_lost = True
                    logger.warning(
                        "the lease of command %s (attempt %d) was lost",
                        attempt.command_id,
                        attempt.number,
                        extra={"domain": domain, "command_id": attempt.command_id},
                    )

    def _extend_asked(self) -> None:
        while not self._extensions.empty():
            attempt, seconds, answer = self._extensions.get()
            if not answer.set_running_or_notify_cancel():
                continue  # whoever asked was cancelled meanwhile
            try:
                held = [(attempt.msg_id, attempt.read_ct)]
                lost = self._link.run(renew(attempt.domain, self._identity.id, held, lease_seconds=seconds))
            except BaseException as error:
                answer.set_exception(error)
                raise
            attempt.is_lost = attempt.is_lost or bool(lost)
            answer.set_result(not lost)

    def _beat(self, state: str) -> None:
        now = time.monotonic()
        settled = self._figures.settled()
        elapsed = max(now - self._last_at, 1e-3)
        rates = {
            domain: round((count - self._last.get(domain, 0)) / elapsed, 3) for domain, count in settled.items()
        }
        self._last, self._last_at = dict(settled), now
        self._link.run(
            beat(
                self._identity,
                state=state,
                running=self._figures.running(),
                settled=sum(settled.values()),
                rates=rates,
            )
        )

    def _check_limits(self) -> None:
        """Recycle after so many messages or so much memory: the worker ends cleanly, to be started again."""
        if self._limit_said:
            return
        settled = sum(self._figures.settled().values())
        if self._settings.max_messages is not None and settled >= self._settings.max_messages:
            self._say_limit(f"{settled} messages were settled (max_messages {self._settings.max_messages})")
        elif self._settings.max_memory_mb is not None:
            used = resident_megabytes()
            if used > self._settings.max_memory_mb:
                self._say_limit(
                    f"{used:.0f} MB of memory are in use (max_memory_mb {self._settings.max_memory_mb})"
                )

    def _say_limit(self, reason: str) -> None:
        self._limit_said = True
        logger.info("this worker ends to be started again: %s", reason)
        self._on_limit(reason)

    def _prune(self) -> None:
        plan = prune_all(Retention(self._settings.retention_age, self._settings.retention_count))
        try:
            operation = next(plan)
            while not self._stopping.wait(PRUNE_PAUSE_SECONDS):
                operation = plan.send(self._link.run(operation))
                self._renew()
        except StopIteration as stop:
            if stop.value.commands:
                logger.info("retention: %d finished commands were forgotten", stop.value.commands)

    def _leave(self) -> None:
        try:
            self._beat("STOPPED")
        except psycopg.Error as error:
            logger.info("the registry could not be told of the stop: %s", error)
        self._link.close()


def resident_megabytes() -> float:
    """This process's resident memory."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    import os

    return pages * os.sysconf("SC_PAGE_SIZE") / 1048576
