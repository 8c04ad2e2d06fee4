"""The slots of async handlers: tasks on an event loop (`slot_loop.py`), and the queue before them.

If an attempt swallows its cancellation, its slot gets a new task. If a handler blocks the loop itself, a cancel
never arrives: then the whole loop is abandoned, and a new one is started. A loop of the application cannot be
replaced: there the slots begin anew when it runs again. Before a new loop runs attempts, the async `on_start`
functions run there again (`renew`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from commandbus.logger import safe_logger
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.execution.concurrency import ConcurrencyBudget
from commandbus.worker.execution.slot_loop import AsyncSlot, CallersLoop, Guest, SlotLoop
from commandbus.worker.execution.slots import Slot
from commandbus.worker.exhaustion import ExhaustedError

__all__ = ["AsyncSlot", "AsyncSlots", "Guest", "on_loop"]

logger = safe_logger("commandbus.worker")


def on_loop(slot: Slot | AsyncSlot | None) -> AsyncSlot | None:
    """The part of a slot that is on an event loop: itself, or the guest that its thread waits for."""
    return slot.guest if isinstance(slot, Slot) else slot


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
        callers_loop: asyncio.AbstractEventLoop | None = None,
        renew: Callable[[], Awaitable[None]] | None = None,
        on_failed: Callable[[BaseException], None] = lambda _: None,
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
        self._callers_loop = callers_loop
        self._renew = renew  # what a new loop awaits before it runs attempts
        self.on_failed = on_failed
        self._stopping = False
        self.moving = threading.Lock()  # guards the budget: the loop's thread uses it, the ladder returns it
        self._loop = self._make_loop()
        budget.join(self)

    def _make_loop(self) -> SlotLoop:
        if self._callers_loop is not None:
            return CallersLoop(self, self._name, self._callers_loop)
        return SlotLoop(self, self._name)

    def start(self) -> None:
        """Start the loop and its slots."""
        self._loop.start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Run a coroutine on the loop, beside the attempts; from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop.loop)

    def share_with_others(self) -> None:
        """There are other slots, too: check whether they need a part of the concurrency."""
        self.is_alone = False

    def push(self, attempts: Sequence[Attempt], *, are_first: bool = False) -> None:
        """Queue attempts, from any thread, before the others if they are of high priority."""
        if are_first:
            self.waiting.extendleft(reversed(attempts))
        else:
            self.waiting.extend(attempts)
        self.wake_one()

    def wake_one(self) -> None:
        """Ask the loop to wake a slot, from any thread."""
        if self.waiting and not self._stopping:
            self._loop.ask_to_wake()

    def cancel(self, attempt: Attempt, slot: AsyncSlot) -> None:
        """Cancel the task of an attempt, on its loop, if it still runs there."""
        slot.loop.call(_cancel, attempt, slot)

    def run_guest(
        self, attempt: Attempt, host: Slot, awaitable: Awaitable[Any]
    ) -> tuple[Any, BaseException | None]:
        """In a slot's thread: run what its handler returned, to its end. Returns its result, or what it raised."""
        guest = host.guest = Guest(attempt, host, self._loop)
        try:
            if guest.loop.is_retired:  # looked at after the ladder can see the guest: one of us gives it up
                raise ExhaustedError("the worker's event loop has just been given up")
            guest.loop.run_guest(guest, awaitable, contextvars.copy_context())
            return guest.wait()
        finally:
            host.guest = None

    def replace(self, stuck: AsyncSlot) -> None:
        """A new task for the slot of a stuck attempt. It keeps the slot's part of the concurrency."""
        if isinstance(stuck, Guest):
            stuck.give_up()
        elif stuck.loop is self._loop and not self._stopping:
            stuck.loop.call(stuck.loop.replace, stuck)
        else:
            self.give_share(stuck)

    def bar(self, loop: SlotLoop) -> None:
        """From now on it takes neither a place nor a guest."""
        with self.moving:
            loop.is_retired = True

    def abandon_loop(self, loop: SlotLoop) -> None:
        """Abandon a blocked loop: its part of the concurrency is free again, and new attempts get a new loop."""
        is_ours = loop is self._loop
        self.bar(loop)
        loop.retire()
        if is_ours:
            self.tend()
        for slot in loop.slots:
            self.give_share(slot)
        self.wake_one()

    def tend(self) -> None:
        """A fresh loop instead of an abandoned one. If the system has no thread or file left for it, the
        ladder's next tick tries again; what waits meanwhile is given back."""
        if self._stopping or not self._loop.is_retired or self._loop.is_copy:
            return
        try:
            fresh = self._make_loop()
            fresh.prepare = None if fresh.is_callers else self._renew  # the application's loop is the same one
            fresh.start()
        except (RuntimeError, OSError) as error:
            if not self._loop.is_missed:
                self._loop.is_missed = True
                logger.warning("async handlers have no event loop, trying again: %s", error)
            return
        self._loop = fresh
        self.wake_one()

    @property
    def has_ended(self) -> bool:
        """Has the thread of the loop ended, though nobody retired the loop?"""
        loop = self._loop
        return not (self._stopping or loop.is_retired or loop.is_copy) and not loop.thread.is_alive()

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
        self._loop.leave_to_parent()

    def stop(self, timeout: float) -> None:
        """End the loop, and cancel what still runs on it. A handler that blocks it is left behind."""
        self._stopping = True
        self._loop.retire()
        self._loop.join(timeout)

    def give_share(self, slot: AsyncSlot) -> None:
        """Return a slot's share of the concurrency budget, if it has one. Only the first call does."""
        with self.moving:
            had, slot.has_share = slot.has_share, False
        if had:
            self.budget.give(self)


def _cancel(attempt: Attempt, slot: AsyncSlot) -> None:
    """On the loop: between two steps of the task, so the attempt is either still in its handler or over."""
    if slot.current is attempt and slot.task is not None and not attempt.extras.is_delivered:
        attempt.extras.is_delivered = True
        slot.task.cancel()
