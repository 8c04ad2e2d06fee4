"""AsyncCommandBus: the shell for async code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast, overload

import psycopg
from psycopg import AsyncConnection
from psycopg import errors as pg
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from commandbus.bus.base import POOL_SIZE
from commandbus.bus.breakers import AsyncBreakerMethods
from commandbus.bus.call_listener import LAST_LOOK_SECONDS, WaitingCall, address_of
from commandbus.bus.data_access import AsyncDataAccess
from commandbus.bus.fleet import AsyncFleetMethods
from commandbus.bus.limits import AsyncLimitMethods, LimitClientHolder
from commandbus.bus.one_body import awaited
from commandbus.bus.send_middleware import AsyncSendMiddlewareMethods, Chain, Given
from commandbus.bus.send_within import TimedSend
from commandbus.bus.sending import CallOptions
from commandbus.bus.sync import CommandBus
from commandbus.bus.waiting import AsyncWaitMethods
from commandbus.clock import monotonic
from commandbus.db.answer_clock import NoAnswerError, run_until_async
from commandbus.db.bus_pool import AsyncBusPool, make_async_bus_pool, no_connection, unavailable
from commandbus.db.drivers import run_async
from commandbus.db.lent_connection import borrow_async
from commandbus.db.pool import lasting_conninfo
from commandbus.errors import CommandBusError, DatabaseUnavailableError
from commandbus.flow.operation import Operation, Plan, explain_absence
from commandbus.lazy import lazy
from commandbus.model.command import NewCommand, SentCommand
from commandbus.model.command_class import addressed
from commandbus.model.durations import Duration, format_seconds
from commandbus.model.json_values import Json, JsonValue, PayloadObject
from commandbus.model.priority import Priority
from commandbus.model.retry import OnExhausted
from commandbus.settings import Settings

if TYPE_CHECKING:
    from commandbus.flow.commands import call as calls
    from commandbus.flow.commands import inspect, operate, pause, prune
    from commandbus.flow.setup import domains, migrate
    from commandbus.model import process
    from commandbus.model.to_json import JsonDefault
else:
    calls = lazy("commandbus.flow.commands.call")
    domains = lazy("commandbus.flow.setup.domains")
    inspect = lazy("commandbus.flow.commands.inspect")
    migrate = lazy("commandbus.flow.setup.migrate")
    operate = lazy("commandbus.flow.commands.operate")
    pause = lazy("commandbus.flow.commands.pause")
    process = lazy("commandbus.model.process")
    prune = lazy("commandbus.flow.commands.prune")

T = TypeVar("T")
LATE_SECONDS = 0.2  # extra time, so that the pool's own, clearer error comes first


class AsyncCommandBus(
    AsyncBreakerMethods,
    AsyncLimitMethods,
    AsyncFleetMethods,
    AsyncWaitMethods,
    AsyncSendMiddlewareMethods,
    AsyncDataAccess,
):
    """The bus for async code: the same methods, awaited. One bus belongs to one event loop."""

    _limit: bytes | None = None  # the console's: it limits the time of each statement (db/drivers.py)

    def __init__(
        self,
        database_url: str | None = None,
        *,
        pool: AsyncConnectionPool[Any] | None = None,
        settings: Settings | None = None,
        json_default: JsonDefault | None = None,
        middleware: Given = None,
    ) -> None:
        if middleware is not None:
            self._chain = Chain(middleware, "async", "this AsyncCommandBus")
        self._limit_clients = LimitClientHolder()
        self._own_pool: AsyncBusPool | None = None
        self._unfinished: set[asyncio.Task[Any]] = set()  # canceled tasks that nobody waits for any more
        super().__init__(database_url, settings, pool, json_default)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close what this bus opened. Callers that wait in `call` or `wait` get BusClosedError."""
        await asyncio.to_thread(self._listening.close)
        await asyncio.to_thread(self._limit_clients.close)
        if self._own_pool is not None:
            await self._own_pool.close()
            self._own_pool = None
        self._database.close()

    async def run(self, operation: Operation[T], conn: object = None) -> T:
        """Run an operation of `commandbus.flow`; on `conn` it joins the caller's transaction."""
        try:
            if conn is not None:
                return await run_async(await borrow_async(conn), operation)
            return await self._run(operation)
        except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
            raise explain_absence(error) from None

    async def follow(self, plan: Plan[T], conn: object = None) -> T:
        """Run operations one after the other, each a transaction of its own (unless `conn` is lent)."""
        try:
            operation = next(plan)
            while True:
                try:
                    answer = await AsyncCommandBus.run(self, operation, conn)  # as it is: a subclass may mask it
                except CommandBusError as error:
                    operation = plan.throw(error)
                else:
                    operation = plan.send(answer)
        except StopIteration as stop:
            return cast(T, stop.value)

    async def _run(self, operation: Operation[T], seconds: float | None = None) -> T:
        """Run an operation on a connection of a pool, and wait for a connection for so many seconds."""
        if self._lent_pool is not None:
            async with self._lent_connection(seconds) as lent:
                return await run_async(lent, operation)
        pool = await self._pool()
        own = await pool.take(seconds)
        try:
            return await run_async(own, operation, limit=self._limit)
        finally:
            await pool.putconn(own)

    async def _send_within(self, send: TimedSend, conn: object) -> SentCommand:
        if conn is None:
            with send.explained():
                return await self._run_until(send.until, send.sending)
        lent = await borrow_async(conn)
        with send.explained(is_transaction=not lent.autocommit):
            try:
                return await run_until_async(send.until, lent, send.sending)
            except NoAnswerError:
                await lent.close()
                raise

    async def _run_until(self, until: float, operation: Operation[T]) -> T:
        """Run an operation on a connection of a pool until this moment (monotonic)."""
        seconds = max(0.0, until - monotonic())
        if self._lent_pool is not None:
            async with self._lent_connection(seconds) as lent:
                return await run_until_async(until, lent, operation, commits=True)
        pool = await self._pool()
        own = await pool.take(seconds)
        try:
            return await run_until_async(until, own, operation)
        finally:
            await pool.putconn(own)

    async def _run_within(self, seconds: float, operation: Operation[T]) -> T:
        """Like `_run`, but returns within that time. A canceled query ends only when its server answers; this
        method does not wait for that."""
        task = asyncio.ensure_future(self._run(operation, seconds))
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds + LATE_SECONDS)
        except asyncio.CancelledError:
            await _cancel(task)
            raise
        if done:
            return task.result()
        self._unfinished.add(task)
        task.add_done_callback(self._forget)
        task.cancel()
        raise DatabaseUnavailableError(
            f"the database has not answered for {format_seconds(seconds)}; what it was asked to do may have been "
            f"done"
        )

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._unfinished.discard(task)
        if not task.cancelled():
            task.exception()  # read it, because nobody else will, and asyncio would complain

    @asynccontextmanager
    async def _lent_connection(self, seconds: float | None) -> AsyncIterator[AsyncConnection[Any]]:
        self._check_lent()
        pool: AsyncConnectionPool[Any] = self._lent_pool
        async with AsyncExitStack() as stack:
            try:
                conn = await stack.enter_async_context(pool.connection(seconds))
            except PoolTimeout as error:
                raise no_connection(pool, error, seconds) from error
            yield conn

    async def _pool(self) -> AsyncBusPool:
        if self._own_pool is None:
            settings = self._database.resolve()
            self._own_pool = make_async_bus_pool(
                settings,
                max_size=settings.pool_max_size or POOL_SIZE,
                is_patient=self._database.revives,
                name=self._session_name,
            )  # assigned before the await, so that a second task does not make another pool
            await self._own_pool.open()
        return self._own_pool

    def _resolved(self) -> Settings:
        return self._database.resolve()

    async def connect(self) -> AsyncConnection[tuple[Any, ...]]:
        """A new psycopg connection to the bus's database. You must close it. See CommandBus.connect for what it
        costs."""
        try:
            return await AsyncConnection.connect(lasting_conninfo(self._database.resolve().database_url))
        except psycopg.OperationalError as error:
            raise unavailable(error) from error

    @overload
    async def call(
        self, domain: str, command_type: str, data: JsonValue = None, **options: Unpack[CallOptions]
    ) -> Json: ...
    @overload
    async def call(self, command: PayloadObject, /, **options: Unpack[CallOptions]) -> Json: ...
    async def call(
        self,
        domain: str | PayloadObject,
        command_type: str | None = None,
        data: JsonValue = None,
        *,
        command_id: str | None = None,
        correlation_id: str | None = None,
        max_attempts: int | None = None,
        headers: Mapping[str, JsonValue] | None = None,
        timeout: Duration | None = None,
        expires: Duration | datetime | None = None,
        on_exhausted: OnExhausted | None = None,
        priority: Priority | None = None,
        wait: Duration = 30.0,
        conn: object = None,
    ) -> Json:
        """Send a command, wait for its outcome, and return its result; see CommandBus.call."""
        if command_type is None:
            domain, command_type, data = addressed(domain)
        new = NewCommand(
            command_type, data, command_id, correlation_id, max_attempts=max_attempts, headers=headers,
            timeout=timeout, expires=expires, on_exhausted=on_exhausted, priority=priority,
        )  # fmt: skip
        listen_at = partial(address_of, self._database, self.settings, self._lent_pool)
        address = cast(str, domain)  # checked when it is prepared
        begun: list[WaitingCall] = []

        async def send(new: NewCommand) -> SentCommand:
            begun.append(self._call(address, new, timeout=new.timeout, wait=wait, conn=conn, listen_at=listen_at))
            return await self._send_call(begun[0])

        sent = await (send(new) if self._chain is None else self._send_one(address, new, send))
        assert sent is not None  # noqa: S101 - a send has a receipt, or raises
        if not begun:  # a middleware has returned the receipt of another command
            return await self.wait(sent, wait=wait)
        call = begun[0]
        with call.awaiting(sent) as heard:
            try:
                async with asyncio.timeout(call.remaining()):
                    outcome = await asyncio.wrap_future(heard)
            except TimeoutError:
                outcome = None
        if outcome is None:  # the outcome was not notified in time, or the listener does not see the command
            try:
                outcome = (await self._run_within(LAST_LOOK_SECONDS, calls.outcomes([sent[:2]]))).get(sent.id)
            except (psycopg.OperationalError, DatabaseUnavailableError) as error:
                raise call.timed_out(sent) from error
        return call.conclude(sent, outcome)

    async def _send_call(self, call: WaitingCall) -> SentCommand:
        try:
            return await self._run_within(call.seconds_to_send(), call.send)
        except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
            raise explain_absence(error) from None

    migrate = awaited(CommandBus.migrate)
    schema_state = awaited(CommandBus.schema_state)
    create_domain = awaited(CommandBus.create_domain)
    list_domains = awaited(CommandBus.list_domains)
    create_roles = awaited(CommandBus.create_roles)
    send = awaited(CommandBus.send)
    start_process = awaited(CommandBus.start_process)
    status = awaited(CommandBus.status)
    workers = awaited(CommandBus.workers)
    find_id = awaited(CommandBus.find_id)
    database_report = awaited(CommandBus.database_report)
    pause = awaited(CommandBus.pause)
    resume = awaited(CommandBus.resume)
    pauses = awaited(CommandBus.pauses)
    prune = awaited(CommandBus.prune)
    preview_prune = awaited(CommandBus.preview_prune)


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task
