"""An event loop that runs slots of async handlers: one of the worker, in a thread of its own (`SlotLoop`), or the
application's (`CallersLoop`).

Attempts run in slot tasks that are reused, not in one task each. A slot that takes an attempt while more wait asks
the loop to wake the next slot. That happens as soon as the handler awaits something, and not at all if it never
does.

A loop also has **guests**: awaitables that sync handlers returned. The slot's thread waits while its guest runs.
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
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

from commandbus.clock import monotonic
from commandbus.logger import safe_logger
from commandbus.worker.execution.attempt import Attempt

if TYPE_CHECKING:
    from commandbus.worker.execution.async_slots import AsyncSlots
    from commandbus.worker.execution.slots import Slot

logger = safe_logger("commandbus.worker")

BREATH = 64  # attempts that a slot runs before it lets the loop breathe, if its handlers never await
BEAT_SECONDS = 0.25
PREPARE_SECONDS = 60.0  # a new loop that is not ready after that never will be, and nothing runs meanwhile


class AsyncSlot:
    """Where one async attempt at a time runs: a task, and its number on the board."""

    __slots__ = ("current", "has_share", "index", "is_over", "loop", "task")

    def __init__(self, index: int, loop: SlotLoop) -> None:
        self.index = index
        self.loop = loop
        self.current: Attempt | None = None
        self.has_share = False
        self.is_over = False  # its task has ended in order
        self.task: asyncio.Task[None] | None = None


class Guest(AsyncSlot):
    """The awaitable that a sync handler returned, as the ladder sees it. The thread of its slot, `host`, waits."""

    __slots__ = ("_ended", "host")

    def __init__(self, attempt: Attempt, host: Slot, loop: SlotLoop) -> None:
        super().__init__(host.index, loop)
        self.current = attempt
        self.is_over = True  # nobody revives its task
        self.host = host
        self._ended: Future[tuple[Any, BaseException | None]] = Future()

    def wait(self) -> tuple[Any, BaseException | None]:
        """In the host's thread: wait for its end. Returns its result, or what it raised."""
        return self._ended.result()

    def end(self, result: Any, error: BaseException | None) -> None:
        """Its end; only the first one counts: it may have been given up before."""
        with contextlib.suppress(InvalidStateError):
            self._ended.set_result((result, error))

    def give_up(self) -> None:
        """The ladder has taken its attempt: let the thread that waits go, and give the host a new one."""
        self.end(None, None)
        self.host.lane.replace(self.host)


_kept: list[object] = []
"""Selectors whose descriptors somebody has closed: collected as garbage, they would close another's."""


