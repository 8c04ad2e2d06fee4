"""WorkerWatchdog: watches a worker inside an application, where there is no supervisor.

    watchdog = WorkerWatchdog(worker, restart_callback=restart)
    watchdog.start()

It checks every `check_interval`. CRITICAL is logged with its counts and starts a recovery: the callback,
or `worker.stop()` if there is none. DEGRADED is logged as a warning. The loops that are watched write the
counters, so the watchdog does not rely on them alone: a worker whose ladder has not ticked for `heartbeat_timeout`
is critical ("frozen"), whatever its counters say.

Invariants: there is never more than one recovery at a time, and at least `cooldown` passes between the end
of one and the start of the next. A recovery runs on its own thread, so a callback that blocks or raises cannot end
the watch. A worker that is not running is left alone: it was stopped on purpose, or the recovery stopped it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from commandbus.clock import monotonic
from commandbus.logger import safe_logger
from commandbus.model.durations import Duration, format_seconds, parse_seconds
from commandbus.settings import Settings
from commandbus.worker.health import HealthState, HealthStatus

logger = safe_logger("commandbus.watchdog")

FROZEN = "frozen"
LOOK_AGAIN_SECONDS = 1.0
JOIN_SECONDS = 5.0


class Watched(Protocol):
    """What a watchdog needs of a worker; `commandbus.Worker` has it."""

    @property
    def settings(self) -> Settings:
        """Its settings, for `heartbeat_timeout`."""

    @property
    def health_status(self) -> HealthStatus:
        """The health of its current run."""

    @property
    def beat_age(self) -> float | None:
        """Seconds since its ladder last ticked; None if it is not running."""

    @property
    def is_running(self) -> bool:
        """Has it been started, and not stopped?"""

    def stop(self) -> object:
        """Stop it; may take long, and may raise."""


class WorkerWatchdog:
    """Watches one worker on a daemon thread; see the module's text for what it promises."""

    def __init__(
        self,
        worker: Watched,
        check_interval: Duration = 10.0,
        restart_callback: Callable[[], object] | None = None,
        cooldown: Duration = 60.0,
    ) -> None:
        interval_seconds = parse_seconds(check_interval, name="check_interval")
        if not interval_seconds > 0:
            raise ValueError(f"check_interval is {check_interval!r}: it must be more than 0")
        if restart_callback is not None and not callable(restart_callback):
            raise TypeError(f"restart_callback is {restart_callback!r}: it must be callable, or None")
        self._worker = worker
        self._check_interval = interval_seconds
        self._restart_callback = restart_callback
        self._cooldown = parse_seconds(cooldown, name="cooldown")
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._recovery: threading.Thread | None = None
        self._recovery_began_at = 0.0
        self._recovered_at: float | None = None
        self._slow_said = False
        self._said = HealthState.HEALTHY

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        """Is its thread alive?"""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_recovering(self) -> bool:
        """Is a recovery under way?"""
        return self._recovery is not None and self._recovery.is_alive()

    def start(self) -> None:
        """Start to watch."""
        if self._thread is not None:
            raise RuntimeError("this watchdog has been started already")
        self._stopping.clear()
        self._thread = threading.Thread(target=self._watch, name="worker-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop to watch, and start no recovery any more; one under way goes on. Also for use by the callback."""
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)

    # --- the watch -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping.wait(self._check_interval):
            try:
                self._check()
            except Exception:
                logger.exception("the watchdog could not check its worker; it tries again")

    def _check(self) -> None:
        if not self._worker.is_running:
            self._said = HealthState.HEALTHY
            return
        status = self._worker.health_status
        self._look_for_frost(status)
        if self._stopping.is_set():
            return
        state = status.state
        if state is HealthState.CRITICAL:
            may_recover = self._may_recover()
            if may_recover or self._said is not state:
                self._say(logging.CRITICAL, status)
            if may_recover:
                self._recover()
            elif self.is_recovering:
                self._say_if_slow()
        elif self._said is not state:
            self._say(logging.WARNING if state is HealthState.DEGRADED else logging.INFO, status)
        self._said = state

    def _look_for_frost(self, status: HealthStatus) -> None:
        """A stale beat is looked at twice: after a SIGSTOP, the one who wakes first would find the other late."""
        limit = self._worker.settings.heartbeat_timeout
        age = self._worker.beat_age
        if age is not None and age > limit and not self._stopping.wait(LOOK_AGAIN_SECONDS):
            age = self._worker.beat_age
        if age is None or age <= limit:
            status.clear(FROZEN)
        else:
            status.set_critical(
                FROZEN,
                f"the worker is frozen: its ladder has not ticked for {format_seconds(round(age, 1))}, "
                f"more than heartbeat_timeout ({format_seconds(limit)})",
            )

    def _say(self, level: int, status: HealthStatus) -> None:
        figures = status.as_dict()
        logger.log(
            level,
            "worker is %s: %s (stuck_threads=%d, pool_exhaustions=%d, consecutive_failures=%d, last_success=%s)",
            str(figures["status"]).upper(),
            "; ".join(figures["reasons"]) or "the worker is healthy again",
            figures["stuck_threads"],
            figures["pool_exhaustions"],
            figures["consecutive_failures"],
            figures["last_success"],
        )

    # --- the recovery ----------------------------------------------------------------------------------------

    def _may_recover(self) -> bool:
        if self.is_recovering:
            return False
        return self._recovered_at is None or monotonic() - self._recovered_at >= self._cooldown

    def _say_if_slow(self) -> None:
        """Once for each recovery: a restart that hangs needs a person, and nothing else would tell."""
        lasted = monotonic() - self._recovery_began_at
        if not self._slow_said and lasted > max(self._cooldown, self._check_interval):
            self._slow_said = True
            logger.critical("the recovery of the worker has not ended after %s", format_seconds(round(lasted, 1)))

    def _recover(self) -> None:
        self._recovery_began_at = monotonic()
        self._slow_said = False
        self._recovery = threading.Thread(target=self._recover_once, name="worker-recovery", daemon=True)
        self._recovery.start()

    def _recover_once(self) -> None:
        callback = self._restart_callback
        what = "the restart callback" if callback is not None else "worker.stop()"
        logger.info("recovery of the worker begins: %s", what)
        try:
            if callback is not None:
                callback()
            else:
                self._worker.stop()
        except Exception:
            logger.exception(
                "recovery of the worker failed in %s; it is tried again after %s, if need be",
                what,
                format_seconds(self._cooldown),
            )
        except BaseException as error:  # noqa: BLE001 - SystemExit ends this thread and nothing else: say so
            logger.critical("recovery of the worker: %s raised %r, which ends nothing in a thread", what, error)
        else:
            logger.info("recovery of the worker is done: %s", what)
        finally:
            self._recovered_at = monotonic()
