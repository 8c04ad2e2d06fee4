"""The lane of async handlers: one event loop in a thread of its own, and slot tasks on it.

Attempts run in slot tasks that live on, not in a task each. A slot that takes an attempt while more wait asks the
loop to wake the next one: that happens as soon as the handler awaits something, and not at all if it never does.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from commandbus.runtime.attempt import Attempt
from commandbus.runtime.places import Places

BREATH = 64  # attempts that a slot runs before it lets the loop breathe, if its handlers never await


class AsyncSlots:
    """N slot tasks and the queue of attempts before them."""

    def __init__(self, places: Places, run: Callable[[Attempt], Awaitable[None]], *, name: str) -> None:
        self.is_hungry = False
        self.waiting: deque[Attempt] = deque()
        self.finished = 0
        self._places = places
        self._run = run
        self._idle: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=f"{name}-loop", daemon=True)
        self._tasks: list[asyncio.Task[None]] = []
        self._wake_asked = False
        self._stopping = False
        self._alone = True
        self._ready = threading.Event()
        places.join(self)

    def start(self) -> None:
        """Start the loop and its slots."""
        self._thread.start()
        self._ready.wait()

    def share_with_others(self) -> None:
        """Another lane runs beside this one: look whether it is hungry."""
        self._alone = False

    def push(self, attempts: Iterable[Attempt]) -> None:
        """Queue attempts, from any thread."""
        self.waiting.extend(attempts)
        self.wake_one()

    def wake_one(self) -> None:
        """Ask the loop to wake a slot, from any thread."""
        if self.waiting and not self._wake_asked and not self._stopping:
            self._wake_asked = True
            self._loop.call_soon_threadsafe(self._wake)

    def take_back(self) -> list[Attempt]:
        """Everything that has not started."""
        back = []
        while True:
            try:
                back.append(self.waiting.popleft())
            except IndexError:
                return back

    def stop(self, timeout: float) -> None:
        """End the loop; what still runs on it is cancelled. A handler that blocks it is left behind."""
        if self._thread.is_alive():
            self._stopping = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        for index in range(self._places.total):
            self._tasks.append(self._loop.create_task(self._work(), name=f"slot-{index}"))
        self._loop.call_soon(self._ready.set)
        try:
            self._loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _wake(self) -> None:
        self._wake_asked = False
        if self.waiting and self._idle and self._places.take(self):
            self._idle.popleft().set_result(None)

    async def _work(self) -> None:
        waiting = self.waiting
        breath = 0
        await self._sleep()
        while True:
            try:
                attempt = waiting.popleft()
            except IndexError:
                self._places.give(self)
                await self._sleep()
                continue
            if waiting and self._idle and not self._wake_asked:
                self._wake_asked = True
                self._loop.call_soon(self._wake)
            await self._run(attempt)
            self.finished += 1
            breath += 1
            if breath >= BREATH:
                breath = 0
                await asyncio.sleep(0)
            if not self._alone and self._places.others_hungry(self):
                self._places.give(self)
                await self._sleep()

    async def _sleep(self) -> None:
        woken = self._loop.create_future()
        self._idle.append(woken)
        if self.waiting:
            self.wake_one()
        await woken
