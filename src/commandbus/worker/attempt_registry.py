"""The AttemptRegistry: what this worker holds, what runs, and in which slot.

    held       claimed and not settled yet. The lease keeper renews these.
    starting   waits for a child process, or is about to run in it.
    running    runs now. The ladder looks after these.

The thread that takes an attempt out of `running` owns its settlement: the slot, when the handler ends (`end`), or
the ladder, when it gives the attempt up (`take`). One `dict.pop` decides between them.

Threads: the claimer adds to `held`. A slot calls `begin` and `end`. The ladder calls `take`. The thread that
writes an outcome, or learns that there is none to write, calls `release`. Any thread may read; iterate over a
copy. Nothing here waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from commandbus.clock import monotonic
from commandbus.worker.execution.async_slots import AsyncSlot
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.execution.slots import Slot
from commandbus.worker.isolation.quarantine import Quarantine

if TYPE_CHECKING:
    from commandbus.worker.board_writer import BoardWriter
    from commandbus.worker.counts_page import CountsPage
    from commandbus.worker.running_file import RunningFile

Running = dict[Attempt, Slot | AsyncSlot]


class AttemptRegistry:
    """The attempts of one worker. A worker without a supervisor has no board."""

    def __init__(
        self,
        running: Running,
        quarantine: Quarantine,
        board_writer: BoardWriter | None,
        counts: CountsPage,
        running_file: RunningFile | None = None,
    ) -> None:
        self.held: set[Attempt] = set()
        self.starting: set[Attempt] = set()
        self.running = running
        self._quarantine = quarantine
        self._board_writer = board_writer
        self._counts = counts
        self._running_file = running_file
        self.looks_at = math.inf  # when the ladder looks next
        self.wake_ladder: Callable[[], None] = lambda: None

    def begin(self, attempt: Attempt, slot: Slot | AsyncSlot) -> None:
        """It runs from now on, in this slot."""
        self.running[attempt] = slot
        if attempt.deadline_at < self.looks_at:
            self.wake_ladder()
        if self._running_file is not None:
            self._running_file.enter(slot.index, attempt.domain, attempt.msg_id)
        if self._board_writer is not None:
            self._board_writer.enter(attempt, slot.index)

    def begin_chunk(self, chunk: Attempt, slot: Slot | AsyncSlot) -> None:
        """Its members run from now on, in this slot. If the worker dies, all of them count as running."""
        self.running[chunk] = slot
        if chunk.deadline_at < self.looks_at:
            self.wake_ladder()
        if self._running_file is not None:
            msg_ids = [member.msg_id for member in chunk.members]
            self._running_file.enter_chunk(slot.index, chunk.domain, msg_ids)
        if self._board_writer is not None:
            self._board_writer.enter(chunk, slot.index)

    def end(self, attempt: Attempt, slot: Slot | AsyncSlot) -> bool:
        """Its handler has ended. False if the ladder has given the attempt up, and its slot away."""
        if self.running.pop(attempt, None) is None:
            return False
        attempt.ran = monotonic() - attempt.started_at
        # It is over: the ladder ignores it, and threads that it left behind get no connection.
        attempt.started_at = 0.0
        if self._running_file is not None:
            self._running_file.leave(slot.index)
        if self._board_writer is not None:
            self._board_writer.end(slot.index)
        return True

    def take(self, attempt: Attempt) -> Slot | AsyncSlot | None:
        """Take it from its handler, and let it have no more connections. Returns its slot; None if it has just
        ended."""
        slot = self.running.pop(attempt, None)
        if slot is not None:
            attempt.bar()
            note_ran(attempt, monotonic() - attempt.started_at)
        return slot

    def release(self, attempt: Attempt) -> None:
        """Its outcome is written, or another worker has it by now."""
        if attempt.is_lost and attempt in self.held:
            self._counts.lease_lost()
        self.held.discard(attempt)
        self._quarantine.leave(attempt)

    def leave_to_parent(self) -> None:
        """This process was forked without exec: everything that runs or waits here belongs to its parent."""
        for attempt in list(self.running):
            attempt.bar()
            if attempt.borrowed is not None:
                attempt.borrowed.cut()
        self.running.clear()
        self.held.clear()
        self._quarantine.take_back()


def note_ran(attempt: Attempt, seconds: float) -> None:
    """It ran for so long. Each member of a chunk counts its share, so that the sum is the time of its slot."""
    for each in attempt.each:
        each.ran = seconds / len(attempt.each)