class SlotLoop:
    """One event loop, its thread and its slots."""

    is_callers = False  # is it the application's?

    def __init__(self, lane: AsyncSlots, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.lane = lane
        self.slots: list[AsyncSlot] = []
        self.loop = loop or _new_loop()
        self.thread = threading.Thread(target=self._serve, name=f"{name}-loop", daemon=True)
        self.beat_at = monotonic()
        self.is_retired = False
        self.is_copy = False
        self.is_missed = False  # was it logged that there is no new loop instead of it?
        self.prepare: Callable[[], Awaitable[None]] | None = None  # awaited before its slots are made
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

    def join(self, timeout: float) -> None:
        """Wait until it has ended."""
        self.thread.join(timeout)

    def leave_to_parent(self) -> None:
        """This is the copy of a process that forked: end it as soon as the handler lets go of the loop."""
        self.is_copy = True
        self.retire()

    def blocker(self) -> Attempt | None:
        """The attempt whose code the loop is executing at this moment."""
        task = asyncio.current_task(self.loop)
        return next((slot.current for slot in self.slots if slot.task is task), None) if task is not None else None

    def add_slot(self, index: int, has_share: bool = False) -> None:  # noqa: FBT001 - called by the loop
        """A slot more, on the loop's thread."""
        slot = AsyncSlot(index, self)
        slot.has_share = has_share
        self.slots = [other for other in self.slots if other.index != index] + [slot]
        context = self._clean.copy()
        slot.task = self.loop.create_task(self._work(slot), name=f"slot-{index}", context=context)
        slot.task.add_done_callback(functools.partial(self._revive, slot))

    def replace(self, slot: AsyncSlot) -> None:
        """A new task for a slot, which keeps its share of the concurrency budget, on the loop's thread."""
        if slot in self.slots and not self.is_retired:
            with self.lane.moving:
                had, slot.has_share = slot.has_share, False
            slot.is_over = True
            self.add_slot(slot.index, had)

    def run_guest(self, guest: Guest, awaitable: Awaitable[Any], context: contextvars.Context) -> None:
        """Run what a sync handler returned, with the context variables that the handler had set."""
        self.call(self._admit, guest, awaitable, context)

    def _admit(self, guest: Guest, awaitable: Awaitable[Any], context: contextvars.Context) -> None:
        self.slots = [*self.slots, guest]
        name = f"guest of slot-{guest.index}"
        guest.task = self.loop.create_task(self._finish(guest, awaitable), name=name, context=context)

    async def _finish(self, guest: Guest, awaitable: Awaitable[Any]) -> None:
        try:
            guest.end(await awaitable, None)
        except BaseException as error:  # noqa: BLE001 - SystemExit and the like end the attempt, not the loop
            guest.end(None, error)
        finally:
            guest.current = None
            self.slots = [slot for slot in self.slots if slot is not guest]

    def _revive(self, slot: AsyncSlot, _: asyncio.Task[None]) -> None:
        """A handler may have kept its task, and canceled it when it was no longer its own."""
        if not slot.is_over:
            self.replace(slot)

    def _begin(self) -> None:
        """On the loop's thread: make the slots, now or when it is prepared."""
        self._clean = contextvars.copy_context()
        if self.prepare is None:
            self._make_slots()
        else:
            self.loop.call_later(0, self._start_preparing)  # when nobody waits for the start of this loop any more
        self._beat()

    def _make_slots(self) -> None:
        lane = self.lane
        for index in range(lane.first, lane.first + lane.budget.total):
            lane.on_thread(index)
            self.add_slot(index)

    def _start_preparing(self) -> None:
        self._preparing = self.loop.create_task(self._prepare())

    async def _prepare(self) -> None:
        try:
            if self.prepare is not None:
                async with asyncio.timeout(PREPARE_SECONDS):
                    await self.prepare()
        except Exception as error:  # noqa: BLE001 - without it, no attempt can run here
            self.lane.on_failed(error)
        else:
            self._make_slots()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._begin()
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
        if self.is_retired:
            return
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
            slot.has_share = not self.is_retired
        if slot.has_share:
            woken.set_result(None)
        else:
            lane.budget.give(lane)

    async def _work(self, slot: AsyncSlot) -> None:
        lane, waiting = self.lane, self.lane.waiting
        breath = 0
        if not slot.has_share:
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
        """Return the share of the concurrency budget, and wait to be woken with one."""
        woken = self.loop.create_future()
        self._idle.append((slot, woken))
        self.lane.give_share(slot)
        if self.lane.waiting:
            self.ask_to_wake()
        await woken


class CallersLoop(SlotLoop):
    """The application's event loop. It is the application's to run: nothing here starts, stops or closes it.

    If it is blocked for too long, what ran there is given up, and the slots begin anew on the same loop as soon as
    it runs again. `is_retired` ends one such life.
    """

    is_callers = True

    def __init__(self, lane: AsyncSlots, name: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(lane, name, loop)
        self._over = threading.Event()
        self._left: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """The slots are there when the loop comes to it; whatever is asked of it later comes later."""
        self.call(self._enter)

    def retire(self) -> None:
        """Cancel its slots, if the loop ever comes to it."""
        self.is_retired = True
        self.call(self._end)

    def join(self, timeout: float) -> None:
        """Wait until its slots have ended."""
        if not self.loop.is_closed():
            self._over.wait(timeout)

    def leave_to_parent(self) -> None:
        """In a forked copy, nothing of it is ours to end."""
        self.is_retired = True

    def _enter(self) -> None:
        self.thread = threading.current_thread()
        if not self.is_retired:
            self._begin()

    def _end(self) -> None:
        self._left = {slot.task for slot in self.slots if slot.task is not None and not slot.task.done()}
        for task in list(self._left):
            task.add_done_callback(self._gone)
            task.cancel()
        if not self._left:
            self._over.set()

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._left.discard(task)
        if not self._left:
            self._over.set()


def _new_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    with contextlib.suppress(AttributeError):  # a loop that is no Python object has a clock of its own
        loop.time = monotonic  # type: ignore[method-assign]
    return loop
