"""The slots of async handlers: tasks on an event loop, which has its own thread.

Attempts run in slot tasks that are reused, not in one task each. A slot that takes an attempt while more wait asks
the loop to wake the next slot. That happens as soon as the handler awaits something, and not at all if it never
does.

If an attempt swallows its cancellation, its slot gets a new task. If a handler blocks the loop itself, a cancel
never arrives: then the whole loop is abandoned, and a new one is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import selectors
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from commandbus.clock import monotonic
from commandbus.logger import safe_logger
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.execution.concurrency import ConcurrencyBudget

logger = safe_logger("commandbus.worker")

BREATH = 64  # attempts that a slot runs before it lets the loop breathe, if its handlers never await
BEAT_SECONDS = 0.25


class AsyncSlot:
    """Where one async attempt at a time runs: a task, and its number on the board."""

    __slots__ = ("current", "has_place", "index", "is_over", "loop", "task")

    def __init__(self, index: int, loop: _Loop) -> None:
        self.index = index
        self.loop = loop
        self.current: Attempt | None = None
        self.has_place = False
        self.is_over = False  # its task has ended in order
        self.task: asyncio.Task[None] | None = None


class AsyncSlots:
    """N slot tasks and the queue of attempts before them. `first` is the number of its first slot."""

    def __init__(
        self,
        budget: ConcurrencyBudget,
        run: Callable[[Attempt, AsyncSlot], Awaitable[bool]],
        *,
        name: str,
        first: int,
        on_thread: Callable[[int], None],
    ) -> None:
        self.is_hungry = False
        self.waiting: deque[Attempt] = deque()
        self.finished = 0
        self.is_alone = True
        self.first = first
        self.run = run
        self.budget = budget
        self.on_thread = on_thread
        self._name = name
        self._stopping = False
        self.moving = threading.Lock()  # guards who has a place: the loop's thread, or the ladder that gives it up
        self._loop = _Loop(self, name)
        budget.join(self)

    def start(self) -> None:
        """Start the loop and its slots."""
        self._loop.start()

    def share_with_others(self) -> None:
        """There are other slots, too: check whether they need a part of the concurrency."""
        self.is_alone = False

    def push(self, attempts: Iterable[Attempt]) -> None:
        """Queue attempts, from any thread."""
        self.waiting.extend(attempts)
        self.wake_one()

    def wake_one(self) -> None:
        """Ask the loop to wake a slot, from any thread."""
        if self.waiting and not self._stopping:
            self._loop.ask_to_wake()

    def cancel(self, attempt: Attempt, slot: AsyncSlot) -> None:
        """Cancel the task of an attempt, on its loop, if it still runs there."""
        slot.loop.call(_cancel, attempt, slot)

    def replace(self, stuck: AsyncSlot) -> None:
        """A new task for the slot of a stuck attempt. It keeps the slot's part of the concurrency."""
        if stuck.loop is self._loop and not self._stopping:
            stuck.loop.call(stuck.loop.replace, stuck)
        else:
            self.give_place(stuck)

    def abandon_loop(self, loop: _Loop) -> None:
        """Abandon a blocked loop: its part of the concurrency is free again, and new attempts get a new loop."""
        is_ours = loop is self._loop
        with self.moving:
            loop.is_retired = True  # from now on it takes no place
        loop.retire()
        if is_ours:
            self.tend()
        for slot in loop.slots:
            self.give_place(slot)
        self.wake_one()

    def tend(self) -> None:
        """A fresh loop in place of one that was given up. If the system has no thread or file left for it, the
        ladder's next tick tries again; what waits meanwhile is given back."""
        if self._stopping or not self._loop.is_retired or self._loop.is_copy:
            return
        try:
            fresh = _Loop(self, self._name)
            fresh.start()
        except (RuntimeError, OSError) as error:
            if not self._loop.is_missed:
                self._loop.is_missed = True
                logger.warning("async handlers have no event loop, trying again: %s", error)
            return
        self._loop = fresh
        self.wake_one()

    def take_back(self) -> list[Attempt]:
        """Everything that has not started."""
        back = []
        while True:
            try:
                back.append(self.waiting.popleft())
            except IndexError:
                return back

    def leave_to_parent(self) -> None:
        """This is the copy of a process that forked: end it as soon as the handler lets go of the loop."""
        self.waiting.clear()
        self._loop.is_copy = True
        self._loop.retire()

    def stop(self, timeout: float) -> None:
        """End the loop, and cancel what still runs on it. A handler that blocks it is left behind."""
        self._stopping = True
        self._loop.retire()
        self._loop.thread.join(timeout)

    def give_place(self, slot: AsyncSlot) -> None:
        """Return a slot's place, if it has one; once, whoever comes first."""
        with self.moving:
            had, slot.has_place = slot.has_place, False
        if had:
            self.budget.give(self)


_kept: list[object] = []
"""Selectors whose descriptors somebody has closed: collected as garbage, they would close another's."""


