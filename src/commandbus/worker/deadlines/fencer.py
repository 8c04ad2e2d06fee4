"""The Fencer: settles attempts that did not end by themselves, after nothing they do can be saved any more.

In order: the attempt's permits stay taken until their leases end, because its calls may still be under way; the
lease keeper ends its database session; the pool gets back what it held; and only then does the settler get its
outcome.

Threads: the ladder calls `fence` and `set_aside`, a slot calls `end_leftover`. What follows the end of the
session runs on the lease keeper's thread.
"""

from __future__ import annotations

from commandbus.logger import safe_logger
from commandbus.model.outcome import Failure
from commandbus.worker.attempt_registry import AttemptRegistry
from commandbus.worker.deadlines import autopsy
from commandbus.worker.deadlines.ladder import Document
from commandbus.worker.execution.attempt import Attempt, Stop, Why
from commandbus.worker.execution.chunk import Chunk
from commandbus.worker.execution.chunk_execute import ChunkExecutor
from commandbus.worker.execution.connections import Borrowed, HandlerConnections
from commandbus.worker.execution.execute import Executor
from commandbus.worker.lease_keeper import LeaseKeeper
from commandbus.worker.limits import LimitedWork
from commandbus.worker.settler import Settler

logger = safe_logger("commandbus.worker")


class Fencer:
    """Fences the attempts of one worker."""

    def __init__(
        self,
        attempts: AttemptRegistry,
        keeper: LeaseKeeper,
        connections: HandlerConnections,
        executor: Executor,
        chunk_executor: ChunkExecutor,
        limited: LimitedWork,
        settler: Settler,
    ) -> None:
        self._attempts = attempts
        self._keeper = keeper
        self._connections = connections
        self._executor = executor
        self._chunk_executor = chunk_executor
        self._limited = limited
        self._settler = settler

    def fence(self, attempt: Attempt, stop: Stop, taken: Document) -> None:
        """It is stuck."""
        borrowed = attempt.borrowed
        if attempt.limit_use is not None:
            is_late = stop.why is Why.DEADLINE
            attempt.limit_use.abandoned(is_late=is_late, reason="timeout: the attempt is stuck")

        def settle(document: Document) -> None:
            self._write_off(attempt, borrowed)
            if isinstance(attempt, Chunk):
                for member, ended in self._chunk_executor.give_up(attempt, stop, autopsy.to_json(document)):
                    self._limited.finished(member, ended)
            elif attempt.is_lost:
                # Another worker has it by now, so nothing is written about it here.
                self._attempts.release(attempt)
            else:
                ended = self._executor.give_up(attempt, stop, autopsy.to_json(document))
                self._limited.finished(attempt, ended)

        self._keeper.fence(attempt, taken, settle)

    def set_aside(self, attempt: Attempt, failure: Failure, *, suspect: bool) -> None:
        """A bystander of a blocked event loop, or one of several that may have blocked it."""
        borrowed = attempt.borrowed
        if attempt.limit_use is not None:
            attempt.limit_use.abandoned(is_late=False, reason="a neighbor blocked the event loop")

        def settle(_: Document) -> None:
            self._write_off(attempt, borrowed)
            for each in attempt.each:
                self._settler.add(each, self._executor.waive(each, failure, suspect=suspect))

        self._keeper.fence(attempt, {}, settle)

    def end_leftover(self, attempt: Attempt, borrowed: Borrowed) -> None:
        """Its handler has ended, and a thread or task that it left behind still holds its connection."""
        logger.warning(
            "%s %s has ended, but code that it left behind holds its connection: that session is ended, too",
            attempt.command_type,
            attempt.command_id,
            extra={"domain": attempt.domain, "command_id": attempt.command_id},
        )
        self._keeper.fence(attempt, {}, lambda _: self._connections.write_off(borrowed))

    def _write_off(self, attempt: Attempt, borrowed: Borrowed | None) -> None:
        """It was abandoned: the pool gets back the connection that it held or waits for."""
        self._connections.wait_no_more(attempt)
        if borrowed is not None:
            self._connections.write_off(borrowed)
