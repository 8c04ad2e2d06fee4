"""AnswerReader: how the connection of an async handler waits for the server's answers.

psycopg adds a reader to the event loop for every answer, sets a timer, and removes both: 40 µs of CPU, as much as
the rest of a small statement. Here the event loop watches the socket as long as a handler has the connection. The
generator that reads the answer goes on inside the event loop's callback. Its task wakes up once, when the answer
is complete.

The event loop watches a duplicate of the socket's descriptor. So its number stays ours, even if another thread
closes the connection meanwhile. A thread that ends a session from outside shuts the socket down, which ends all
duplicates, too. Only the thread of the event loop uses a reader.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any, Final, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGconn
from psycopg.waiting import READY_R, READY_W, WAIT_R, WAIT_W

from commandbus.db.descriptors import FileId, file_behind
from commandbus.db.drivers import OwnAsyncConnection
from commandbus.logger import safe_logger

logger = safe_logger("commandbus.database")

CANCEL_SECONDS: Final = 5.0
CANCEL_TIMES: Final = 10
T = TypeVar("T")

_NOTHING: Final = 0


class HandlersAsyncConnection(OwnAsyncConnection):
    """The connection of an async handler, around the libpq handle of a pooled one. `answers` must be closed before
    the pool gets that one back."""

    def __init__(self, pgconn: PGconn) -> None:
        super().__init__(pgconn)
        self.answers = AnswerReader(asyncio.get_running_loop(), pgconn)

    async def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """Wait for an answer. If the caller names a time, as `notifies` does, psycopg waits."""
        if args or kwargs:
            return await super().wait(gen, *args, **kwargs)
        try:
            return await self.answers.run(gen)
        except asyncio.CancelledError:
            await self._end_query()
            raise

    async def _end_query(self) -> None:
        """The caller is canceled. The server must end the query, or the session is of no more use. A busy server
        may get the cancel before it has begun the query, and forget it: so we ask again."""
        if self.pgconn.transaction_status != TransactionStatus.ACTIVE:
            self.answers.drop()
            return
        why: object = f"the server was asked {CANCEL_TIMES} times within {CANCEL_SECONDS:g} s"
        try:
            for _ in range(CANCEL_TIMES):
                await self.cancel_safe(timeout=CANCEL_SECONDS)
                with suppress(TimeoutError):
                    await self.answers.finish(CANCEL_SECONDS / CANCEL_TIMES)
                    return
        except psycopg.errors.QueryCanceled:
            return
        except psycopg.Error as error:
            why = error
        logger.warning("a canceled query did not end, so its connection is closed: %s", why)
        self.answers.close()
        self.pgconn.finish()


class AnswerReader:
    """Drives one generator of psycopg at a time, on one socket. It must be closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pgconn: PGconn) -> None:
        self._loop = loop
        self._pgconn = pgconn
        self._descriptor = -1  # the duplicate, from the first question on
        self._file: FileId = None  # what the duplicate leads to
        self._watched = _NOTHING  # what the event loop watches
        self._steps: PQGen[Any] | None = None
        self._done: asyncio.Future[Any] | None = None

    async def run(self, steps: PQGen[T]) -> T:
        """Run the generator to its end. If the caller is canceled, `finish` or `drop` must follow."""
        if self._descriptor < 0:
            self._descriptor = os.dup(self._pgconn.socket)
            self._file = file_behind(self._descriptor)
        try:
            wanted = next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
        self._steps = steps
        self._watch(wanted)
        answer: T = await self._end()
        return answer

    async def finish(self, seconds: float) -> None:
        """Run the generator of a canceled caller to its end, for so long. Raises its error, or TimeoutError."""
        if self._steps is None:
            return
        done = self._done = self._loop.create_future()
        # Not asyncio.timeout: in a task that is being canceled, it raises CancelledError before Python 3.11.4.
        try:
            await asyncio.wait((done,), timeout=seconds)
        finally:
            has_ended = not done.cancel()
        if not has_ended:
            raise TimeoutError
        done.result()

    def drop(self) -> None:
        """Forget a generator that has not ended."""
        self._steps = self._done = None

    def close(self) -> None:
        """Watch the socket no more. Closing twice is allowed. Never raises: the connection must get back to its
        pool, even if a handler has closed our descriptors. Then the number may be another file's by now."""
        self.drop()
        if self._descriptor < 0:
            return
        with suppress(OSError):
            self._watch(_NOTHING)
        with suppress(OSError):
            if file_behind(self._descriptor) == self._file:
                os.close(self._descriptor)
        self._descriptor = -1

    async def _end(self) -> Any:
        self._done = self._loop.create_future()
        return await self._done

    def _readable(self) -> None:
        self._go_on(READY_R)

    def _writable(self) -> None:
        self._go_on(READY_W)

    def _go_on(self, ready: int) -> None:
        steps = self._steps
        if steps is None:  # the server speaks, or hangs up, while nobody asks: the next question finds out
            self._watch(_NOTHING)
            return
        try:
            wanted = steps.send(ready)
        except StopIteration as stop:
            self._tell(stop.value, None)
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self._tell(None, error)
        else:
            self._watch(wanted)

    def _tell(self, result: object, error: BaseException | None) -> None:
        done, self._steps, self._done = self._done, None, None
        if self._watched & WAIT_W:
            self._watch(WAIT_R)
        if done is None or done.done():
            return  # its caller was canceled
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def _watch(self, wanted: int) -> None:
        changed, self._watched = self._watched ^ wanted, wanted
        if changed & WAIT_R:
            if wanted & WAIT_R:
                self._loop.add_reader(self._descriptor, self._readable)
            else:
                self._loop.remove_reader(self._descriptor)
        if changed & WAIT_W:
            if wanted & WAIT_W:
                self._loop.add_writer(self._descriptor, self._writable)
            else:
                self._loop.remove_writer(self._descriptor)
