"""ChunkRunner: runs chunks in slots, as the Dispatcher runs single attempts.

Before a chunk starts, each member is checked as a single attempt is. A member whose lease is not certain, that was
asked to stop, or that has expired does not run; the others do. The chunk takes one slot, as one attempt does.

Threads: `run` and `run_async` are called by slots.
"""

from __future__ import annotations

from collections.abc import Callable

from commandbus.flow.commands.settle import Settlement
from commandbus.worker.attempt_registry import AttemptRegistry, note_ran
from commandbus.worker.breakers import WorkerBreakers
from commandbus.worker.deadlines.fencer import Fencer
from commandbus.worker.execution.async_slots import AsyncSlot
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.execution.chunk import Chunk
from commandbus.worker.execution.chunk_execute import ChunkExecutor, Ends
from commandbus.worker.execution.execute import LimitDecides
from commandbus.worker.execution.slots import Slot
from commandbus.worker.limits import LimitedWork
from commandbus.worker.settler import Settler


class ChunkRunner:
    """Runs the chunks of one worker. `may_start` says whether a member may start; if not, it has dealt with it."""

    def __init__(
        self,
        attempts: AttemptRegistry,
        executor: ChunkExecutor,
        fencer: Fencer,
        limited: LimitedWork,
        settler: Settler,
        breakers: WorkerBreakers,
        *,
        may_start: Callable[[Attempt], bool],
    ) -> None:
        self._attempts = attempts
        self._executor = executor
        self._fencer = fencer
        self._limited = limited
        self._settler = settler
        self._breakers = breakers
        self._may_start = may_start

    def ready(self, chunk: Chunk) -> list[Attempt]:
        """The members that may start now."""
        ready = [member for member in chunk.members if self._may_start(member)]
        if len(ready) > 1:
            chunk.keep(ready)
        return ready

    def run(self, chunk: Chunk, slot: Slot) -> bool:
        """In a slot's thread. Returns False if the ladder has given the chunk up, and its slot away."""
        self._begin(chunk, slot)
        return self._end(chunk, slot, self._executor.run(chunk))

    async def run_async(self, chunk: Chunk, slot: AsyncSlot) -> bool:
        """The same on the event loop."""
        self._begin(chunk, slot)
        return self._end(chunk, slot, await self._executor.run_async(chunk))

    def _begin(self, chunk: Chunk, slot: Slot | AsyncSlot) -> None:
        self._executor.begin(chunk)
        self._attempts.begin_chunk(chunk, slot)

    def _end(self, chunk: Chunk, slot: Slot | AsyncSlot, ends: Ends) -> bool:
        if not self._attempts.end(chunk, slot):
            return False
        if chunk.borrowed is not None:
            self._fencer.end_leftover(chunk, chunk.borrowed)
        note_ran(chunk, chunk.ran)
        for member, ended in ends:
            member.started_at = 0.0
            if not isinstance(ended, Settlement) or ended.is_completion:
                self._breakers.completed(member)
            if isinstance(ended, LimitDecides):
                self._limited.finished(member, ended)
            else:
                self._settler.add(member, ended)
        return True
