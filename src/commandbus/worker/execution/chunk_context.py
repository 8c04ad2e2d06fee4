"""The context of a chunk handler: one for all of its commands.

Time, connection and transaction belong to the chunk as a whole. `transaction()` commits the handler's writes and
the completions of all its commands together, each under its own fence. If one of them is refused, nothing of it is
committed.

A command that runs by itself has a context of this kind, too: its chunk has one member, the attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from commandbus.errors import AttemptFencedError, TransactionUsedError
from commandbus.flow.commands.settle import settle
from commandbus.flow.operation import Operation, Steps
from commandbus.model import payload
from commandbus.model.chunk import read_outcomes
from commandbus.model.command import Command
from commandbus.model.json_values import JsonValue
from commandbus.model.safe_text import escaped
from commandbus.worker.execution.attempt import Attempt, Scope
from commandbus.worker.execution.context import (
    MAX_PROGRESS_BYTES,
    AsyncHandlerContext,
    HandlerContext,
    HandlerTransaction,
    Services,
    _Context,
    dump_result,
    has_committed,
    logger,
)
from commandbus.worker.execution.handlers import Handler

C = TypeVar("C")


class ChunkTransaction(HandlerTransaction[C]):
    """The `tx` of a chunk's ctx.transaction(): its connection, and `complete(outcomes)`."""

    def __init__(
        self, connection: C, max_bytes: int, command_ids: Sequence[str], handler: Handler | None = None
    ) -> None:
        super().__init__(connection, max_bytes, handler)
        self._command_ids = command_ids
        self.outcomes: list[Any] = [None] * len(command_ids)
        self.results: list[str | None] = [None] * len(command_ids)

    def complete(self, result: object = None) -> None:
        """Set the outcomes: a list in the order of the commands, or a mapping by command_id. Without this call all
        commands complete without a result.

        A command whose outcome is an exception is not completed here: its failure is written after the commit.
        """
        outcomes = read_outcomes(result, self._command_ids)
        self.results = [self._text_of(outcome) for outcome in outcomes]
        self.outcomes = outcomes

    def _text_of(self, outcome: Any) -> str | None:
        is_result = outcome is not None and not isinstance(outcome, BaseException)
        return dump_result(outcome, self.max_bytes, self._handler) if is_result else None


