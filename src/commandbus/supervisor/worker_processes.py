"""The worker processes of a supervisor: their starts, their ends, and what happens in between.

A worker serves, drains, or is about to be killed. Only workers that serve count, so the replacement of any other
starts at once (after several crashes in a row: when the restart budget allows it). Workers that were started with
the same settings are a generation. A reload starts the next generation beside the old one. When the new one is
complete, the old one drains. If the new one cannot start, the old one stays.
"""

from __future__ import annotations

import math
import os
import selectors
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Final

from commandbus.logger import safe_logger
from commandbus.model.attempt_counts import AttemptCounts
from commandbus.model.counting import counted
from commandbus.model.crash_attribution import Cause, Death
from commandbus.settings import Settings
from commandbus.supervisor.death_log import say_death
from commandbus.supervisor.restart_budget import EARLY_SECONDS, RestartBudget
from commandbus.supervisor.spawn import spawn
from commandbus.supervisor.worker_messages import Failed
from commandbus.supervisor.worker_process import WorkerProcess
from commandbus.supervisor.worker_start import place_of
from commandbus.worker.board import State
from commandbus.worker.isolation.descendants import kill_marked
from commandbus.worker.memory import resident_megabytes

logger = safe_logger("commandbus.supervisor")

SILENT_SECONDS: Final = 0.8
MEMORY_SECONDS: Final = 1.0
MEMORY_FACTOR: Final = 2
START_SECONDS: Final = 300.0
EXIT_SECONDS: Final = 3.0
OBEY_SECONDS: Final = 5.0
CLAIMLESS_SECONDS: Final = 15.0
"""If a worker has had room but could not ask for work for so long, it is replaced, unless the database is to
blame."""
DRAIN_SECONDS: Final = 60.0
"""How long a draining worker may run attempts without a deadline before it is hurried, if too many workers drain.
Reloads may follow each other within seconds, and running attempts should finish. Those with a deadline always
may."""


