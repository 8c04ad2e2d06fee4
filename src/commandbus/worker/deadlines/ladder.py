"""The Ladder: every attempt ends in time, whatever its handler does.

    deadline   the attempt is asked to stop: its cancel event is set, its task canceled, its query canceled
    grace      it may still finish, and a result that comes in time counts
    stuck      an autopsy is taken, the attempt is fenced and settled, its slot gets a new thread or task

A person's cancel, the shutdown and a lost lease use the same ladder. It looks four times a second, and twice
while the worker is idle, on its own thread, in memory only. An attempt that is due before that wakes it. Nothing
here touches the database or anything else that can block, so a dead server or a silent network cannot stop the
clock. The lease keeper does what needs the database.

The thread that takes an attempt out of `running` owns its settlement: the slot that ran it, or the ladder, never
both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

from commandbus.clock import boottime, epoch, monotonic
from commandbus.logger import safe_logger
from commandbus.model.outcome import Failure
from commandbus.model.timeouts import MONITOR_TICK, Timeouts
from commandbus.stalled_thread import STILL_SECONDS, StalledThread
from commandbus.worker.attempt_registry import AttemptRegistry
from commandbus.worker.deadlines import autopsy
from commandbus.worker.execution.async_slots import AsyncSlot, AsyncSlots, Guest, on_loop
from commandbus.worker.execution.attempt import NEVER, Attempt, Stop, Why, lost_text
from commandbus.worker.execution.slots import Slot
from commandbus.worker.health import HealthStatus

logger = safe_logger("commandbus.worker")

PART = "ladder"
IDLE_SECONDS: Final = 0.5  # between two looks while the worker is idle
BLOCKED_SECONDS = 1.0  # how long an event loop may show no sign of life

Document = dict[str, Any]


class Ladder:
    """One thread that looks at what runs."""

    def __init__(
        self,
        timeouts: Timeouts,
        attempts: AttemptRegistry,
        *,
        loop: Callable[[], AsyncSlots | None],
        health: HealthStatus,
        cancel_query: Callable[[Attempt], None],
        fence: Callable[[Attempt, Stop, Document], None],
        bystander: Callable[[Attempt, Slot | AsyncSlot, Failure, bool], None],
        on_stuck: Callable[[Attempt, Slot | AsyncSlot], None],
        on_tick: Callable[[float], None],
        is_idle: Callable[[], bool],
        on_end: Callable[[BaseException], None],
        can_isolate: Callable[[], bool],
        name: str,
    ) -> None:
        self._timeouts = timeouts
        self._late_seconds = timeouts.late_seconds
        self._attempts = attempts
        self._running = attempts.running
        self._get_loop = loop
        self._health = health
        self._cancel_query = cancel_query
        self._fence = fence
        self._bystander = bystander
        self._on_stuck = on_stuck
        self._on_tick = on_tick
        self._is_idle = is_idle
        self._on_end = on_end
        self._can_isolate = can_isolate
        self._asked: SimpleQueue[tuple[Attempt, Stop]] = SimpleQueue()
        self._wake = threading.Event()
        attempts.wake_ladder = self.wake
        self._stopping = False
        self.beat_at = monotonic()
        self._stalled = StalledThread()
        self._ended: BaseException | None = None
        self.abandoned = 0
        self._thread = threading.Thread(target=self._serve, name=f"{name}-ladder", daemon=True)

    @property
    def _loop(self) -> AsyncSlots | None:
        """The slots of async handlers; also made when a sync handler first returns an awaitable."""
        return self._get_loop()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread. If this returns in time, the lease keeper has everything that was abandoned."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout)

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    def ask(self, attempt: Attempt, why: Why, text: str, *, grace: float | None = None) -> None:
        """Ask an attempt to stop, from any thread; it has the usual grace unless told otherwise."""
        now = monotonic()
        until = now + (self._timeouts.cancel_grace if grace is None else grace)
        self._asked.put((attempt, Stop(why, text, now, until)))
        self._wake.set()

    @property
    def trouble(self) -> str | None:
        """A sentence for operators if it does not look at what runs. Any thread may ask."""
        if self._ended is not None:
            return f"the {PART} has ended: {type(self._ended).__name__}: {self._ended}"
        still_for = 0.0 if self._stopping else self._stalled.seconds(self.beat_at)
        return f"the {PART} has not moved for {still_for:.0f} s" if still_for >= STILL_SECONDS else None

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait(self._until_due())
                self._wake.clear()
                try:
                    self._tick()
                except Exception:
                    logger.exception("a tick of the ladder failed")  # and the next one tries again
        except BaseException as error:  # noqa: BLE001 - nothing may end it silently
            self._ended = error
            self._on_end(error)

    def _until_due(self) -> float:
        """Seconds until the next look: a tick, or less if something is due before.

        `looks_at` is set before `running` is read, and a slot uses them in the other order: so an attempt that
        begins meanwhile either is seen here or wakes the ladder.
        """
        pause = IDLE_SECONDS if self._is_idle() else MONITOR_TICK
        self._attempts.looks_at = monotonic() + pause
        due = [item.deadline_at if item.stop is None else item.stop.until for item in list(self._running)]
        return max(0.01, min(pause, min(due, default=NEVER) - monotonic()))

    def _tick(self) -> None:
        self.beat_at = now = monotonic()
        while not self._asked.empty():
            attempt, stop = self._asked.get()
            self._ask_to_stop(attempt, self._running.get(attempt), stop)
        for attempt, slot in list(self._running.items()):
            try:
                self._look(attempt, slot, now)
            except Exception:
                logger.exception("checking command %s failed", attempt.command_id)  # the others are looked at
        self._on_tick(now)

    # --- one attempt ---------------------------------------------------------------------------------------

    def _look(self, attempt: Attempt, slot: Slot | AsyncSlot, now: float) -> None:
        if not attempt.started_at:
            return  # a slot is just about to start it
        child = attempt.child
        if child is not None:
            child.check_memory()
        stop = attempt.stop
        if stop is None:
            stop = self._due(attempt, now)
            if stop is not None:
                self._ask_to_stop(attempt, slot, stop)
            else:
                for scope in attempt.scopes:
                    scope.end(now)
        if stop is None:
            return
        if now >= stop.until:
            self._give_up(attempt, slot, stop)
            return
        if (there := on_loop(slot)) is not None and self._loop is not None and not attempt.extras.is_delivered:
            self._loop.cancel(attempt, there)  # it was just about to start when it was asked, or its loop is busy
        if attempt.borrowed is not None and not attempt.extras.is_reminded:
            self._remind(attempt, stop, now)

    def _remind(self, attempt: Attempt, stop: Stop, now: float) -> None:
        """A statement that began just after the cancel gets half of the grace, then it is canceled too."""
        if now >= (stop.asked_at + stop.until) / 2:
            attempt.extras.is_reminded = True
            self._cancel_query(attempt)

    def _due(self, attempt: Attempt, now: float) -> Stop | None:
        """Is it time to ask this one to stop?"""
        limits = self._timeouts
        if now >= attempt.deadline_at:
            until = attempt.deadline_at + limits.cancel_grace
            return Stop(Why.DEADLINE, attempt.lateness(), attempt.deadline_at, until)
        if attempt.is_lost:
            text = "its lease was lost: somebody else may be running the command (layer 3: visibility_timeout)"
            return Stop(Why.LEASE, text, now, now + limits.cancel_grace)
        if attempt.limit_use is not None and (limit := attempt.limit_use.lost_limit) is not None:
            return Stop(Why.LEASE, lost_text(limit), now, now + limits.cancel_grace)
        age = boottime() - attempt.renewed_at
        if age >= self._late_seconds:
            text = (
                "its lease could not be renewed: the database is unreachable, or another transaction holds its "
                "queue row (layer 3: visibility_timeout)"
            )
            return Stop(Why.LEASE, text, now, now + max(0.0, limits.visibility_timeout - age))
        return None

    def _ask_to_stop(self, attempt: Attempt, slot: Slot | AsyncSlot | None, stop: Stop) -> None:
        before = attempt.stop
        if before is not None and stop.until < before.until:
            attempt.stop = stop  # a hurried shutdown leaves less time
        attempt.ask_to_stop(stop)
        if slot is None or before is not None:
            return
        logger.info(
            "attempt number %d of command %s is asked to stop: %s",
            attempt.number,
            attempt.command_id,
            stop.text,
            extra=attempt.log_fields,
        )
        if attempt.child is not None:
            attempt.child.cancel(stop)
        elif (there := on_loop(slot)) is not None and self._loop is not None:
            self._loop.cancel(attempt, there)
        if stop.why is Why.LEASE and attempt.is_lost:
            attempt.bar()
        if attempt.borrowed is not None:
            self._cancel_query(attempt)

    def _give_up(self, attempt: Attempt, slot: Slot | AsyncSlot, stop: Stop) -> None:
        if attempt.child is not None:
            attempt.child.kill(stop.text)  # the thread of its slot is free, and settles it
            return
        if (there := on_loop(slot)) is not None and self._loop is not None:
            blocked = not attempt.extras.is_delivered
            if blocked and there.loop.blocker() is not attempt:
                self._give_up_loop(attempt, there, stop)
                return
            taken = _examine(there, is_blocked=blocked)
            if not self._take(attempt, stop, taken):
                return
            if blocked:
                self._leave_loop(there, _blocked_by(attempt), culprit=there)
            else:
                self._loop.replace(there)
        elif isinstance(slot, Slot):
            taken = _examine(slot)
            if not self._take(attempt, stop, taken):
                return
            slot.lane.replace(slot)

    def _take(self, attempt: Attempt, stop: Stop, taken: Document) -> bool:
        """Own its settlement, unless it has ended at the last moment."""
        slot = self._attempts.take(attempt)
        if slot is None:
            return False
        if stop.why is Why.SHUTDOWN:
            attempt.is_unfinished = True
            self.abandoned += len(attempt.each)
        else:
            self._health.record_stuck_thread()
        logger.error(
            "attempt number %d of command %s (%s) is stuck after %.1f s: %s",
            attempt.number,
            attempt.command_id,
            attempt.command_type,
            attempt.elapsed_ms() / 1000,
            stop.text,
            extra=attempt.log_fields,
        )
        self._fence(attempt, stop, taken)
        if attempt.child is not None:  # a process came for it at the last moment
            attempt.child.kill(stop.text)
        self._note_stuck(attempt, slot)
        return True

    def _note_stuck(self, attempt: Attempt, slot: Slot | AsyncSlot) -> None:
        try:
            self._on_stuck(attempt, slot)
        except Exception:
            logger.exception("the worker could not be told of a stuck attempt")  # its slot must come back

    # --- a blocked event loop ----------------------------------------------------------------------------------

    def _give_up_loop(self, attempt: Attempt, slot: AsyncSlot, stop: Stop) -> None:
        """An attempt's cancel never reached it, because another one blocks their loop: that one is to blame."""
        blocker = slot.loop.blocker()
        culprit = on_loop(self._running.get(blocker)) if blocker is not None else None
        if blocker is None or culprit is None:
            if monotonic() - slot.loop.beat_at > BLOCKED_SECONDS:
                self._give_up_unnamed(attempt, slot, stop)
            elif self._loop is not None:
                self._loop.cancel(attempt, slot)  # the loop was let go this very moment
            return
        blocked = monotonic() - slot.loop.beat_at
        text = f"it blocked the event loop for {blocked:.1f} s; command {attempt.command_id!r} could not stop"
        why = Why.SHUTDOWN if stop.why is Why.SHUTDOWN else Why.DEADLINE  # a neighbor's cancel is not its own
        blamed = blocker.stop or Stop(why, text, stop.asked_at, stop.until, is_told=False)
        blocker.ask_to_stop(blamed)
        taken = _examine(culprit, is_blocked=True)
        if self._take(blocker, blamed, taken):
            self._leave_loop(slot, _blocked_by(blocker), culprit=culprit)

    def _give_up_unnamed(self, attempt: Attempt, slot: AsyncSlot, stop: Stop) -> None:
        """A task or a callback blocks the loop, and nothing tells which attempt made it.

        If one attempt is alone there, it did it. Of several, each runs in a child process next time. On the
        application's loop it is the application's own code as likely as not: nobody is charged.
        """
        if slot.loop.is_callers:
            logger.error("the application has blocked the event loop on which its AsyncWorker runs handlers")
            self._leave_loop(slot, "the application's event loop was blocked, by code that is no handler's")
            return
        here = [there.loop for other in list(self._running.values()) if (there := on_loop(other)) is not None]
        if here.count(slot.loop) > 1 and self._can_isolate():
            self._health.record_stuck_thread()
            logger.error("the event loop is blocked, by a task or callback of an attempt that cannot be named")
            self._leave_loop(slot, "its event loop was blocked, and the cause is not known", suspect=True)
            self._note_stuck(attempt, slot)
        elif self._take(attempt, stop, _examine(slot, is_blocked=True)):
            self._leave_loop(slot, _blocked_by(attempt), culprit=slot)

    def _leave_loop(
        self, slot: AsyncSlot, text: str, *, culprit: AsyncSlot | None = None, suspect: bool = False
    ) -> None:
        """Everybody but the culprit, who has been taken, is fenced and tried again, not charged."""
        lane, loop = self._loop, slot.loop
        if lane is None:
            return
        lane.bar(loop)
        given_up = [culprit]
        for attempt, other in list(self._running.items()):
            there = on_loop(other)
            if there is not None and there.loop is loop and self._attempts.take(attempt) is not None:
                failure = Failure("LoopBlocked", "BYSTANDER", text, duration_ms=attempt.elapsed_ms())
                self._bystander(attempt, other, failure, suspect)
                given_up.append(there)
        for guest in given_up:
            if isinstance(guest, Guest):
                guest.give_up()
        lane.abandon_loop(loop)


def _blocked_by(culprit: Attempt) -> str:
    return f"its event loop was blocked by command {culprit.command_id!r} ({culprit.command_type})"


def _examine(slot: Slot | AsyncSlot, *, is_blocked: bool = False) -> Document:
    """Take an autopsy. An error in it (a module's loader may raise) must not keep the attempt from being ended."""
    try:
        if isinstance(slot, AsyncSlot):
            return autopsy.of_task(slot.task, slot.loop.thread.ident, is_blocked=is_blocked)
        return autopsy.of_thread(slot.ident)
    except Exception as error:  # noqa: BLE001
        return {"taken_at": round(epoch(), 3), "stacks": [], "left_out": f"{type(error).__name__}: {error}"}