class _ChunkContext(_Context):
    """What both contexts of chunks share."""

    __slots__ = ("_commands",)

    def __init__(self, attempt: Attempt, services: Services, scope: Scope | None = None) -> None:
        super().__init__(attempt, services, scope)
        self._commands: list[Command] | None = None

    @property
    def commands(self) -> list[Command]:
        """The commands, in the order in which the handler gets them."""
        if self._commands is None:
            self._commands = [member.command() for member in self._attempt.each]
        return self._commands

    @property
    def command(self) -> NoReturn:
        raise AttributeError("a chunk has several commands: use the list that the handler gets, or ctx.commands")

    @property
    def attempt(self) -> NoReturn:
        raise AttributeError("each command of a chunk has an attempt of its own: use ctx.attempt_of(command)")

    attempt_number = max_attempts = internal_id = attempt

    def outcome_of(self, error: BaseException | None) -> NoReturn:  # noqa: ARG002
        """Not for chunks."""
        raise TypeError("ctx.outcome_of is not for chunks: each command of a chunk has an outcome of its own")

    def attempt_of(self, command: Command) -> int:
        """Which of its `max_attempts` this is for one of the commands: 1, 2, …"""
        for member in self._attempt.each:
            if member.command_id == command.command_id:
                return member.charge
        raise ValueError(f"command {command.command_id!r} is not in this chunk")

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose records carry the chunk: its type, how many commands it has, and its first command."""
        if self._log is None:
            first = self._attempt.each[0]
            extra = {
                "domain": first.domain,
                "command_type": escaped(first.command_type),
                "command_id": escaped(first.command_id),
                "chunk": len(self._attempt.each),
            }
            self._log = logging.LoggerAdapter(logger, extra)
        return self._log

    def heartbeat(self, progress: JsonValue = None) -> None:
        """Report the progress of the chunk, for `commandbus show` of each of its commands. Raises if asked to
        stop."""
        if progress is not None:
            text = payload.dump(
                progress, what="progress", max_bytes=MAX_PROGRESS_BYTES, remedy="say it in fewer words"
            )
            for member in self._attempt.each:
                self._services.progress(member, text)
        self.raise_if_canceled()

    def limit(self, name: str, **_: object) -> NoReturn:
        """Not for chunks."""
        raise TypeError(
            f"ctx.limit({name!r}) is not for chunks: a command that its limit refuses is parked, and a chunk "
            f"cannot be. Use `with bus.limit({name!r}):` (one permit for the chunk), or a handler without chunk="
        )

    def effect(self, name: str, *_: object, **__: object) -> NoReturn:
        """Not for chunks."""
        raise TypeError(
            f"effect {name!r}: effects are not for chunks, because an effect belongs to one command. Call "
            f"in a handler without chunk="
        )

    effect_once = effect

    def checkpoint(self, value: object) -> NoReturn:  # noqa: ARG002
        """Not for chunks."""
        raise TypeError("checkpoints are not for chunks, because a checkpoint belongs to one command")

    @property
    def last_checkpoint(self) -> NoReturn:
        raise AttributeError("checkpoints are not for chunks, because a checkpoint belongs to one command")

    # --- its transaction ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._attempt.outcomes is not None:
            raise TransactionUsedError("an earlier ctx.transaction() of this chunk has completed its commands")
        if self._attempt.extras.is_completing:
            raise TransactionUsedError("ctx.transaction() of a chunk is inside another one: use the outer tx")

    def _transaction_on(self, conn: C) -> ChunkTransaction[C]:
        ids = [member.command_id for member in self._attempt.each]
        return ChunkTransaction(conn, self._services.max_payload_bytes, ids, self._attempt.handler)

    def _settlement(self, tx: HandlerTransaction[Any]) -> Operation[dict[tuple[int, int], Any]]:
        assert isinstance(tx, ChunkTransaction)  # noqa: S101 - `_transaction_on` has made it
        results = zip(self._attempt.each, tx.outcomes, tx.results, strict=True)
        completions = [
            member.complete(text).only_of(member.sent)
            for member, outcome, text in results
            if not isinstance(outcome, BaseException)
        ]
        return settle(self._attempt.domain, self._services.worker, completions, waiting=True)

    def _check(self, unsettled: dict[tuple[int, int], Any]) -> None:
        if not unsettled:
            return
        lost = [item for item in self._attempt.each if (item.msg_id, item.read_ct) in unsettled]
        for member in lost:
            member.is_lost = True
        raise self._fenced()

    def _fenced(self) -> AttemptFencedError:
        members = self._attempt.each
        lost = [member.command_id for member in members if member.is_lost]
        which = f", among them {lost[0]!r}" if lost else ""
        return AttemptFencedError(
            f"this worker no longer holds {len(lost) or 'some'} of the {len(members)} commands of a chunk{which}; "
            f"nothing of the chunk was committed"
        )

    def _note_commit(self, tx: HandlerTransaction[Any]) -> None:
        assert isinstance(tx, ChunkTransaction)  # noqa: S101
        self._attempt.outcomes = tx.outcomes
        for member, outcome in zip(self._attempt.each, tx.outcomes, strict=True):
            member.has_committed = not isinstance(outcome, BaseException)

    def _ask_commit(self, tx: HandlerTransaction[Any]) -> Operation[bool]:
        """All of them were committed, or none: one tells. If none was to complete, nobody can tell."""
        assert isinstance(tx, ChunkTransaction)  # noqa: S101
        for member, outcome in zip(self._attempt.each, tx.outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                return has_committed(member, self._services.worker)
        return Operation(_nobody_knows(), atomic=False)


def _nobody_knows() -> Steps[bool]:
    return False
    yield  # a generator


class ChunkContext(_ChunkContext, HandlerContext):
    """The context of a `def` handler of chunks."""

    __slots__ = ()

    limit = _ChunkContext.limit
    effect = effect_once = _ChunkContext.effect
    checkpoint = _ChunkContext.checkpoint


class AsyncChunkContext(_ChunkContext, AsyncHandlerContext):
    """The context of an `async def` handler of chunks."""

    __slots__ = ()

    limit = _ChunkContext.limit
    effect = effect_once = _ChunkContext.effect
    checkpoint = _ChunkContext.checkpoint


def chunk_of_one(ctx: Any) -> Any:
    """The context of a command that runs by itself, for its chunk handler. A test's own context stays as it is."""
    kinds = {HandlerContext: ChunkContext, AsyncHandlerContext: AsyncChunkContext}
    kind = kinds.get(type(ctx))
    return ctx if kind is None else kind(ctx._attempt, ctx._services, ctx._scope)


def become_async_chunk(ctx: Any) -> None:
    """Its handler is `def`, but returned an awaitable: on the event loop it needs what can be awaited."""
    if type(ctx) is ChunkContext:
        ctx.__class__ = AsyncChunkContext  # type: ignore[assignment]  # both hold the same