class WorkerProcesses:
    """Live workers, and counters that outlive them. `on_death` receives what a dead worker may have left
    behind."""

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
        self.ends_by_cause: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._counts_of_dead = AttemptCounts()
        self.fatal: Failed | None = None
        self.is_ending = False
        self.reloads: Counter[str] = Counter()
        self.reload_error = ""  # why the last reload failed; empty if it succeeded
        self._supervisor = supervisor
        self._reserve = reserve_seconds
        self._selector = selector
        self._on_death = on_death
        self._budget = RestartBudget()
        self._was_ready = False
        self._has_lived = False  # has a worker run for longer than workers do that fail at the start?
        self._generation = 0
        self._coming: tuple[int, Settings] | None = None
        self._waits_for_database = False
        self._away_at = -math.inf  # when the supervisor itself last could not reach the database
        self._turn = os.memfd_create("commandbus-turn", os.MFD_CLOEXEC)  # its lock: worker/isolation/quarantine.py
        weakref.finalize(self, os.close, self._turn)

    @property
    def was_ready(self) -> bool:
        """Has any worker ever been ready?"""
        return self._was_ready

    def counts(self) -> AttemptCounts:
        """What all workers have counted, the dead ones too. Safe from any thread."""
        with self._counting:
            return reduce(
                AttemptCounts.plus, (worker.counts.read() for worker in self.workers), self._counts_of_dead
            )

    @property
    def is_reloading(self) -> bool:
        """Is a new generation starting?"""
        return self._coming is not None

    # -- looking after them

    def look(self, now: float, *, blind_until: float) -> None:
        """Check every worker. Silence before `blind_until` proves nothing: the supervisor itself was not
        running."""
        for worker in list(self.workers):
            if worker.has_ended():
                self._bury(worker, now)
            else:
                self._look_safely_at(worker, now, blind_until)
            if worker.ready_at is not None and now - worker.spawned_at > EARLY_SECONDS:
                self._has_lived = True
                self._budget.survived(worker.spawned_at)

    def _look_safely_at(self, worker: WorkerProcess, now: float, blind_until: float) -> None:
        """If checking one worker fails, the others are still checked."""
        try:
            self._look_at(worker, now, blind_until)
        except Exception:
            if worker.condemned is None:
                logger.exception("worker %s could not be checked", worker.name)
            worker.condemn(Cause.NONSENSE, "it could not be checked", now)
            worker.kill()

    def _look_at(self, worker: WorkerProcess, now: float, blind_until: float) -> None:
        was_ready = worker.ready_at is not None
        shown = worker.look(now)
        worker.judge_board(now)
        if worker.condemned is not None:
            if worker.may_be_killed(now):
                worker.kill()
            return
        if worker.ready_at is None:
            self._watch_start(worker, now)
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
            # While it shuts down it has no heartbeat, so the time limit of the shutdown counts.
            if now > worker.exits_since + limits.shutdown_timeout:
                worker.condemn(Cause.STOPPED, f"it did not stop within {limits.shutdown_timeout:g} s", now)
            if kill_at >= seen_at + limits.heartbeat_timeout:
                return
        worker.watch_freeze(now, is_silent=now - seen_at > SILENT_SECONDS)
        if now >= kill_at:
            worker.condemn(Cause.FROZEN, "frozen", now, silent_seconds=now - shown.beat_at)
        elif self._is_idle_by_mistake(worker, now):
            self._replace_claimless(worker, now)
        elif now >= worker.memory_at:
            worker.memory_at = now + MEMORY_SECONDS
            self._check_memory(worker, now)

    def _is_idle_by_mistake(self, worker: WorkerProcess, now: float) -> bool:
        """Does it have room without being able to ask for work, although we can reach the database?"""
        shown = worker.snapshot
        was_away = now - self._away_at < 2 * CLAIMLESS_SECONDS
        return shown.state is State.ACTIVE and shown.claimless >= CLAIMLESS_SECONDS and not was_away

    def _replace_claimless(self, worker: WorkerProcess, now: float) -> None:
        """Tell it to drain. If it does not react, it is killed, and the coroner settles what it holds."""
        if worker.told_at is None:
            reason = f"it has free slots, but could not ask for work for {worker.snapshot.claimless} s"
            logger.warning("worker %s is replaced: %s", worker.name, reason)
            worker.told_at = now
            worker.tell("drain", reason=reason)
        elif now - worker.told_at >= OBEY_SECONDS:
            worker.condemn(Cause.STOPPED, f"it did not drain within {OBEY_SECONDS:g} s of being told", now)

    def _watch_start(self, worker: WorkerProcess, now: float) -> None:
        if now - worker.spawned_at > START_SECONDS:
            worker.condemn(Cause.STOPPED, f"it was not ready after {START_SECONDS:g} s", now)
        elif worker.start.wants_stacks(now):
            worker.ask_for_stacks()
        elif worker.start.is_due(now):
            worker.start.place = place_of(worker.stacks())
            logger.warning("worker %s %s", worker.name, worker.start.note(now, worker.doing))

    def _check_memory(self, worker: WorkerProcess, now: float) -> None:
        """A worker ends by itself beyond max_memory_mb. If it cannot, it is killed at twice that."""
        limit = self.settings.max_memory_mb
        if limit is None or (used := resident_megabytes(worker.pid)) <= MEMORY_FACTOR * limit:
            return
        reason = f"it used {used:.0f} MB of memory, more than {MEMORY_FACTOR} times max_memory_mb ({limit})"
        worker.condemn(Cause.OVER_MEMORY, reason, now)

    # -- births

    def fill(self, now: float, *, is_database_away: bool = False) -> None:
        """Start missing workers, unless the database is unreachable. Hurry workers if more drain than are
        wanted."""
        wanted = self.settings.processes
        if not self._was_ready and any(worker.failed is not None for worker in self.workers):
            return  # the worker ends with an error, and the supervisor will end with the same error
        serving = sum(
            (worker.is_serving or worker.is_failing) and worker.generation == self._generation
            for worker in self.workers
        )
        waits = is_database_away and self._was_ready and serving < wanted
        if waits and not self._waits_for_database:
            missing = counted(wanted - serving, "worker")
            logger.warning("the database is unreachable: %s will be started when it is back", missing)
        self._waits_for_database = waits
        if is_database_away:
            self._away_at = now
        for _ in range(0 if waits else wanted - serving):
            if self.fatal is not None or not self._budget.may_start(now):
                break
            self._spawn(self.settings, self._generation, now)
        self._hurry(wanted, now)

    def _hurry(self, wanted: int, now: float) -> None:
        """To bound memory: if more than `wanted` workers drain, the oldest must end after DRAIN_SECONDS.

        Its attempts with a deadline may run until that deadline (promise 5). Attempts without one are canceled,
        because nothing else would end them.
        """
        busy = [worker for worker in self.workers if worker.state is State.DRAINING and worker.snapshot.running]
        busy.sort(key=lambda worker: worker.drains_since or now)
        for worker in busy[: max(0, len(busy) - wanted)]:
            drained = now - (worker.drains_since or now)
            endless = sum(math.isinf(slot.stuck_at) for slot in worker.snapshot.slots)
            if drained >= DRAIN_SECONDS and endless and not worker.is_hurried:
                worker.is_hurried = True
                text = "%d workers drain, more than %d: %s has drained for %.0f s, so its %s must end"
                logger.warning(text, len(busy), wanted, worker.name, drained, _without_deadline(endless))
                worker.tell("hurry")

    def _spawn(self, settings: Settings, generation: int, now: float) -> None:
        # A worker must stop before its supervisor, which needs a moment to kill those that do not stop.
        spare = (settings.shutdown_timeout - settings.cancel_grace) / 2
        own = replace(settings, shutdown_timeout=settings.shutdown_timeout - min(self._reserve, spare))
        try:
            worker = spawn(own, self._supervisor, turn=self._turn, generation=generation)
        except OSError as error:  # no memory, no processes, no descriptors: this may be temporary
            pause = self._budget.died(now, lived_seconds=0.0, was_running=False)
            logger.error("a worker could not be started, tried again in %.0f s: %s", pause, error)  # noqa: TRY400
            return
        self.workers.append(worker)
        self._selector.register(worker.control, selectors.EVENT_READ, worker)
        if worker.pidfd is not None:
            self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)

    # -- deaths

    def _bury(self, worker: WorkerProcess, now: float) -> None:
        death = worker.reap(now)
        with self._counting:
            self._counts_of_dead = self._counts_of_dead.plus(worker.counts.read())
            self.workers.remove(worker)
        self.forget_files(worker)
        is_clean = worker.report is not None and worker.report.is_clean and worker.condemned is None
        if not is_clean and not (worker.ready_at is None and worker.failed is not None):
            self._on_death(worker, death)
        if not is_clean and worker.hello is not None:
            self.end_descendants(f"{self._supervisor}/{worker.hello.id}/")
        self._count(worker, death)
        if worker.is_planned and not is_clean and worker.ready_at is not None:
            say_death(worker, death)
        if not self.is_ending:
            self._draw_conclusions(worker, death, now)
        worker.close()

    @staticmethod
    def end_descendants(mark: str) -> threading.Thread:
        """End the programs that isolated attempts have started. Uses a separate thread, because /proc may be
        slow."""
        ending = threading.Thread(target=kill_marked, args=(mark,), name="descendants", daemon=True)
        ending.start()
        return ending

    def forget_files(self, worker: WorkerProcess) -> None:
        """Stop waiting for anything from it."""
        for file in (worker.control, worker.pidfd):
            if file is not None and file in self._selector.get_map():
                self._selector.unregister(file)

    def _draw_conclusions(self, worker: WorkerProcess, death: Death, now: float) -> None:
        if self._coming is not None and worker.generation == self._coming[0] and worker.ready_at is None:
            self._give_up_reload(
                worker.failed.message if worker.failed is not None else worker.epitaph(death), now
            )
            return
        if worker.failed is not None and self._ends_all(worker.failed):
            self.fatal = worker.failed
            return
        self.totals["restarts"] += 1
        if worker.is_planned:
            return
        lived, was_running = now - worker.spawned_at, worker.was_running
        pause = self._budget.died(now, lived_seconds=lived, was_running=was_running)
        cause = worker.epitaph(death)
        if not was_running and lived < EARLY_SECONDS and (times := self._budget.times(cause)) > 1:
            text = "workers are still failing (%d times), for the same cause: next in %.0f s"
            logger.warning(text, times, pause)
            return
        say_death(worker, death)
        if pause:
            logger.warning("worker %s lived for %.1f s: next in %.0f s", worker.name, lived, pause)

    def _ends_all(self, failed: Failed) -> bool:
        """Would every worker fail like this? True for the first workers. Also if a person must repair the cause,
        and no worker has lived for long yet."""
        return not self._was_ready or (failed.needs_a_person and not self._has_lived)

    def _count(self, worker: WorkerProcess, death: Death) -> None:
        shown, report = worker.snapshot, worker.report
        planned = worker.is_planned and death.cause is Cause.STOPPED
        self.ends_by_cause["planned" if planned else death.cause.value] += 1
        self.totals["claimed"] += shown.claimed
        self.totals["stuck"] += shown.stuck + (death.cause is Cause.FROZEN)
        if report is None:
            self.totals["settled"] += shown.settled
        else:
            self.totals["settled"] += report.settled
            self.totals["given_back"] += report.given_back
        if self.is_ending:
            self.totals["abandoned"] += len(shown.slots) if report is None else report.abandoned
            self.totals["unwritten"] += 0 if report is None else report.unwritten

    # -- a new generation

    def begin_reload(self, settings: Settings, now: float) -> None:
        """Start workers with these settings beside the old ones."""
        self._coming = (self._generation + 1, settings)
        for _ in range(settings.processes):
            self._spawn(settings, self._generation + 1, now)

    def advance_reload(self, now: float) -> bool:
        """Let the old workers drain when the new ones are ready. Returns whether this has just happened."""
        if self._coming is None:
            return False
        generation, settings = self._coming
        new = [worker for worker in self.workers if worker.generation == generation]
        if any(worker.ready_at is None for worker in new):
            return False
        if len(new) < settings.processes:
            self._give_up_reload("not all of them are ready", now)
            return False
        self._generation, self.settings, self._coming = generation, settings, None
        for worker in self.workers:
            if worker.generation != generation and worker.told_at is None:
                worker.told_at = now
                worker.tell("drain", reason="a new worker has taken over")
        self.reloads["done"] += 1
        self.reload_error = ""
        logger.info(
            "reloaded: %s taken over", "1 new worker has" if len(new) == 1 else f"{len(new)} new workers have"
        )
        return True

    def _give_up_reload(self, reason: str, now: float) -> None:
        self.note_failed_reload(f"a new one could not start: {reason}")
        if self._coming is None:
            return
        failed, self._coming = self._coming[0], None
        for worker in self.workers:
            if worker.generation == failed:
                worker.told_at = now
                worker.tell("stop", reason="the reload failed")
                worker.generation = -1  # of no generation any more: the next reload uses its number

    def note_failed_reload(self, reason: str) -> None:
        """Keep the old workers. Health and metrics report the failure until a reload succeeds."""
        self.reloads["failed"] += 1
        self.reload_error = reason
        logger.error("the reload failed, and the old workers stay: %s", reason)

    # -- the end

    def stop(self, reason: str, now: float) -> None:
        """Tell all workers to stop."""
        self.is_ending = True
        self._coming = None
        for worker in self.workers:
            worker.told_at = worker.told_at or now
            worker.tell("stop", reason=reason)

    def kill_all(self, reason: str, now: float, *, at_once: bool = False) -> None:
        """Kill all workers now."""
        for worker in self.workers:
            worker.condemn(Cause.STOPPED, reason, now)
            if at_once:
                worker.kill()


def _without_deadline(attempts: int) -> str:
    return f"{counted(attempts, 'attempt')} without a deadline"
