"""The `tx` of a handler with transaction=True: one transaction, which begins with its first statement.

    @handlers.handler("orders", "ship", transaction=True)
    def ship(command, ctx, tx):
        tx.execute("UPDATE …")
        return {"shipped": True}

Until the first statement there is no connection, so nothing is idle in a transaction meanwhile. When the handler
returns, its value becomes the command's result, and both commit together, as at the end of `ctx.transaction()`.
If the handler raises, everything is rolled back. A handler that never uses its `tx` completes in the ordinary way.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

from commandbus.errors import TransactionUsedError

if TYPE_CHECKING:
    from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
    from psycopg.abc import Params, QueryNoTemplate


class _Lazy:
    """What both kinds share."""

    __slots__ = ("_ctx", "_is_over", "_isolation", "_lock", "_opened", "_stack")

    def __init__(self, ctx: Any, isolation: str | None, stack: Any) -> None:
        self._ctx = ctx
        self._isolation = isolation
        self._stack = stack
        self._opened: Any = None  # a HandlerTransaction
        self._is_over = False
        self._lock: Any = threading.Lock()

    def complete(self, result: object = None) -> NoReturn:  # noqa: ARG002
        """Always refused: the value that the handler returns is the result."""
        raise TransactionUsedError(
            "tx.complete(result) is for `with ctx.transaction()`: a handler with transaction=True returns its "
            "result, and that completes the command"
        )

    def _block(self) -> Any:
        """The block whose end commits. A context that is not a worker's own (in a test) has its own way."""
        if self._is_over:
            raise TransactionUsedError(
                "the tx of a handler with transaction=True was used after the handler had ended: finish what "
                "uses it (threads, tasks) before the handler returns"
            )
        begin = getattr(self._ctx, "_completing", None) or self._ctx.transaction
        return begin(isolation=self._isolation)

    def _conclude(self, result: object) -> object:
        """The handler has returned: the result is stored at the end of the block, if there is one. Returns what
        is left to store."""
        self._is_over = True
        if self._opened is None:
            return result
        if result is not None:
            self._opened.complete(result)
        return None

    def _close(self) -> None:
        self._is_over = True


class Transaction(_Lazy):
    """The `tx` of a `def` handler with transaction=True. Pass it as `conn=` to a bus."""

    __slots__ = ()

    @property
    def connection(self) -> Connection[Any]:
        """The psycopg connection, in this transaction. Asking for it takes one from the pool."""
        with self._lock:
            if self._opened is None:
                self._opened = self._stack.enter_context(self._block())
            elif self._is_over:
                self._block()
            opened: Connection[Any] = self._opened.connection
            return opened

    def execute(
        self, query: QueryNoTemplate, params: Params | None = None, *, prepare: bool | None = None
    ) -> Cursor[Any]:
        """Run a statement, as `connection.execute` does. Returns its cursor."""
        return self.connection.execute(query, params, prepare=prepare)

    @property
    def cursor(self) -> Any:
        """`connection.cursor`, with its arguments."""
        return self.connection.cursor

    def savepoint(self) -> AbstractContextManager[Any]:
        """A block of its own inside the transaction: what fails in it is rolled back alone."""
        return self.connection.transaction()

    def rollback(self) -> None:
        """Only before an error. Otherwise the command fails with TransactionEndedError."""
        self.connection.rollback()

    def commit(self) -> NoReturn:
        """Always refused, with TransactionEndedError: the handler's return commits."""
        self.connection.commit()
        raise AssertionError("commit() is refused")


class AsyncTransaction(_Lazy):
    """The `tx` of an `async def` handler with transaction=True. Pass it as `conn=` to an async bus."""

    __slots__ = ()

    async def open(self) -> AsyncConnection[Any]:
        """The psycopg connection, in this transaction. Asking for it takes one from the pool."""
        async with self._lock:
            if self._opened is None:
                self._opened = await self._stack.enter_async_context(self._block())
            elif self._is_over:
                self._block()
            opened: AsyncConnection[Any] = self._opened.connection
            return opened

    async def execute(
        self, query: QueryNoTemplate, params: Params | None = None, *, prepare: bool | None = None
    ) -> AsyncCursor[Any]:
        """Run a statement, as `connection.execute` does. Returns its cursor."""
        return await (await self.open()).execute(query, params, prepare=prepare)

    def cursor(self, *args: Any, **options: Any) -> AbstractAsyncContextManager[Any]:
        """`async with tx.cursor() as cursor: …`"""
        return _Opening(self, lambda conn: conn.cursor(*args, **options))

    def savepoint(self) -> AbstractAsyncContextManager[Any]:
        """A block of its own inside the transaction: what fails in it is rolled back alone."""
        return _Opening(self, lambda conn: conn.transaction())

    async def rollback(self) -> None:
        """Only before an error. Otherwise the command fails with TransactionEndedError."""
        await (await self.open()).rollback()

    async def commit(self) -> NoReturn:
        """Always refused, with TransactionEndedError: the handler's return commits."""
        await (await self.open()).commit()
        raise AssertionError("commit() is refused")


class _Opening(AbstractAsyncContextManager[Any]):
    """A block on a connection that is opened when the block begins."""

    def __init__(self, tx: AsyncTransaction, block: Callable[[AsyncConnection[Any]], Any]) -> None:
        self._tx = tx
        self._make = block
        self._block: Any = None

    async def __aenter__(self) -> Any:
        self._block = self._make(await self._tx.open())
        return await self._block.__aenter__()

    async def __aexit__(self, *error: Any) -> Any:
        return await self._block.__aexit__(*error)


def in_transaction(ctx: Any, isolation: str | None, call: Callable[[Any], Any]) -> Any:
    """Call a `def` handler with its `tx`. Returns what completes the command, unless its transaction has."""
    with ExitStack() as stack:
        tx = Transaction(ctx, isolation, stack)
        stack.callback(tx._close)
        result = call(tx)
        with tx._lock:
            if not inspect.isawaitable(result):
                return tx._conclude(result)
            _refuse_both(tx, result)
    return _awaited(_async_twin(tx), result)


async def in_async_transaction(ctx: Any, isolation: str | None, call: Callable[[Any], Awaitable[Any]]) -> Any:
    """The same for an `async def` handler."""
    tx = AsyncTransaction(ctx, isolation, None)
    return await _awaited(tx, call(tx))


async def _awaited(tx: AsyncTransaction, awaitable: Awaitable[Any]) -> Any:
    async with AsyncExitStack() as stack:
        tx._stack, tx._lock = stack, asyncio.Lock()
        stack.callback(tx._close)
        return tx._conclude(await awaitable)


def _refuse_both(tx: Transaction, awaitable: Any) -> None:
    if tx._opened is None:
        return
    if inspect.iscoroutine(awaitable):
        awaitable.close()
    raise TransactionUsedError(
        "the handler used its tx and then returned an awaitable, which cannot use the same one: make the handler "
        "`async def`, or leave the tx to what it returns"
    )


def _async_twin(tx: Transaction) -> AsyncTransaction:
    """Its handler is `def`, but returned an awaitable: on the event loop it needs what can be awaited."""
    tx._is_over = False
    tx.__class__ = AsyncTransaction  # type: ignore[assignment]  # both hold the same
    return tx  # type: ignore[return-value]
