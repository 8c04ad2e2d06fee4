"""HandlerContext: what a handler is given besides its command.

`connection()` is a plain connection: its writes are the handler's own and may happen twice if the attempt is
repeated. `transaction()` is a connection in whose transaction the command's completion commits too, so its
writes happen exactly once: the settlement is the last statement before COMMIT, under the attempt's fence. If the
fence is gone, everything in the block is rolled back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection

from commandbus import sql
from commandbus.db.drive import run, run_async
from commandbus.errors import (
    AttemptFencedError,
    ConnectionInUseError,
    InvalidCommandError,
    PermanentCommandError,
    TransactionUsedError,
    TransientCommandError,
)
from commandbus.flow.settle import settle
from commandbus.flow.statement import Operation, Statement, Steps, operation
from commandbus.model import payload
from commandbus.model.command import Command
from commandbus.model.durations import parse_seconds
from commandbus.runtime.attempt import Attempt
from commandbus.runtime.connections import HandlerConnections

C = TypeVar("C")
logger = logging.getLogger("commandbus.handler")


@dataclass(frozen=True, slots=True)
class Services:
    """What contexts of one worker share."""

    worker: str
    connections: HandlerConnections
    pool_timeout: float
    max_payload_bytes: int
    default_max_attempts: int
    extend: Callable[[Attempt, float], Future[bool]]
    extend_timeout: float


def dump_result(result: Any, max_bytes: int) -> str:
    """A result's JSON text; one that is none is a mistake that trying again would repeat, effects and all."""
    try:
        return payload.dump(result, what="result", max_bytes=max_bytes)
    except InvalidCommandError as error:
        raise PermanentCommandError(str(error), code="INVALID_RESULT") from error


class HandlerTransaction(Generic[C]):
    """The `tx` of ctx.transaction(): its connection, and `complete(result)`.

    It can be passed as `conn=` to a bus: what is sent in it is sent if, and only if, the command completes.
    """

    def __init__(self, connection: C, max_bytes: int) -> None:
        self.connection = connection
        self._max_bytes = max_bytes
        self._result: str | None = None

    def complete(self, result: Any = None) -> None:
        """Say what the command's result is (JSON); without this it is null."""
        self._result = dump_result(result, self._max_bytes)

    @property
    def execute(self) -> Any:
        """`connection.execute` (to be awaited on an async connection)."""
        return self.connection.execute  # type: ignore[attr-defined]

    @property
    def cursor(self) -> Any:
        """`connection.cursor`."""
        return self.connection.cursor  # type: ignore[attr-defined]


class _Context:
    """What both contexts share."""

    __slots__ = ("_attempt", "_command", "_log", "_services")

    def __init__(self, attempt: Attempt, services: Services) -> None:
        self._attempt = attempt
        self._services = services
        self._command: Command | None = None
        self._log: logging.LoggerAdapter[logging.Logger] | None = None

    @property
    def command(self) -> Command:
        """The command."""
        if self._command is None:
            self._command = self._attempt.command()
        return self._command

    @property
    def attempt(self) -> int:
        """The number of this attempt; it only grows, also over operator retries."""
        return self._attempt.number

    @property
    def max_attempts(self) -> int:
        """How many attempts will be charged before a person must look."""
        handler = self._attempt.handler
        if self._attempt.max_attempts is not None:
            return self._attempt.max_attempts
        if handler is not None and handler.retry_policy is not None:
            return handler.retry_policy.max_attempts
        return self._services.default_max_attempts

    @property
    def worker(self) -> str:
        """The id of the worker that runs this."""
        return self._services.worker

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose records carry the command."""
        if self._log is None:
            attempt = self._attempt
            extra = {
                "domain": attempt.domain,
                "command_type": attempt.command_type,
                "command_id": attempt.command_id,
                "attempt": attempt.number,
            }
            self._log = logging.LoggerAdapter(logger, extra)
        return self._log

    def _begin(self) -> None:
        if self._attempt.has_committed:
            raise TransactionUsedError(
                f"command {self._attempt.command_id!r} was completed by an earlier ctx.transaction()"
            )

    def _ask_to_extend(self, seconds: float | str | timedelta) -> Future[bool]:
        """The monitor does it, on its own connection: the handler's may be in the middle of a transaction."""
        return self._services.extend(self._attempt, parse_seconds(seconds, name="seconds"))

    def _take_connection(self) -> None:
        if self._attempt.has_connection:
            raise ConnectionInUseError(
                f"this attempt of command {self._attempt.command_id!r} already holds a connection: use that one "
                f"(in ctx.transaction() it is tx.connection), or leave its block first"
            )
        self._attempt.has_connection = True

    def _settlement(self, result: str | None) -> Operation[dict[tuple[int, int], Any]]:
        attempt = self._attempt
        return settle(attempt.domain, self._services.worker, [attempt.complete(result)], waiting=True)

    def _check(self, unsettled: object) -> None:
        if unsettled:
            self._attempt.is_lost = True
            raise self._fenced()

    def _fenced(self) -> AttemptFencedError:
        attempt = self._attempt
        return AttemptFencedError(
            f"attempt {attempt.number} of command {attempt.command_id!r} no longer holds its lease; "
            f"nothing of it was committed"
        )

    def _uncertain(self, has_committed: bool, error: psycopg.Error) -> None:  # noqa: FBT001
        """The connection broke in COMMIT: what the database says decides."""
        if not has_committed:
            raise TransientCommandError(
                f"the connection was lost in COMMIT and the transaction did not take place: {error}",
                code="COMMIT_LOST",
            ) from error
        self._attempt.has_committed = True


