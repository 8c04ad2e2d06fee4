"""Crew: the worker processes of a supervisor. Births, deaths and what lies between, but not when it all ends.

A worker serves, or drains, or is condemned; only those that serve count, so whoever drains or is to be killed has
its replacement started at once (after crashes in a row: within the budget). A generation is those that were
started with the same settings: a reload brings up the next one beside the old one, which drains when the new one
is complete, and stays if that cannot be.
"""

from __future__ import annotations

import logging
import selectors
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from commandbus.model.postmortem import Cause, Death
from commandbus.runtime.board import State
from commandbus.settings import Settings
from commandbus.supervisor.budget import EARLY_SECONDS, RestartBudget
from commandbus.supervisor.process import Failed, WorkerProcess
from commandbus.supervisor.spawn import spawn
from commandbus.supervisor.vitals import resident_mb

logger = logging.getLogger("commandbus.supervisor")

SILENT_SECONDS: Final = 0.6
MEMORY_SECONDS: Final = 1.0
MEMORY_FACTOR: Final = 2
START_SECONDS: Final = 300.0
EXIT_SECONDS: Final = 3.0


class Crew:
    """Living workers, and counters that outlive them. `on_death` gets what the dead may have left behind."""

    def __init__(
        self,
        settings: Settings,
        supervisor: str,
        *,
        reserve_seconds: float,
        selector: selectors.BaseSelector,
        on_death: Callable[[WorkerProcess, Death], None],
    ) -> None:
        self.settings = settings
        self.workers: list[WorkerProcess] = []
        self.totals: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter()
        self.fatal: Failed | None = None
        self.is_ending = False
        self._supervisor = supervisor
        self._reserve = reserve_seconds
        self._selector = selector
        self._on_death = on_death
        self._budget = RestartBudget()
        self._was_ready = False
        self._generation = 0
        self._coming: tuple[int, Settings] | None = None

    @property
    def was_ready(self) -> bool:
        """Has any worker ever been?"""
        return self._was_ready

    @property
    def is_reloading(self) -> bool:
        """Does a new generation come up?"""
        return self._coming is not None

    # -- looking after them

    def look(self, now: float, *, blind_until: float) -> None:
        """Look at every worker. Silence before `blind_until` proves nothing: we were not looking."""
        for worker in list(self.workers):
            if worker.has_ended():
                self._bury(worker, now)
            else:
                self._look_at(worker, now, blind_until)
        if any(worker.ready_at is not None and now - worker.spawned_at > EARLY_SECONDS for worker in self.workers):
            self._budget.survived()

    def _look_at(self, worker: WorkerProcess, now: float, blind_until: float) -> None:
        was_ready = worker.ready_at is not None
        shown = worker.look(now)
        if worker.condemned is not None:
            if now >= worker.condemned.kill_at:
                worker.kill()
            return
        if worker.ready_at is None:
            if now - worker.spawned_at > START_SECONDS:
                worker.condemn(Cause.STOPPED, f"it was not ready after {START_SECONDS:g} s", now)
            return
        if not was_ready:
            self._was_ready = True
            logger.info("worker %s is ready (process %d)", worker.name, worker.pid)
        if worker.reported_at is not None:
            if now - worker.reported_at > EXIT_SECONDS:
                worker.condemn(Cause.STOPPED, f"it did not exit within {EXIT_SECONDS:g} s of its report", now)
            return
        limits = self.settings.timeouts
        seen_at = max(shown.beat_at, blind_until)
        kill_at = limits.kill_at(seen_at, [slot.stuck_at for slot in shown.slots])
        if worker.exits_since is not None:
            # It beats no more when it takes itself apart: its own limit for that counts, not the heartbeat's.
            if now > worker.exits_since + limits.shutdown_timeout:
                worker.condemn(Cause.STOPPED, f"it did not stop within {limits.shutdown_timeout:g} s", now)
            if kill_at >= seen_at + limits.heartbeat_timeout:
                return
        worker.watch_freeze(now, is_silent=now - seen_at > SILENT_SECONDS)
        if now >= kill_at:
            silent = now - shown.beat_at
            logger.error("worker %s has not beaten for %.1f s: it is killed", worker.name, silent)
            worker.condemn(Cause.FROZEN, "frozen", now, silent_seconds=silent)
        elif now >= worker.memory_at:
            worker.memory_at = now + MEMORY_SECONDS
            self._check_memory(worker, now)

    def _check_memory(self, worker: WorkerProcess, now: float) -> None:
        """A worker ends by itself beyond max_memory_mb; one that cannot is killed at twice that."""
        limit = self.settings.max_memory_mb
        if limit is None or (used := resident_mb(worker.pid)) <= MEMORY_FACTOR * limit:
            return
        reason = f"{used:.0f} MB of memory, more than {MEMORY_FACTOR} times max_memory_mb ({limit})"
        logger.error("worker %s uses %s: it is killed", worker.name, reason)
        worker.condemn(Cause.OVER_MEMORY, f"it used {reason}", now)

    # -- births

    def fill(self, now: float) -> None:
        """Start what is missing, and let no more drain than there are."""
        wanted = self.settings.processes
        if not self._was_ready and any(worker.failed is not None for worker in self.workers):
            return  # it ends with a message of its own, and so shall we
        serving = sum(worker.is_serving and worker.generation == self._generation for worker in self.workers)
        for _ in range(wanted - serving):
            if self.fatal is not None or not self._budget.may_start(now):
                break
            self._spawn(self.settings, self._generation, now)
        draining = [worker for worker in self.workers if worker.state is State.DRAINING]
        draining.sort(key=lambda worker: worker.drains_since or now)
        for worker in draining[: max(0, len(draining) - wanted)]:
            if not worker.is_hurried:
                worker.is_hurried = True
                logger.warning("%d workers drain, more than %d: %s must end", len(draining), wanted, worker.name)
                worker.tell("hurry")

    def _spawn(self, settings: Settings, generation: int, now: float) -> None:
        # A worker must have stopped before its supervisor does, who needs a moment for those that do not.
        spare = (settings.shutdown_timeout - settings.cancel_grace) / 2
        own = replace(settings, shutdown_timeout=settings.shutdown_timeout - min(self._reserve, spare))
        try:
            worker = spawn(own, self._supervisor, generation=generation)
        except OSError as error:  # no memory, no processes, no descriptors: that may pass
            pause = self._budget.died(now, lived_seconds=0.0, was_running=False)
            logger.error("a worker could not be started, tried again in %g s: %s", pause, error)  # noqa: TRY400
            return
        self.workers.append(worker)
        self._selector.register(worker.control, selectors.EVENT_READ, worker)
        if worker.pidfd is not None:
            self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)

    # -- deaths

    def _bury(self, worker: WorkerProcess, now: float) -> None:
        death = worker.reap(now)
        self.workers.remove(worker)
        self.forget_files(worker)
        is_clean = worker.report is not None and bool(worker.report.get("is_clean"))
        never_began = worker.ready_at is None and (worker.failed is not None or worker.is_planned)
        if not is_clean and not never_began:
            logger.warning("worker %s (process %d) %s", worker.name, worker.pid, death.sentence)
        if not is_clean and not (worker.ready_at is None and worker.failed is not None):
            self._on_death(worker, death)
        self._count(worker, death)
        if not self.is_ending:
            self._draw_conclusions(worker, death, now)
        worker.close()

    def forget_files(self, worker: WorkerProcess) -> None:
        """Wait for nothing of it any more."""
        for file in (worker.control, worker.pidfd):
            if file is not None and file in self._selector.get_map():
                self._selector.unregister(file)

    def _draw_conclusions(self, worker: WorkerProcess, death: Death, now: float) -> None:
        if self._coming is not None and worker.generation == self._coming[0] and worker.ready_at is None:
            self._give_up_reload(worker.failed.message if worker.failed is not None else death.sentence, now)
            return
        if not self._was_ready and worker.failed is not None:
            self.fatal = worker.failed
            return
        self.totals["restarts"] += 1
        if worker.is_planned:
            return
        lived = now - worker.spawned_at
        pause = self._budget.died(now, lived_seconds=lived, was_running=bool(worker.snapshot.slots))
        if worker.failed is not None and worker.ready_at is None:
            logger.error("worker %s could not start: %s", worker.name, worker.failed.message)
        if pause:
            logger.warning("worker %s lived for %.1f s: the next one starts in %g s", worker.name, lived, pause)

    def _count(self, worker: WorkerProcess, death: Death) -> None:
        shown, report = worker.snapshot, worker.report
        planned = worker.is_planned and death.cause is Cause.STOPPED
        self.deaths["planned" if planned else death.cause.value] += 1
        self.totals["claimed"] += shown.claimed
        self.totals["stuck"] += shown.stuck + (death.cause is Cause.FROZEN)
        if report is None:
            self.totals["settled"] += shown.settled
        else:
            self.totals["settled"] += report.get("settled", 0)
            self.totals["given_back"] += report.get("given_back", 0)
        if self.is_ending:
            self.totals["abandoned"] += len(shown.slots) if report is None else report.get("abandoned", 0)
            self.totals["unwritten"] += 0 if report is None else report.get("unwritten", 0)

    # -- a new generation

    def begin_reload(self, settings: Settings, now: float) -> None:
        """Start workers with these settings beside the others."""
        self._coming = (self._generation + 1, settings)
        for _ in range(settings.processes):
            self._spawn(settings, self._generation + 1, now)

    def advance_reload(self, now: float) -> bool:
        """When the new ones are ready, the old ones drain. Answers whether this is so now."""
        if self._coming is None:
            return False
        generation, settings = self._coming
        new = [worker for worker in self.workers if worker.generation == generation]
        if any(worker.ready_at is None for worker in new):
            return False
        if len(new) < settings.processes:
            self._give_up_reload("not all of them are there", now)
            return False
        self._generation, self.settings, self._coming = generation, settings, None
        for worker in self.workers:
            if worker.generation != generation and worker.told_at is None:
                worker.told_at = now
                worker.tell("drain", reason="a new worker has taken over")
        logger.info("reloaded: %d new workers have taken over", len(new))
        return True

    def _give_up_reload(self, reason: str, now: float) -> None:
        logger.error("the reload failed, and the old workers stay: a new one could not start: %s", reason)
        if self._coming is None:
            return
        failed, self._coming = self._coming[0], None
        for worker in self.workers:
            if worker.generation == failed:
                worker.told_at = now
                worker.tell("stop", reason="the reload failed")
                worker.generation = -1  # of no generation: the next one gets this number

    # -- the end

    def stop(self, reason: str, now: float) -> None:
        """Tell everybody to stop."""
        self.is_ending = True
        self._coming = None
        for worker in self.workers:
            worker.told_at = worker.told_at or now
            worker.tell("stop", reason=reason)

    def kill_all(self, reason: str, now: float, *, at_once: bool = False) -> None:
        """Nobody gets more time."""
        for worker in self.workers:
            worker.condemn(Cause.STOPPED, reason, now)
            if at_once:
                worker.kill()
