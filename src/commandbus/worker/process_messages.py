"""Handles the messages of processes, one transaction each.

The commands that the manager sends, the move of the process, and the removal of the message commit together
(`ctx.transaction()`), or none of them does. Messages are ordinary commands. So if the manager's code hangs, raises
or kills its worker process, the same ladder, retries and troubleshooting queue deal with it. Several messages of
one process may be handled at the same time: the second move is refused, and that message is handled again, one
after the other with all that were refused.

A message that moves nothing is set aside with the reason, and is done.

The batch of a process that has ended is folded after the commit, in a separate transaction: all members share the
batch's row, so it must not be locked while the rest of a message is handled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias

from commandbus.db.drivers import run, run_async
from commandbus.errors import PermanentCommandError, ProcessMovedError, TransientCommandError
from commandbus.flow.batches.fold_and_complete import fold
from commandbus.flow.operation import Operation
from commandbus.flow.processes.loaded import Loaded
from commandbus.flow.processes.move import apply, line_up, load, set_aside, touch, untaken_signals
from commandbus.logger import safe_logger
from commandbus.model import names, payload
from commandbus.model.command import Command
from commandbus.model.process import ProcessStatus
from commandbus.processes.advance_and_compensate import advance
from commandbus.processes.manager import BaseProcessManager, ProcessView, is_async
from commandbus.processes.messages import MalformedMessageError, Message, read_message
from commandbus.processes.moves import Advance, StepCall
from commandbus.processes.waiting_steps import Signal, SignalQuery
from commandbus.worker.execution.context import AsyncHandlerContext, HandlerContext

logger = safe_logger("commandbus.worker")

TRIES = 20
MOST_SIGNALS = 100  # how many signals of a name are read at once
STATE_NESTING = payload.MAX_NESTING + 50  # a state may contain whole results


class End(NamedTuple):
    """A message was handled; `batch` is that of its process, if it has ended by it."""

    batch: int | None = None


Talk: TypeAlias = "Generator[StepCall | Operation[Any], Any, End]"


def handler_of(manager: BaseProcessManager[Any]) -> Callable[..., Any]:
    """The function that handles the messages of a manager's processes: `async def` if any of its methods is."""
    line: set[int] = set()  # batches that one of our threads is waiting for, to fold them

    def handle(command: Command, ctx: HandlerContext) -> None:
        for n in range(TRIES):
            try:
                with ctx.transaction() as tx:
                    end = _answer(_talk(manager, command, ctx.internal_id, tx, is_again=n > 0), tx.connection)
            except ProcessMovedError:
                ctx.raise_if_canceled()
                continue
            if end.batch is not None:
                try:
                    with ctx.connection() as conn:
                        run(conn, fold([end.batch], waiting=True, line=line))
                except Exception as error:  # noqa: BLE001 - the message is handled; a sweep will fold it
                    _left_to_sweep(end.batch, error)
            return
        raise _contended(command)

    async def handle_async(command: Command, ctx: AsyncHandlerContext) -> None:
        for n in range(TRIES):
            try:
                async with ctx.transaction() as tx:
                    talk = _talk(manager, command, ctx.internal_id, tx, is_again=n > 0)
                    end = await _answer_async(talk, tx.connection)
            except ProcessMovedError:
                ctx.raise_if_canceled()
                continue
            if end.batch is not None:
                try:
                    async with ctx.connection() as conn:
                        await run_async(conn, fold([end.batch], waiting=True, line=line))
                except Exception as error:  # noqa: BLE001
                    _left_to_sweep(end.batch, error)
            return
        raise _contended(command)

    made = handle_async if is_async(manager) else handle
    made.__qualname__ = type(manager).__qualname__
    made.__module__ = type(manager).__module__
    return made


def _left_to_sweep(batch: int, error: Exception) -> None:
    logger.info("batch %d is folded later: %s", batch, str(error).strip())


def _contended(command: Command) -> TransientCommandError:
    return TransientCommandError(
        f"process {command.correlation_id!r} was moved by others {TRIES} times while this message was handled",
        code="PROCESS_CONTENDED",
    )


