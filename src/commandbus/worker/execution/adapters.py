"""Handlers that want more than (command, ctx) or (ctx) are called through an adapter that takes (command, ctx).

The adapter runs where the handler runs: in its slot or its child process, under its deadline. Handlers that want
no more are called directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from commandbus.model import middleware
from commandbus.worker.execution import chunk_handlers, lazy_transaction, wrapped_handlers
from commandbus.worker.execution.handler_options import TransactionOption
from commandbus.worker.execution.handler_signature import CallForm
from commandbus.worker.execution.lazy_transaction import in_async_transaction, in_transaction
from commandbus.worker.execution.payload_parameter import PayloadParameter

OURS = frozenset(
    module.__file__ for module in (lazy_transaction, chunk_handlers, middleware, wrapped_handlers)
) | {__file__}
"""Frames of these files are left out of the tracebacks of handlers."""

Adapter = Callable[[Any, Any], Any]


def adapted(
    function: Callable[..., Any],
    form: CallForm,
    *,
    is_async: bool,
    transaction: TransactionOption,
    payload: PayloadParameter | None = None,
) -> Adapter:
    """What a worker calls with (command, ctx) instead of this function."""
    isolation = transaction if isinstance(transaction, str) else None
    read = _as_it_is if payload is None else payload.read

    def arguments(command: Any, ctx: Any) -> list[Any]:
        given = [read(command)] if form.command else []
        return [*given, ctx] if form.context else given

    def call(command: Any, ctx: Any) -> Any:
        given = arguments(command, ctx)
        if not form.transaction:
            return function(*given)
        return in_transaction(ctx, isolation, lambda tx: function(*given, tx))

    async def call_async(command: Any, ctx: Any) -> Any:
        given = arguments(command, ctx)
        if not form.transaction:
            return await function(*given)
        return await in_async_transaction(ctx, isolation, lambda tx: function(*given, tx))

    return functools.wraps(function)(call_async if is_async else call)


def _as_it_is(command: Any) -> Any:
    return command
