"""Run a chunk and return how each of its members ended. Whatever the handler does, nothing escapes.

If the handler returns, each member ends as its outcome says, by the rules for single attempts. If it raises, hangs
or returns something else, nobody knows which member is to blame. Then nobody is charged, and each member is
marked: it runs by itself from now on, and is charged for what it does there. If the chunk was stopped from outside
(its worker ends, its leases could not be renewed), its members are not even marked.

A cancel request for one member does not stop the chunk. If the handler completes that member, it is completed;
otherwise it is CANCELED, as a single one is.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

from commandbus.errors import AttemptFencedError, DeadlineExceededError
from commandbus.logger import safe_logger
from commandbus.model.chunk import read_outcomes
from commandbus.model.outcome import Failure, describe
from commandbus.model.snooze import Snooze
from commandbus.worker import masking
from commandbus.worker.execution.attempt import Attempt, Stop, Why
from commandbus.worker.execution.chunk import Chunk
from commandbus.worker.execution.chunk_context import AsyncChunkContext, ChunkContext, become_async_chunk
from commandbus.worker.execution.context import Services
from commandbus.worker.execution.execute import Ended, Executor, Note, traceback_of
from commandbus.worker.execution.outcome_forecast import CANCELLATIONS
from commandbus.worker.exhaustion import ExhaustedError
from commandbus.worker.health import HealthStatus

logger = safe_logger("commandbus.worker")

Ends = list[tuple[Attempt, Ended]]
_BY_ITSELF = "not charged, and it runs by itself from now on"


class Everything:
    """A container of all attempts."""

    def __contains__(self, attempt: object) -> bool:
        return True


class ChunkExecutor:
    """Runs chunks for one worker. `members` judges what a single member did."""

    def __init__(
        self,
        services: Services,
        members: Executor,
        health: HealthStatus,
        *,
        running: Container[Attempt],
        await_on_loop: Callable[[Attempt, Awaitable[Any]], tuple[Any, BaseException | None]],
    ) -> None:
        self._services = services
        self._members = members
        self._health = health
        self._running = running
        self._await_on_loop = await_on_loop

    def begin(self, chunk: Chunk) -> None:
        """Stamp the start and the deadline: the earliest that one of its members would have."""
        for member in chunk.members:
            self._members.begin(member)
        first = chunk.members[0]
        chunk.started, chunk.started_at = first.started, first.started_at
        chunk.deadline_at = min(member.deadline_at for member in chunk.members)

    def run(self, chunk: Chunk) -> Ends:
        """Run a sync handler to its end."""
        ctx = ChunkContext(chunk, self._services)
        try:
            returned = self._function(chunk)(ctx.commands, ctx)
            if inspect.isawaitable(returned):
                become_async_chunk(ctx)
                returned, error = self._await_on_loop(chunk, returned)
                if error is not None:
                    return self._failed(chunk, error)
            return self._returned(chunk, returned)
        except BaseException as error:  # noqa: BLE001 - SystemExit and the like end the chunk, not the slot
            return self._failed(chunk, error)

    async def run_async(self, chunk: Chunk) -> Ends:
        """Run an async handler to its end."""
        ctx = AsyncChunkContext(chunk, self._services)
        try:
            return self._returned(chunk, await self._function(chunk)(ctx.commands, ctx))
        except BaseException as error:  # noqa: BLE001
            return self._failed(chunk, error)

    @staticmethod
    def _function(chunk: Chunk) -> Callable[..., Any]:
        assert chunk.handler is not None  # noqa: S101 - only attempts with a handler are gathered
        assert chunk.handler.many is not None  # noqa: S101
        return chunk.handler.many

    # --- the handler has ended ---------------------------------------------------------------------------------

    def _returned(self, chunk: Chunk, returned: object) -> Ends:
        if chunk not in self._running:
            return []  # it was abandoned as stuck, and its members were judged then
        if chunk.outcomes is None:
            outcomes = read_outcomes(returned, [member.command_id for member in chunk.members])
            return self._judge_each(chunk.members, outcomes)
        note = None
        if returned is not None:
            text = (
                "the chunk handler returned outcomes after its transaction had completed the commands: they were "
                "not stored; give them with tx.complete(outcomes)"
            )
            note = Failure("ReturnedTooLate", "RETURNED_TOO_LATE", text)
            logger.warning("%s", text, extra=chunk.log_fields)
        return self._after_commit(chunk, chunk.outcomes, note)

    def _failed(self, chunk: Chunk, error: BaseException) -> Ends:
        if chunk not in self._running:
            return []
        if chunk.outcomes is not None:
            text = f"raised {type(error).__name__} after its transaction had completed the commands: only noted"
            logger.warning("a chunk of %d %s", len(chunk.members), text, extra=chunk.log_fields)
            return self._after_commit(chunk, chunk.outcomes, describe(error, traceback_of(error)))
        stop = chunk.stop
        if stop is not None and isinstance(error, CANCELLATIONS):
            return self._stopped(chunk, stop, f"was asked to stop: {stop.text}", rung=stop.why)
        if isinstance(error, Snooze):
            return self._judge_each(chunk.members, [error] * len(chunk.members))
        failure = replace(describe(error, traceback_of(error)), error_code="CHUNK_FAILED")
        if isinstance(error, DeadlineExceededError):
            failure = replace(failure, error_code="CHUNK_TIMEOUT", rung=Why.DEADLINE)
        if isinstance(error, ExhaustedError):
            return self._waive(chunk, failure, f"could not run: {failure.error}", single=False)
        if isinstance(error, AttemptFencedError):
            return self._waive(chunk, failure, f"was given up: {failure.error}", single=True)
        self._health.record_failure(error)
        return self._waive(chunk, failure, f"raised {failure.error_type}: {failure.error}", single=True)

    def _judge_each(self, members: Sequence[Attempt], outcomes: Iterable[Any]) -> Ends:
        return [(member, self._end_of(member, outcome)) for member, outcome in zip(members, outcomes, strict=True)]

    def _end_of(self, member: Attempt, outcome: Any) -> Ended:
        """How a member ended, by the rules for single attempts."""
        if isinstance(outcome, BaseException):
            return self._members.failed(member, outcome)
        try:
            return self._members.completed(member, outcome)
        except Exception as refused:  # noqa: BLE001 - a result that cannot be stored is an error as any other
            return self._members.failed(member, refused)

    def _after_commit(self, chunk: Chunk, outcomes: Sequence[Any], note: Failure | None) -> Ends:
        """Its transaction has completed its members, except those to which it gave a failure."""
        ends: Ends = []
        for member, outcome in zip(chunk.members, outcomes, strict=True):
            if not member.has_committed:
                ends.append((member, self._end_of(member, outcome)))
            else:
                ends.append((member, None if note is None else Note(member, member.masked(note))))
        return ends

    # --- the handler was stopped -------------------------------------------------------------------------------

    def give_up(self, chunk: Chunk, stop: Stop, autopsy: str | None) -> Ends:
        """It did not stop within its grace. The autopsy is kept with the first member."""
        for member in chunk.members:
            member.is_unfinished = chunk.is_unfinished
        grace = f"{max(0.0, stop.until - stop.asked_at):.3g} seconds"
        how = f"did not respond to cancellation within {grace}: {stop.text}" if stop.is_told else stop.text
        text = f"hung: {how}; stuck after {chunk.elapsed_ms() / 1000:.1f} s"
        return self._stopped(chunk, stop, text, rung="stuck", autopsy=autopsy)

    def _stopped(self, chunk: Chunk, stop: Stop, text: str, *, rung: str, autopsy: str | None = None) -> Ends:
        is_late = stop.why is Why.DEADLINE
        code = "CHUNK_STUCK" if rung == "stuck" else "CHUNK_TIMEOUT" if is_late else stop.why.upper()
        kind = "ExecutionStuck" if rung == "stuck" else type(stop.error()).__name__
        if is_late:
            self._health.record_failure(TimeoutError(text))
        failure = Failure(kind, code, text, rung=rung, autopsy=autopsy)
        return self._waive(chunk, failure, text, single=is_late)

    def _waive(self, chunk: Chunk, failure: Failure, what: str, *, single: bool) -> Ends:
        """Nobody is charged. What is long (traceback, autopsy) is kept with the first member; the others name
        it."""
        count, first = len(chunk.members), chunk.members[0]
        for member in chunk.members if masking.is_on() else ():
            failure, what = member.masked(failure), masking.hidden_text(member.row, what)
        fate = _BY_ITSELF if single else "not charged"
        text = f"it ran in a chunk of {count} that {what}"
        logger.warning(
            "%s of domain %s: %s; %s", chunk.command_type, chunk.domain, text, fate, extra=chunk.log_fields
        )
        told = replace(failure, error=f"{text}; {fate}", duration_ms=chunk.elapsed_ms())
        more = f"; see command {first.command_id!r} for what it did"
        others = replace(told, error=f"{told.error}{more}", traceback=None, rung=None, autopsy=None)
        return [
            (member, member.waive(told if member is first else others, single=single)) for member in chunk.members
        ]