def _talk(manager: BaseProcessManager[Any], command: Command, row_id: int, tx: Any, *, is_again: bool) -> Talk:
    """Handle one message, up to its removal."""
    data, max_bytes = command.data, tx.max_bytes
    process_id = data.get("process") if isinstance(data, dict) else None
    loaded: Loaded | None = None
    if isinstance(process_id, str):
        if is_again:
            yield line_up(command.domain, process_id)
        loaded = yield load(command.domain, process_id, message=row_id)
    if loaded is None or loaded.view.process_type != command.command_type:
        what = f"there is no process {names.shown(process_id)} of type {command.command_type!r}"
        yield set_aside(command.domain, None, data, what)
        return End()
    if not loaded.is_its_message:
        what = f"somebody sent it as a command: it is not a message of process {names.shown(process_id)}"
        yield set_aside(command.domain, loaded.id, data, what)
        return End()
    try:
        message = read_message(data, command.command_id)
    except MalformedMessageError as error:
        yield set_aside(command.domain, loaded.id, data, str(error))
        return End()
    view = loaded.view
    if loaded.has_state:
        view.state = yield StepCall(manager.load_state, (view.state,))
    else:
        view.state = yield StepCall(manager.create_state, (view.data,))
    made = yield from _advance(manager, loaded, message, tx)
    if made.aside is not None:
        if not _is_overtaken(message, view):
            yield set_aside(command.domain, loaded.id, data, made.aside)
        return End()
    if made.touches:
        yield touch(loaded)
        return End()
    state = yield StepCall(manager.dump_state, (view.state,))
    yield apply(loaded, made, _dump_state(manager, state, max_bytes), max_bytes=max_bytes)
    return End(loaded.batch if view.status.is_final else None)


def _advance(
    manager: BaseProcessManager[Any], loaded: Loaded, message: Message, tx: Any
) -> Generator[StepCall | Operation[Any], Any, Advance]:
    """What the message does; the database answers questions about signals."""
    moves, answer = advance(manager, loaded.view, message, tx), None
    known: dict[str, list[Signal]] = {}
    while True:
        try:
            asked = moves.send(answer)
        except StopIteration as stop:
            made: Advance = stop.value
            return made
        answer = (
            (yield from _next_signal(loaded, asked, known)) if isinstance(asked, SignalQuery) else (yield asked)
        )


def _next_signal(
    loaded: Loaded, asked: SignalQuery, known: dict[str, list[Signal]]
) -> Generator[Operation[list[Signal]], Any, Signal | None]:
    """The oldest signal of this name that no step has taken; None if there is none. `known`: what was read for
    this move, by name."""
    signals = known.get(asked.name)
    may_be_more = signals is None or len(signals) == MOST_SIGNALS
    found = _untaken(signals or [], asked)
    if found is None and may_be_more:
        known[asked.name] = yield untaken_signals(loaded, asked, MOST_SIGNALS)
        found = _untaken(known[asked.name], asked)
    return found


def _untaken(signals: list[Signal], asked: SignalQuery) -> Signal | None:
    return next((signal for signal in signals if signal.command_id not in asked.taken), None)


def _is_overtaken(message: Message, view: ProcessView[Any]) -> bool:
    """Is it a message that nobody needs any more? A timer (but a FAILED process that is retried must wake up), a
    request to cancel what has ended, a signal that was taken, or the start of a process that was canceled
    first."""
    if message.event == "wake":
        return view.status is not ProcessStatus.FAILED
    if message.event == "signal":
        return any(step.kind == "signal" and step.command_id == message.command_id for step in view.steps)
    return message.event in ("deadline", "cancel") or (
        message.event == "start" and view.status is ProcessStatus.CANCELED and not view.steps
    )


def _dump_state(manager: BaseProcessManager[Any], state: object, max_bytes: int) -> str:
    try:
        return payload.dump(state, what="state", max_bytes=max_bytes, max_nesting=STATE_NESTING)
    except ValueError as error:
        raise PermanentCommandError(
            f"the state of {type(manager).__name__} cannot be stored: {error}", code="INVALID_STATE"
        ) from None


def _answer(talk: Talk, conn: Any) -> End:
    answer: Any = None
    while not isinstance(asked := _ask(talk, answer), End):
        if isinstance(asked, Operation):
            answer = run(conn, asked)
            continue
        answer = asked.function(*asked.args)
        if inspect.isawaitable(answer):
            raise PermanentCommandError(
                f"{asked.function.__qualname__} is not `async def` but returned an awaitable",
                code="INVALID_RESULT",
            )
    return asked


async def _answer_async(talk: Talk, conn: Any) -> End:
    answer: Any = None
    while not isinstance(asked := _ask(talk, answer), End):
        if isinstance(asked, Operation):
            answer = await run_async(conn, asked)
            continue
        answer = asked.function(*asked.args)
        if inspect.isawaitable(answer):
            answer = await answer
    return asked


def _ask(talk: Talk, answer: Any) -> StepCall | Operation[Any] | End:
    """The next question, or the end. (A StopIteration of the manager's code must not look like it.)"""
    try:
        return talk.send(answer)
    except StopIteration as stop:
        end: End = stop.value
        return end