@operation(atomic=False)
def _has_committed(attempt: Attempt, worker: str) -> Steps[bool]:
    rows = yield Statement(
        sql.text("has_committed"), {"id": attempt.id, "number": attempt.number, "worker": worker}
    )
    return bool(rows)


class HandlerContext(_Context):
    """The context of a `def` handler."""

    __slots__ = ()

    @contextmanager
    def connection(self) -> Iterator[Connection[Any]]:
        """A connection for the handler's own queries, one at a time; committed at the end of the block."""
        self._take_connection()
        try:
            with self._services.connections.sync(timeout=self._services.pool_timeout) as conn:
                yield conn
        finally:
            self._attempt.has_connection = False

    @contextmanager
    def transaction(self) -> Iterator[HandlerTransaction[Connection[Any]]]:
        """A transaction whose commit also completes the command. An attempt has one."""
        self._begin()
        finishing = False
        try:
            with self.connection() as conn:
                tx = HandlerTransaction(conn, self._services.max_payload_bytes)
                yield tx
                finishing = True
                self._check(run(conn, self._settlement(tx._result)))
            self._attempt.has_committed = True
        except psycopg.OperationalError as error:
            if not finishing:
                raise
            with self.connection() as other:
                self._uncertain(run(other, _has_committed(self._attempt, self._services.worker)), error)

    def extend(self, seconds: float | str | timedelta) -> None:
        """Hold the command for at least this long from now; raises AttemptFencedError if it is lost."""
        if not self._ask_to_extend(seconds).result(self._services.extend_timeout):
            raise self._fenced()


class AsyncHandlerContext(_Context):
    """The context of an `async def` handler."""

    __slots__ = ()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection[Any]]:
        """A connection for the handler's own queries, one at a time; committed at the end of the block."""
        self._take_connection()
        try:
            async with self._services.connections.asynchronous(timeout=self._services.pool_timeout) as conn:
                yield conn
        finally:
            self._attempt.has_connection = False

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[HandlerTransaction[AsyncConnection[Any]]]:
        """A transaction whose commit also completes the command. An attempt has one."""
        self._begin()
        finishing = False
        try:
            async with self.connection() as conn:
                tx = HandlerTransaction(conn, self._services.max_payload_bytes)
                yield tx
                finishing = True
                self._check(await run_async(conn, self._settlement(tx._result)))
            self._attempt.has_committed = True
        except psycopg.OperationalError as error:
            if not finishing:
                raise
            async with self.connection() as other:
                found = await run_async(other, _has_committed(self._attempt, self._services.worker))
                self._uncertain(found, error)

    async def extend(self, seconds: float | str | timedelta) -> None:
        """Hold the command for at least this long from now; raises AttemptFencedError if it is lost."""
        asked = asyncio.wrap_future(self._ask_to_extend(seconds))
        if not await asyncio.wait_for(asked, self._services.extend_timeout):
            raise self._fenced()
