"""The slots of sync handlers: daemon threads, each running one attempt at a time.

Not every slot is awake. Threads that compete for the GIL make everything slower, so only as many are awake as the
handlers need. A separate thread checks that while work waits, and `worker/execution/slot_pacing.py` decides.

A slot whose attempt was declared stuck gets a new thread. The old thread ends as soon as its handler lets it:
`run`
returns False.

Every attempt starts with the context variables that the slot began with. Thread-locals stay (ADR 10).
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from commandbus.clock import monotonic
from commandbus.logger import safe_logger
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.execution.concurrency import ConcurrencyBudget
from commandbus.worker.execution.slot_pacing import SlotPacing

if TYPE_CHECKING:
    from commandbus.worker.execution.slot_loop import Guest

logger = safe_logger("commandbus.worker")


class Slots:
    """N threads and the queue of attempts before them."""

    def __init__(
        self,
        budget: ConcurrencyBudget,
        run: Callable[[Attempt, Slot], bool],
        *,
        name: str,
        on_thread: Callable[[int], None],
        first: int = 0,
    ) -> None:
        self.is_hungry = False
        self.waiting: deque[Attempt] = deque()
        self.finished = 0
        self._budget = budget
        self._run = run
        self._name = name
        self._first = first
        self._on_thread = on_thread
        self._idle: deque[Slot] = deque()
        self._threadless: deque[Slot] = deque()  # replaced, and without a thread yet; the ladder's thread alone
        self._pace = SlotPacing(budget.total)
        self._surplus = 0  # how many slots must go to sleep although work waits
        self._tick_wanted = threading.Event()
        self._stopping = False
        self._alone = True
        budget.join(self)

    def start(self) -> None:
        """Start the threads; they sleep."""
        for index in range(self._first, self._first + self._budget.total):
            slot = Slot(index, self)
            self._idle.append(slot)
            self._start_thread(self._work, slot, name=f"{self._name}-slot-{index}")
        self._start_thread(self._tick, name=f"{self._name}-ticker")

    def replace(self, stuck: Slot) -> None:
        """A new thread for the slot of a stuck attempt. It keeps the slot's unit of the budget, and looks for
        work."""
        if self._stopping:
            self._budget.give(self)
            return
        slot = Slot(stuck.index, self)
        slot.wake.release()
        self._threadless.append(slot)
        self.tend()

    def tend(self) -> None:
        """Start the threads of replaced slots. If the system has none left, the ladder's next tick tries again."""
        while self._threadless:
            slot = self._threadless[0]
            try:
                self._start_thread(self._work, slot, name=f"{self._name}-slot-{slot.index}")
            except RuntimeError as error:
                if not slot.is_missed:
                    slot.is_missed = True
                    logger.warning("slot %d has no thread, trying again: %s", slot.index, error)
                return
            self._threadless.popleft()

    def share_with_others(self) -> None:
        """Another lane runs beside this one: look whether it is hungry."""
        self._alone = False

    def push(self, attempts: Sequence[Attempt], *, are_first: bool = False) -> None:
        """Queue attempts, before the others if they are of high priority. If all of them fit into idle slots, they
        start now; else as many as the pace allows."""
        if are_first:
            self.waiting.extendleft(reversed(attempts))
        else:
            self.waiting.extend(attempts)
        waiting, idle = len(self.waiting), len(self._idle)
        wanted = waiting if waiting <= idle else self._pace.level - (self._budget.total - idle)
        woken = sum(self._wake_one() for _ in range(wanted))
        # If each has its slot, the ticker would only take the GIL first.
        if self.waiting and woken < waiting:
            self._tick_wanted.set()

    def wake_one(self) -> None:
        """Wake a slot if there is work, an idle slot, and room in the budget."""
        self._wake_one()

    def _wake_one(self) -> bool:
        if not self.waiting or not self._idle or not self._budget.take(self):
            return False
        try:
            slot = self._idle.popleft()
        except IndexError:
            self._budget.give(self)
            return False
        slot.wake.release()
        return True

    def take_back(self) -> list[Attempt]:
        """Everything that has not started."""
        back = []
        while True:
            try:
                back.append(self.waiting.popleft())
            except IndexError:
                return back

    def stop(self) -> None:
        """Let idle threads end. A busy one ends after its attempt; all are daemon threads, if one never ends."""
        self._stopping = True
        self._tick_wanted.set()
        while self._idle:
            self._idle.popleft().wake.release()

    def _start_thread(self, target: Callable[..., None], *args: object, name: str) -> None:
        threading.Thread(target=target, args=args, name=name, daemon=True).start()

    def _work(self, slot: Slot) -> None:
        waiting, run = self.waiting, self._run
        slot.ident = threading.get_ident()
        self._on_thread(slot.index)
        clean = contextvars.copy_context()
        slot.wake.acquire()
        while not self._stopping:
            try:
                attempt = waiting.popleft()
            except IndexError:
                self._sleep(slot)
                continue
            if not clean.copy().run(run, attempt, slot):
                return  # declared stuck: another thread has taken over
            self.finished += 1  # approximate under races; used for rates only
            if self._surplus > 0:
                self._doze(slot)
            if not self._alone and self._budget.others_hungry(self):
                self._sleep(slot)

    def _sleep(self, slot: Slot) -> None:
        """Return the unit of the budget and wait to be woken, unless work arrived at the last moment."""
        self._idle.append(slot)
        self._budget.give(self)
        # A push that came before the append saw one idle slot fewer and may have woken nobody.
        if self.waiting:
            self.wake_one()
        slot.wake.acquire()

    def _doze(self, slot: Slot) -> None:
        """Sleep although work waits: the others are enough."""
        self._surplus -= 1  # two may do this at once: then one too many sleeps until the next look
        self._idle.append(slot)
        self._budget.give(self)
        if self.waiting and len(self._idle) >= self._budget.total:
            self.wake_one()
        slot.wake.acquire()

    def _tick(self) -> None:
        pause = 0.0
        while not self._stopping:
            if not self.waiting:
                self._surplus = 0
                self._tick_wanted.clear()
                if not self.waiting:
                    self._tick_wanted.wait()
                pause = self._pace.begin(monotonic(), self.finished)
            time.sleep(pause)
            awake = self._budget.total - len(self._idle)
            pause = self._pace.look(monotonic(), self.finished, awake)
            self._surplus = max(0, awake - self._pace.level)
            for _ in range(self._pace.level - awake):
                self.wake_one()


class Slot:
    """Where one attempt at a time runs: a thread, and its number on the board."""

    __slots__ = ("guest", "ident", "index", "is_missed", "lane", "wake")

    def __init__(self, index: int, lane: Slots) -> None:
        self.index = index
        self.lane = lane
        self.guest: Guest | None = None  # what its handler returned, while that runs on the event loop
        self.ident = 0
        self.is_missed = False  # was it logged that it has no thread?
        self.wake = threading.Lock()
        self.wake.acquire()
