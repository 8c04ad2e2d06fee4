"""The lane of sync handlers: daemon threads, each running one attempt at a time.

Slots are woken lazily. A handler that does nothing takes some 20 µs, and threads that compete for the GIL make
everything slower (64 eager slots: 0.4 of one), so one awake slot drains the queue, and a ticker wakes more while
work waits and the awake ones are slow: twice as many every 2 ms, so that handlers that do wait soon have all
slots.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from commandbus.runtime.attempt import Attempt
from commandbus.runtime.places import Places

logger = logging.getLogger("commandbus.worker")

TICK_SECONDS = 0.002
SLOW_SECONDS = 0.0003


class Slots:
    """N threads and the queue of attempts before them."""

    def __init__(self, places: Places, run: Callable[[Attempt], None], *, name: str) -> None:
        self.is_hungry = False
        self.waiting: deque[Attempt] = deque()
        self.finished = 0
        self._places = places
        self._run = run
        self._name = name
        self._idle: deque[_Slot] = deque()
        self._threads: list[threading.Thread] = []
        self._tick_wanted = threading.Event()
        self._stopping = False
        self._alone = True
        places.join(self)

    def start(self) -> None:
        """Start the threads; they sleep."""
        for index in range(self._places.total):
            slot = _Slot()
            self._idle.append(slot)
            self._start_thread(self._work, slot, name=f"{self._name}-slot-{index}")
        self._start_thread(self._tick, name=f"{self._name}-ticker")

    def share_with_others(self) -> None:
        """Another lane runs beside this one: look whether it is hungry."""
        self._alone = False

    def push(self, attempts: Iterable[Attempt]) -> None:
        """Queue attempts. What fits into idle slots starts now; the rest is for the awake ones and the ticker."""
        self.waiting.extend(attempts)
        idle = len(self._idle)
        if idle == self._places.total or len(self.waiting) <= idle:
            for _ in range(min(len(self.waiting), idle) if len(self.waiting) <= idle else 1):
                self.wake_one()
        if self.waiting and self._idle:
            self._tick_wanted.set()

    def wake_one(self) -> None:
        """Wake a slot if there is work, an idle slot and a place."""
        if not self.waiting or not self._idle or not self._places.take(self):
            return
        try:
            slot = self._idle.popleft()
        except IndexError:
            self._places.give(self)
            return
        slot.wake.release()

    def take_back(self) -> list[Attempt]:
        """Everything that has not started."""
        back = []
        while True:
            try:
                back.append(self.waiting.popleft())
            except IndexError:
                return back

    def stop(self) -> None:
        """Let idle threads end; a busy one ends after its attempt (it is a daemon thread, should it never)."""
        self._stopping = True
        self._tick_wanted.set()
        while self._idle:
            self._idle.popleft().wake.release()

    def _start_thread(self, target: Callable[..., None], *args: object, name: str) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _work(self, slot: _Slot) -> None:
        waiting = self.waiting
        slot.wake.acquire()
        while not self._stopping:
            try:
                attempt = waiting.popleft()
            except IndexError:
                self._sleep(slot)
                continue
            self._run(attempt)
            self.finished += 1  # approximate under races; used for rates only
            if not self._alone and self._places.others_hungry(self):
                self._sleep(slot)

    def _sleep(self, slot: _Slot) -> None:
        """Return the place and wait to be woken, unless work arrived at the last moment."""
        self._idle.append(slot)
        self._places.give(self)
        # A push that came before the append saw one idle slot fewer and may have woken nobody.
        if self.waiting:
            self.wake_one()
        slot.wake.acquire()

    def _tick(self) -> None:
        finished, at = self.finished, time.monotonic()
        while not self._stopping:
            if not self.waiting or not self._idle:
                self._tick_wanted.clear()
                if not self.waiting or not self._idle:
                    self._tick_wanted.wait(1.0)
                finished, at = self.finished, time.monotonic()
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            awake = self._places.total - len(self._idle)
            drained = self.finished - finished
            if self.waiting and (now - at) * max(awake, 1) > SLOW_SECONDS * drained:
                for _ in range(max(1, awake)):
                    self.wake_one()
            finished, at = self.finished, now


class _Slot:
    __slots__ = ("wake",)

    def __init__(self) -> None:
        self.wake = threading.Lock()
        self.wake.acquire()