class _Loop:
    """One event loop, its thread and its slots."""

    def __init__(self, lane: AsyncSlots, name: str) -> None:
        self.lane = lane
        self.slots: list[AsyncSlot] = []
        self.loop = asyncio.new_event_loop()
        with contextlib.suppress(AttributeError):  # a loop that is no Python object has a clock of its own
            self.loop.time = monotonic  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._serve, name=f"{name}-loop", daemon=True)
        self.beat_at = monotonic()
        self.is_retired = False
        self.is_copy = False
        self.is_missed = False  # has it been said that there is none in its place?
        self._idle: deque[tuple[AsyncSlot, asyncio.Future[None]]] = deque()
        self._wake_asked = False
        self._ready = threading.Event()
        self._clean = contextvars.Context()

    def start(self) -> None:
        """Start the thread; its slots are ready when this returns."""
        try:
            self.thread.start()
        except RuntimeError:  # no thread is left
            self.loop.close()
            raise
        self._ready.wait()

    def call(self, function: Callable[..., None], *args: object) -> None:
        """Run a function on the loop, if there still is one."""
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self.loop.call_soon_threadsafe(function, *args)

    def ask_to_wake(self) -> None:
        """Wake a slot soon."""
        if not self._wake_asked:
            self._wake_asked = True
            self.call(self._wake)

    def retire(self) -> None:
        """End, if the loop ever comes to it."""
        self.is_retired = True
        self.call(self.loop.stop)

    def blocker(self) -> Attempt | None:
        """The attempt whose code the loop is executing at this moment."""
        task = asyncio.current_task(self.loop)
        return next((slot.current for slot in self.slots if slot.task is task), None) if task is not None else None

    def add_slot(self, index: int, has_place: bool = False) -> None:  # noqa: FBT001 - called by the loop
        """A slot more, on the loop's thread."""
        slot = AsyncSlot(index, self)
        slot.has_place = has_place
        self.slots = [other for other in self.slots if other.index != index] + [slot]
        context = self._clean.copy()
        slot.task = self.loop.create_task(self._work(slot), name=f"slot-{index}", context=context)
        slot.task.add_done_callback(functools.partial(self._revive, slot))

    def replace(self, slot: AsyncSlot) -> None:
        """A new task for a slot, with its place, on the loop's thread."""
        if slot in self.slots and not self.is_retired:
            with self.lane.moving:
                had, slot.has_place = slot.has_place, False
            slot.is_over = True
            self.add_slot(slot.index, had)

    def _revive(self, slot: AsyncSlot, _: asyncio.Task[None]) -> None:
        """A handler may have kept its task, and canceled it when it was no longer its own."""
        if not slot.is_over:
            self.replace(slot)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._clean = contextvars.copy_context()
        lane = self.lane
        for index in range(lane.first, lane.first + lane.budget.total):
            lane.on_thread(index)
            self.add_slot(index)
        self._beat()
        self.loop.call_soon(self._ready.set)
        try:
            while not self.is_retired:
                # A handler may stop the loop, or leave a task or a callback that raises SystemExit.
                try:
                    self.loop.run_forever()
                except OSError as error:
                    self._repair(error)
                except BaseException:  # noqa: BLE001, S112 - whatever it was, the next task is not to blame
                    continue
        finally:
            if self.is_copy:
                os._exit(0)  # its tasks, and what they would do when canceled, are its parent's
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            if not asyncio.all_tasks(self.loop):  # the generators of a task that swallows its cancel are in use
                self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def _repair(self, error: OSError) -> None:
        """A callback raised this, or a handler has closed the loop's own descriptors: then the loop gets new ones.

        Registrations of handlers are lost: they wait until their deadlines. The numbers of the closed descriptors
        may belong to other files by now, so nothing is closed here.
        """
        loop: Any = self.loop
        try:
            loop._selector.select(0)
        except (OSError, ValueError):
            logger.error("the event loop lost its descriptors, and gets new ones: %s", error)  # noqa: TRY400
            _kept.append((loop._selector, loop._ssock.detach(), loop._csock.detach()))
            loop._selector = selectors.DefaultSelector()
            loop._make_self_pipe()
        except AttributeError:
            self.is_retired = True  # a loop of another kind: the ladder makes a fresh one

    def _beat(self) -> None:
        self.beat_at = monotonic()
        self.loop.call_later(BEAT_SECONDS, self._beat)

    def _wake(self) -> None:
        self._wake_asked = False
        lane = self.lane
        while self._idle and self._idle[0][1].done():
            self._idle.popleft()  # its task was canceled in its sleep
        if not lane.waiting or not self._idle or self.is_retired or not lane.budget.take(lane):
            return
        slot, woken = self._idle.popleft()
        with lane.moving:
            slot.has_place = not self.is_retired
        if slot.has_place:
            woken.set_result(None)
        else:
            lane.budget.give(lane)

    async def _work(self, slot: AsyncSlot) -> None:
        lane, waiting = self.lane, self.lane.waiting
        breath = 0
        if not slot.has_place:
            await self._sleep(slot)
        while not self.is_retired:
            try:
                attempt = waiting.popleft()
            except IndexError:
                await self._sleep(slot)
                continue
            if waiting and self._idle and not self._wake_asked:
                self._wake_asked = True
                self.loop.call_soon(self._wake)
            slot.current = attempt
            is_ours = await lane.run(attempt, slot)
            slot.current = None
            if not is_ours:
                slot.is_over = True
                return  # declared stuck: another task has taken over
            lane.finished += 1
            # The next handler must see neither what this one has set, nor a cancel that was this one's.
            if contextvars.copy_context() != self._clean or (slot.task is not None and slot.task.cancelling()):
                self.replace(slot)
                return
            breath += 1
            if breath >= BREATH:
                breath = 0
                await asyncio.sleep(0)
            if not lane.is_alone and lane.budget.others_hungry(lane):
                await self._sleep(slot)

    async def _sleep(self, slot: AsyncSlot) -> None:
        """Return the place and wait to be woken with one."""
        woken = self.loop.create_future()
        self._idle.append((slot, woken))
        self.lane.give_place(slot)
        if self.lane.waiting:
            self.ask_to_wake()
        await woken


def _cancel(attempt: Attempt, slot: AsyncSlot) -> None:
    """On the loop: between two steps of the task, so the attempt is either still in its handler or over."""
    if slot.current is attempt and slot.task is not None and not attempt.extras.is_delivered:
        attempt.extras.is_delivered = True
        slot.task.cancel()
