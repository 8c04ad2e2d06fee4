"""Contexts that record what a handler asks for, and do nothing outside one transaction, which is rolled back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import psycopg
from psycopg import AsyncConnection, Connection

from commandbus.model import payload
from commandbus.model.durations import format_seconds, parse_seconds
from commandbus.worker.execution.context import AsyncHandlerContext, HandlerContext


class Record:
    """What was asked for, and the connection on which everything happens."""

    def __init__(self, conn: Any, receipts: dict[str, Any]) -> None:
        self.conn = conn
        self.receipts = receipts
        self.calls: list[tuple[str, str, Any]] = []

    def note(self, kind: str, name: str, details: Any = None) -> None:
        """It asked for this."""
        self.calls.append((kind, name, details))


class _Guarded:
    """What both connections know: the record, while the rehearsal goes on."""

    _record: Record | None = None


class RehearsalConnection(_Guarded, Connection[Any]):
    """A connection whose commit keeps what was done for the rest of the rehearsal only."""

    def commit(self) -> None:
        """Keep it, in the transaction."""
        if self._record is not None:
            self.execute("SAVEPOINT commandbus_rehearsal")

    def rollback(self) -> None:
        """Undo what was done since the last commit or the beginning."""
        if self._record is not None:
            self.execute("ROLLBACK TO SAVEPOINT commandbus_rehearsal")

    def set_autocommit(self, value: bool) -> None:  # noqa: FBT001 - psycopg's
        """Nothing: there is one transaction."""
        if self._record is None:
            super().set_autocommit(value)


class AsyncRehearsalConnection(_Guarded, AsyncConnection[Any]):
    """The same for async handlers."""

    async def commit(self) -> None:
        """Keep it, in the transaction."""
        if self._record is not None:
            await self.execute("SAVEPOINT commandbus_rehearsal")

    async def rollback(self) -> None:
        """Undo what was done since the last commit or the beginning."""
        if self._record is not None:
            await self.execute("ROLLBACK TO SAVEPOINT commandbus_rehearsal")

    async def set_autocommit(self, value: bool) -> None:  # noqa: FBT001 - psycopg's
        """Nothing: there is one transaction."""
        if self._record is None:
            await super().set_autocommit(value)


class NotCalledError(BaseException):
    """Leaves the block of an effect, whose call is not made."""


class RehearsedEffect:
    """The block of an effect: it is never due, so `key` leaves the block."""

    is_due = False

    def __init__(self, name: str, receipt: Any) -> None:
        self.name = name
        self.receipt = receipt

    @property
    def key(self) -> str:
        """Leaves the block."""
        raise NotCalledError(self.name)

    def __enter__(self) -> RehearsedEffect:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return isinstance(error, NotCalledError)

    async def __aenter__(self) -> RehearsedEffect:
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return isinstance(error, NotCalledError)


class RehearsedHold:
    """The permit of a limit, which nobody asked for."""

    is_lost = False

    def __init__(self, limit: str, timeout: float | None) -> None:
        self.limit = limit
        self._timeout = timeout

    def remaining(self) -> float | None:
        """The time for the call."""
        return self._timeout

    def __enter__(self) -> RehearsedHold:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    async def __aenter__(self) -> RehearsedHold:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


class _Recording:
    """What both contexts record."""

    __slots__ = ()
    record: Any  # a Record; set for the whole child process, which has one context

    def effect(self, name: str, **options: Any) -> Any:
        """Recorded, and not done."""
        receipt = self.record.receipts.get(name)
        self.record.note("effect", name, {"key": None if options.get("key") is None else str(options["key"])})
        return RehearsedEffect(name, receipt)

    def limit(self, name: str, *, wait: Any = None, timeout: Any = None) -> Any:  # noqa: ARG002
        """Recorded, and not asked for."""
        seconds = None if timeout is None else parse_seconds(timeout, name="timeout") or None
        self.record.note("limit", name, None if seconds is None else {"timeout": seconds})
        return RehearsedHold(name, seconds)

    def heartbeat(self, progress: Any = None) -> None:
        """Recorded."""
        self.record.note("heartbeat", "progress", progress)
        self.raise_if_canceled()  # type: ignore[attr-defined]

    def _noted(self, value: Any) -> tuple[Any]:
        """A checkpoint, as the next attempt would have it."""
        found = payload.loads(payload.dump(value, what="checkpoint"))
        self.record.note("checkpoint", "checkpoint", found)
        return (found,)

    def _keep_extension(self, duration: Any) -> None:
        self.record.note("extend", "deadline", format_seconds(parse_seconds(duration, name="duration")))


class RehearsalContext(_Recording, HandlerContext):
    """The context of a `def` handler in a rehearsal."""

    __slots__ = ()

    @contextmanager
    def _connection(self, **_more: Any) -> Iterator[Connection[Any]]:
        self._take_connection()
        conn: Connection[Any] = self.record.conn
        conn.execute("SAVEPOINT commandbus_rehearsal")
        try:
            yield conn
        except BaseException:
            with suppress(psycopg.Error):  # the handler may have ended the transaction
                conn.execute("ROLLBACK TO SAVEPOINT commandbus_rehearsal")
            raise
        finally:
            self._attempt.extras.has_connection = False

    @contextmanager
    def _completing(self, *, isolation: Any = None) -> Iterator[Any]:  # noqa: ARG002 - it has its transaction
        self._begin()
        with self._connection() as conn:
            tx = self._transaction_on(conn)
            self._attempt.extras.is_completing = True
            try:
                yield tx
            finally:
                self._attempt.extras.is_completing = False
            self._refuse_aborted(conn)
        self._attempt.has_committed = True
        self.record.note("complete", "transaction", payload.loads_or_none(tx._result))

    def checkpoint(self, value: Any) -> None:
        """Recorded."""
        self._checkpoint = self._noted(value)

    def extend(self, duration: Any) -> None:
        """Recorded."""
        self._keep_extension(duration)

    def effect_once(self, name: str, call: Callable[[str], Any], **options: Any) -> Any:  # noqa: ARG002
        """Recorded, and not called."""
        return self.effect(name, **options).receipt


class AsyncRehearsalContext(_Recording, AsyncHandlerContext):
    """The context of an `async def` handler in a rehearsal."""

    __slots__ = ()

    @asynccontextmanager
    async def _connection(self, **_more: Any) -> AsyncIterator[AsyncConnection[Any]]:
        self._take_connection()
        conn: AsyncConnection[Any] = self.record.conn
        await conn.execute("SAVEPOINT commandbus_rehearsal")
        try:
            yield conn
        except BaseException:
            with suppress(psycopg.Error):  # the handler may have ended the transaction
                await conn.execute("ROLLBACK TO SAVEPOINT commandbus_rehearsal")
            raise
        finally:
            self._attempt.extras.has_connection = False

    @asynccontextmanager
    async def _completing(self, *, isolation: Any = None) -> AsyncIterator[Any]:  # noqa: ARG002
        self._begin()
        async with self._connection() as conn:
            tx = self._transaction_on(conn)
            self._attempt.extras.is_completing = True
            try:
                yield tx
            finally:
                self._attempt.extras.is_completing = False
            self._refuse_aborted(conn)
        self._attempt.has_committed = True
        self.record.note("complete", "transaction", payload.loads_or_none(tx._result))

    async def checkpoint(self, value: Any) -> None:
        """Recorded."""
        self._checkpoint = self._noted(value)

    async def extend(self, duration: Any) -> None:
        """Recorded."""
        self._keep_extension(duration)

    async def effect_once(self, name: str, call: Callable[[str], Any], **options: Any) -> Any:  # noqa: ARG002
        """Recorded, and not called."""
        return self.effect(name, **options).receipt
