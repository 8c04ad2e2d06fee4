"""ChunkGathering: collects the claimed commands of chunk handlers until a chunk is full, or its time has come.

A chunk starts when `chunk` commands of its type are here, or `chunk_wait` after the first of them came. Nobody
polls: the claimer's next delivery fills a chunk, and one thread sleeps until the first incomplete chunk is due.

The commands wait here leased and renewed. They hold no slot, but a chunk that is due soon reserves one. `rows`
tells the claimer how many commands to claim for its free slots: with chunks a slot takes many. The claimer cannot
choose types, so it learns from each delivery how many slots a row takes (`_Mix`). It begins with chunks if all
handlers of a domain are chunk handlers. Commands that run by themselves there take a slot each.

Threads: the claimer calls `add`, `rows`, `slots_for`, `reserved` and `wants_more`. Any thread may call `take_back`
and `flush`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from commandbus.clock import monotonic
from commandbus.flow.commands.claimed_row import IS_PROBE, QUARANTINE, SUSPECT
from commandbus.logger import safe_logger
from commandbus.model.chunk import ChunkOptions
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.execution.chunk import Chunk
from commandbus.worker.execution.handlers import Handler
from commandbus.worker.execution.wrapped_handlers import WrappedHandlers

logger = safe_logger("commandbus.worker")

GROWTH: Final = 8
"""A claim may be so many times as large as the chunk commands of the one before it."""
FEW_SLOTS: Final = 0.1
"""If a row takes fewer slots than this, incomplete chunks are filled even if no slot is free for anything else."""
PREFETCHED: Final = 2000
SOON_SECONDS: Final = 0.1


def may_join(attempt: Attempt) -> bool:
    """May it run in a chunk? Suspects, commands in quarantine, probes of breakers and commands whose chunk failed
    run by themselves."""
    row = attempt.row
    is_apart = row[SUSPECT] is not None or row[QUARANTINE] or row[IS_PROBE]
    return not is_apart and not attempt.options.is_single


class ChunkGathering:
    """The incomplete chunks of one worker. `push` takes a Chunk, or a single attempt, to the slots."""

    def __init__(self, handlers: WrappedHandlers, *, concurrency: int, push: Callable[[Attempt], None], name: str):
        self._push = push
        self._waiting: dict[int, _Gathered] = {
            id(handler): _Gathered(handler.domain, handler.options.chunk)
            for handler in handlers
            if handler.options.chunk is not None
        }
        self._mixes = _mixes(handlers)
        largest = max((each.options.size for each in self._waiting.values()), default=0)
        self.most_held = PREFETCHED + 2 * concurrency * largest
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name=f"{name}-chunks", daemon=True)

    @property
    def is_used(self) -> bool:
        """Are there chunk handlers?"""
        return bool(self._waiting)

    def start(self) -> None:
        """Start the thread that looks at the time, if there are chunk handlers."""
        if self.is_used:
            self._thread.start()

    def stop(self) -> None:
        """End it."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    @property
    def has_ended(self) -> bool:
        """Has the thread ended by itself?"""
        return self._thread.ident is not None and not self._stopping and not self._thread.is_alive()

    # --- commands ----------------------------------------------------------------------------------------------

    def takes(self, attempt: Attempt) -> bool:
        """May it run in a chunk? One of a handler that was registered after the start runs by itself."""
        return id(attempt.handler) in self._waiting and may_join(attempt)

    def add(self, attempts: Iterable[Attempt]) -> None:
        """Chunk commands have come. Full chunks go to the slots at once."""
        full: list[Attempt] = []
        with self._changed:
            was_due = self._next_due()
            for attempt in attempts:
                full += self._waiting[id(attempt.handler)].add(attempt)
            if self._next_due() != was_due:
                self._changed.notify()
        for chunk in full:
            self._push(chunk)

    def flush(self) -> None:
        """Start incomplete chunks now: nothing more will come."""
        self._release(lambda gathered: bool(gathered.attempts))

    def take_back(self) -> list[Attempt]:
        """Everything that waits here."""
        with self._changed:
            return [attempt for gathered in self._waiting.values() for attempt in gathered.take_all()]

    def leave_to_parent(self) -> None:
        """This process was forked without exec: everything that waits here belongs to its parent."""
        self._changed = threading.Condition()  # the parent's may be held by a thread that does not exist here
        self.take_back()

    def _release(self, is_ready: Callable[[_Gathered], bool]) -> None:
        with self._changed:
            ready = [gathered.take() for gathered in self._waiting.values() if is_ready(gathered)]
        for chunk in ready:
            self._push(chunk)

    # --- room --------------------------------------------------------------------------------------------------

    @property
    def reserved(self) -> int:
        """How many slots the incomplete chunks will take soon. One that waits longer keeps no slot from others."""
        soon = monotonic() + SOON_SECONDS
        return sum(bool(gathered.attempts) and gathered.due_at <= soon for gathered in self._waiting.values())

    @property
    def is_gathering(self) -> bool:
        """Does anything wait here?"""
        return any(gathered.attempts for gathered in self._waiting.values())

    @property
    def wants_more(self) -> bool:
        """Is there an incomplete chunk that a claim would fill, and little else?"""
        return any(self._missing(domain) for domain in self._mixes)

    def rows(self, domain: str, room: int) -> int:
        """How many rows of a domain to claim for so many free slots."""
        mix = self._mixes.get(domain)
        return room if mix is None else mix.rows(room) + self._missing(domain)

    def slots_for(self, domain: str, rows: int) -> int:
        """How many slots these rows of a domain have probably taken."""
        mix = self._mixes.get(domain)
        return rows if mix is None else -int(-rows * mix.slots_per_row // 1)

    def note(self, domain: str, rows: int, slots: int, chunked: Sequence[Attempt]) -> None:
        """So many rows were delivered: some of them to slots of their own, these to chunks."""
        mix = self._mixes.get(domain)
        if mix is not None and rows:
            mix.note(rows, slots + sum(1 / self._waiting[id(each.handler)].options.size for each in chunked))
            mix.trusted = GROWTH * len(chunked)

    def _missing(self, domain: str) -> int:
        mix = self._mixes.get(domain)
        if mix is None or mix.slots_per_row > FEW_SLOTS:
            return 0
        return sum(
            gathered.options.size - len(gathered.attempts)
            for gathered in self._waiting.values()
            if gathered.domain == domain and gathered.attempts
        )

    # --- time --------------------------------------------------------------------------------------------------

    def _next_due(self) -> float | None:
        return min((gathered.due_at for gathered in self._waiting.values() if gathered.attempts), default=None)

    def _serve(self) -> None:
        while self._wait_until_due():
            try:
                self._release(_Gathered.is_due)
            except Exception:
                logger.exception("an incomplete chunk could not be started")  # the next one may be

    def _wait_until_due(self) -> bool:
        """Returns False if the worker stops."""
        with self._changed:
            while not self._stopping:
                due = self._next_due()
                left = None if due is None else due - monotonic()
                if left is not None and left <= 0:
                    return True
                self._changed.wait(left)
        return False


class _Gathered:
    """The incomplete chunk of one handler."""

    def __init__(self, domain: str, options: ChunkOptions) -> None:
        self.domain = domain
        self.options = options
        self.attempts: list[Attempt] = []
        self.due_at = 0.0

    def is_due(self) -> bool:
        """Is its time over?"""
        return bool(self.attempts) and self.due_at <= monotonic()

    def add(self, attempt: Attempt) -> list[Attempt]:
        """Returns the chunk, if it is full now."""
        if not self.attempts:
            self.due_at = monotonic() + self.options.wait
        self.attempts.append(attempt)
        return [self.take()] if len(self.attempts) >= self.options.size else []

    def take(self) -> Attempt:
        """What is here, as a chunk; a single one stays what it is."""
        taken = self.take_all()
        return taken[0] if len(taken) == 1 else Chunk(taken)

    def take_all(self) -> list[Attempt]:
        taken, self.attempts = self.attempts, []
        return taken


class _Mix:
    """How many slots a claimed row of a domain takes: 1 for a single command, 1/100 for a member of a chunk of
    100."""

    def __init__(self, slots_per_row: float, trusted: int) -> None:
        self.slots_per_row = slots_per_row
        self.trusted = trusted  # how many rows may be claimed for fewer slots

    def rows(self, room: int) -> int:
        """How many rows to claim for so many slots. What a few rows have shown is not trusted with hundreds."""
        return min(int(room / self.slots_per_row), max(room, self.trusted))

    def note(self, rows: int, slots: float) -> None:
        """More slots per row count at once, fewer by and by."""
        found = min(1.0, slots / rows)
        self.slots_per_row = max(found, (self.slots_per_row + found) / 2)


def _mixes(handlers: WrappedHandlers) -> dict[str, _Mix]:
    """By domain, where there are chunk handlers."""
    mixes = {}
    for domain in handlers.domains:
        own: list[Handler] = [handler for handler in handlers if handler.domain == domain]
        sizes = [handler.options.chunk.size for handler in own if handler.options.chunk is not None]
        if sizes:
            is_pure = len(sizes) == len(own)
            mixes[domain] = _Mix(1 / min(sizes), trusted=PREFETCHED) if is_pure else _Mix(1.0, trusted=0)
    return mixes
