"""What is special about the function of a chunk handler: its parameters, and how it runs a single command.

A command that runs by itself (its chunk failed, it is a suspect, or its chunk has no other member) is an ordinary
attempt. Its handler's function is `one_of(function)`, which calls the chunk handler with a list of one. So single
commands take every way that commands of other handlers take, into child processes, too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from commandbus.model.chunk import read_outcomes
from commandbus.worker.execution.handler_options import Options, TransactionOption
from commandbus.worker.execution.handler_signature import CallForm


def refuse_with_chunk(function: Callable[..., Any], form: CallForm, options: Options) -> None:
    """A chunk handler takes (commands, ctx), and none of the options that mean one command."""
    name = getattr(function, "__qualname__", repr(function))
    if not form.command:
        raise TypeError(f"chunk handler {name!r} must take (commands, ctx): it gets a list of commands")
    if options.isolation == "process":
        raise ValueError(
            f'chunk handler {name!r}: isolation="process" is for one command. A chunk runs in its worker. If it '
            f"crashes it, each of its commands runs in a child process of its own; leave out isolation or chunk"
        )
    if options.limits:
        raise ValueError(
            f"chunk handler {name!r}: limits={list(options.limits)!r} is for one command, which is parked if "
            f"there is no permit. Use `with bus.limit(name):` in the handler (one permit for the chunk), or leave "
            f"out chunk"
        )
    if options.fresh_thread:
        raise ValueError(
            f"chunk handler {name!r}: fresh_thread is for one command; leave out fresh_thread or chunk"
        )


def many_of(
    function: Callable[..., Any], form: CallForm, *, is_async: bool, transaction: TransactionOption
) -> Callable[..., Any]:
    """The function (commands, ctx) that runs a chunk."""
    if not form.transaction:
        return function
    from commandbus.worker.execution.adapters import adapted  # few handlers need one

    return adapted(function, form, is_async=is_async, transaction=transaction)


def one_of(function: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
    """The function (command, ctx) that runs one command in a chunk of its own."""
    if is_async:

        @functools.wraps(function)
        async def one_async(command: Any, ctx: Any) -> Any:
            many = _context_of(ctx)
            return _only_outcome(many, await function([command], many), command)

        return _not_wrapping(one_async)

    @functools.wraps(function)
    def one(command: Any, ctx: Any) -> Any:
        many = _context_of(ctx)
        returned = function([command], many)
        return (
            _awaited(many, returned, command)
            if inspect.isawaitable(returned)
            else _only_outcome(many, returned, command)
        )

    return _not_wrapping(one)


def _not_wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    """Its parameters are its own, not those of the chunk handler."""
    del function.__wrapped__  # type: ignore[attr-defined]
    return function


def _context_of(ctx: Any) -> Any:
    from commandbus.worker.execution.chunk_context import chunk_of_one  # it needs attempts, and they need handlers

    return chunk_of_one(ctx)


async def _awaited(ctx: Any, returned: Awaitable[Any], command: Any) -> Any:
    from commandbus.worker.execution.chunk_context import become_async_chunk

    become_async_chunk(ctx)
    return _only_outcome(ctx, await returned, command)


def _only_outcome(ctx: Any, returned: Any, command: Any) -> Any:
    """What the handler says of the one command: its result, or its failure, which is raised."""
    committed = getattr(getattr(ctx, "_attempt", None), "outcomes", None)
    (outcome,) = read_outcomes(returned, [command.command_id]) if committed is None else committed
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome if committed is None else returned
