"""PgmqClient and AsyncPgmqClient: any PGMQ queue of the database, for replies and for messages of other programs.

Reached as `bus.queues`, or made with a psycopg pool. Each method is one operation of `flow/queues/` on a pooled
connection, or on the connection that the caller lends with `conn=`. Waiting holds no connection of a pool.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg import sql as pgsql

from commandbus.bus.base import BusBase
from commandbus.bus.call_listener import address_of
from commandbus.bus.one_body import awaited
from commandbus.bus.repositories.base import AsyncRepository, Repository
from commandbus.clock import monotonic
from commandbus.db.bus_pool import unavailable
from commandbus.db.drivers import run, run_async
from commandbus.db.pool import is_pooled, lasting_conninfo, listening_kwargs, note_pooler
from commandbus.flow.operation import Operation, then
from commandbus.lazy import lazy
from commandbus.model.durations import Duration
from commandbus.model.json_values import JsonValue
from commandbus.settings import Settings

if TYPE_CHECKING:
    from commandbus.flow.queues import inspect, messages
    from commandbus.flow.setup import domains
    from commandbus.model.queue import QueueInfo, QueueMessage, QueueMetrics
else:
    domains = lazy("commandbus.flow.setup.domains")
    inspect = lazy("commandbus.flow.queues.inspect")
    messages = lazy("commandbus.flow.queues.messages")

VT_SECONDS = 30.0
POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0
"""How often a listening client also looks: some senders do not notify."""


class PgmqClient(Repository):
    """PGMQ queues for sync code: `bus.queues`, or `PgmqClient(pool)`. Safe to share between threads.

    You can look at a domain's command queue with `read`, which takes nothing there, and send to it. An operation
    that would lose its commands or their leases is refused with InvalidOperationError.
    """

    # --- queues -----------------------------------------------------------------------------------------------

    def create_queue(self, queue: str, *, conn: object = None) -> None:
        """Create a queue. Does nothing if it exists."""
        return self._bus.run(domains.create_queue(queue), conn)

    def drop_queue(self, queue: str, *, conn: object = None) -> bool:
        """Drop a queue and its archive with all their messages. Returns False if there was none."""
        return self._bus.run(domains.drop_queue(queue), conn)

    def list_queues(self, *, conn: object = None) -> list[QueueInfo]:
        """All queues by name, including those of domains."""
        return self._bus.run(inspect.list_queues(), conn)

    def metrics(self, queue: str, *, conn: object = None) -> QueueMetrics:
        """The figures of a queue."""
        return self._bus.run(inspect.metrics(queue), conn)

    def metrics_all(self, *, conn: object = None) -> list[QueueMetrics]:
        """The figures of all queues that this role may read, by name."""
        return self._bus.run(inspect.metrics_all(), conn)

    # --- messages ---------------------------------------------------------------------------------------------

    def send(
        self,
        queue: str,
        message: JsonValue,
        *,
        headers: Mapping[str, JsonValue] | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        conn: object = None,
    ) -> int:
        """Send a message, which may be any JSON value. Returns its id. It can be read after `delay`, or from `at`
        on."""
        sending = _sending(self._bus, queue, [message], [headers], delay, at)
        return self._bus.run(then(sending, lambda msg_ids: msg_ids[0]), conn)

    def send_batch(
        self,
        queue: str,
        messages: Sequence[JsonValue],
        *,
        headers: Sequence[Mapping[str, JsonValue] | None] | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        conn: object = None,
    ) -> list[int]:
        """Send messages in one statement, in their order; `headers` has one entry for each. Returns their ids."""
        return self._bus.run(_sending(self._bus, queue, messages, headers, delay, at), conn)

    def read(
        self, queue: str, *, vt: Duration = VT_SECONDS, qty: int = 1, conn: object = None
    ) -> list[QueueMessage]:
        """Read up to `qty` messages, oldest first. Nobody else can read them for `vt`. After that they can be read
        again, unless they were deleted or archived."""
        return self._bus.run(
            messages.read(queue, self._bus._queue_shapes, vt=messages.seconds_of(vt, "vt"), qty=qty), conn
        )

    def read_with_poll(
        self,
        queue: str,
        *,
        vt: Duration = VT_SECONDS,
        qty: int = 1,
        wait: Duration = 5.0,
        poll_interval: Duration = POLL_SECONDS,
        conn: object = None,
    ) -> list[QueueMessage]:
        """Like `read`. While there is no message, looks again every `poll_interval`, for at most `wait`."""
        waiting = _Waiting(wait, poll_interval)
        while True:
            found = self.read(queue, vt=vt, qty=qty, conn=conn)
            if found or (pause := waiting.pause()) is None:
                return found
            time.sleep(pause)

    def pop(self, queue: str, *, qty: int = 1, conn: object = None) -> list[QueueMessage]:
        """Read up to `qty` messages and remove them at once. If your program fails to handle them, they are
        lost."""
        return self._bus.run(messages.pop(queue, self._bus._queue_shapes, qty=qty), conn)

    def delete(self, queue: str, msg_id: int, *, conn: object = None) -> bool:
        """Remove a message. Returns False if it was not there."""
        return self._bus.run(then(messages.delete(queue, [msg_id]), bool), conn)

    def delete_batch(self, queue: str, msg_ids: Sequence[int], *, conn: object = None) -> list[int]:
        """Remove messages. Returns the ids of those that were there."""
        return self._bus.run(messages.delete(queue, msg_ids), conn)

    def archive(self, queue: str, msg_id: int, *, conn: object = None) -> bool:
        """Move a message to the queue's archive. Returns False if it was not there."""
        archiving = messages.archive(queue, self._bus._queue_shapes, [msg_id])
        return self._bus.run(then(archiving, bool), conn)

    def archive_batch(self, queue: str, msg_ids: Sequence[int], *, conn: object = None) -> list[int]:
        """Move messages to the queue's archive. Returns the ids of those that were there."""
        return self._bus.run(messages.archive(queue, self._bus._queue_shapes, msg_ids), conn)

    def set_vt(self, queue: str, msg_id: int, vt: Duration, *, conn: object = None) -> QueueMessage | None:
        """Make a message readable after `vt`, counted from now. Returns None if it was not there."""
        return self._bus.run(
            messages.set_vt(queue, self._bus._queue_shapes, msg_id, messages.seconds_of(vt, "vt")), conn
        )

    def purge(self, queue: str, *, conn: object = None) -> int:
        """Remove all messages. Returns how many there were."""
        return self._bus.run(messages.purge(queue), conn)

    # --- waiting ----------------------------------------------------------------------------------------------

    def wait_for(self, queue: str, *, wait: Duration = 30.0) -> bool:
        """Wait until a message can be read. Returns False if there is none after `wait`.

        It listens on a connection of its own, and is notified at once of a reply, or of a message that `send` of a
        PgmqClient sends. It also looks once a second, because other programs may not notify, and when a delayed
        message is due. Behind PgBouncer, which delivers no notifications, it looks four times a second.
        """
        waiting = _Waiting(wait, LOOK_SECONDS)
        if self._bus.run(inspect.next_visible(queue)) == 0:
            return True
        settings = address_of(self._bus._database, self._bus.settings, self._bus._lent_pool)
        with _listening(settings, queue) as conn:
            while (seconds := run(conn, inspect.next_visible(queue))) != 0:
                if (pause := waiting.pause(seconds)) is None:
                    return False
                if not is_pooled(settings):
                    list(conn.notifies(timeout=pause, stop_after=1))
                else:
                    time.sleep(min(pause, LOOK_SECONDS / 4))
        return True


class AsyncPgmqClient(AsyncRepository):
    """PGMQ queues for async code: the same methods, awaited. `bus.queues`, or `AsyncPgmqClient(pool)`."""

    create_queue = awaited(PgmqClient.create_queue)
    drop_queue = awaited(PgmqClient.drop_queue)
    list_queues = awaited(PgmqClient.list_queues)
    metrics = awaited(PgmqClient.metrics)
    metrics_all = awaited(PgmqClient.metrics_all)
    send = awaited(PgmqClient.send)
    send_batch = awaited(PgmqClient.send_batch)
    read = awaited(PgmqClient.read)
    pop = awaited(PgmqClient.pop)
    delete = awaited(PgmqClient.delete)
    delete_batch = awaited(PgmqClient.delete_batch)
    archive = awaited(PgmqClient.archive)
    archive_batch = awaited(PgmqClient.archive_batch)
    set_vt = awaited(PgmqClient.set_vt)
    purge = awaited(PgmqClient.purge)

    async def read_with_poll(
        self,
        queue: str,
        *,
        vt: Duration = VT_SECONDS,
        qty: int = 1,
        wait: Duration = 5.0,
        poll_interval: Duration = POLL_SECONDS,
        conn: object = None,
    ) -> list[QueueMessage]:
        """Like `read`. While there is no message, looks again every `poll_interval`, for at most `wait`."""
        waiting = _Waiting(wait, poll_interval)
        while True:
            found = await self.read(queue, vt=vt, qty=qty, conn=conn)
            if found or (pause := waiting.pause()) is None:
                return found
            await asyncio.sleep(pause)

    async def wait_for(self, queue: str, *, wait: Duration = 30.0) -> bool:
        """Wait until a message can be read; see PgmqClient.wait_for."""
        waiting = _Waiting(wait, LOOK_SECONDS)
        if await self._bus.run(inspect.next_visible(queue)) == 0:
            return True
        settings = address_of(self._bus._database, self._bus.settings, self._bus._lent_pool)
        async with _listening_async(settings, queue) as conn:
            while (seconds := await run_async(conn, inspect.next_visible(queue))) != 0:
                if (pause := waiting.pause(seconds)) is None:
                    return False
                if not is_pooled(settings):
                    async for _ in conn.notifies(timeout=pause, stop_after=1):
                        pass
                else:
                    await asyncio.sleep(min(pause, LOOK_SECONDS / 4))
        return True


def _sending(
    bus: BusBase, queue: str, sent: Sequence[Any], headers: Any, delay: Any, at: datetime | None
) -> Operation[list[int]]:
    after = None if delay is None else messages.seconds_of(delay, "delay")
    limit = bus.settings.max_payload_bytes
    return messages.send(queue, sent, headers=headers, delay=after, at=at, max_bytes=limit)


class _Waiting:
    """One wait: until when, and how long to pause between two looks."""

    def __init__(self, wait: Duration, interval: Duration) -> None:
        self._until = monotonic() + messages.seconds_of(wait, "wait")
        self._interval = max(0.001, messages.seconds_of(interval, "poll_interval"))

    def pause(self, due_in: float | None = None) -> float | None:
        """Seconds until the next look, or until a message is due if that is earlier; None when the time is up."""
        left = self._until - monotonic()
        if left <= 0:
            return None
        return min(left, self._interval, *([] if due_in is None else [due_in]))


def _channels(queue: str) -> list[pgsql.Composed]:
    """The channels of a queue: ours, and PGMQ's own, which is used after `pgmq.enable_notify_insert`."""
    names = (messages.channel_of(queue), f"pgmq.q_{queue.lower()}.INSERT")
    return [pgsql.SQL("LISTEN {}").format(pgsql.Identifier(name)) for name in names]


@contextmanager
def _listening(settings: Settings, queue: str) -> Iterator[Connection[Any]]:
    address = lasting_conninfo(settings.database_url)
    try:
        try:
            more = {} if is_pooled(settings) else listening_kwargs(settings)
            conn = Connection.connect(address, autocommit=True, **more)
        except psycopg.OperationalError as error:
            if not note_pooler(settings, error):
                raise
            conn = Connection.connect(address, autocommit=True)
        with conn:
            conn.prepare_threshold = None
            for listen in () if is_pooled(settings) else _channels(queue):
                conn.execute(listen)
            yield conn
    except psycopg.OperationalError as error:
        raise unavailable(error) from error


@asynccontextmanager
async def _listening_async(settings: Settings, queue: str) -> AsyncIterator[AsyncConnection[Any]]:
    address = lasting_conninfo(settings.database_url)
    try:
        try:
            more = {} if is_pooled(settings) else listening_kwargs(settings)
            conn = await AsyncConnection.connect(address, autocommit=True, **more)
        except psycopg.OperationalError as error:
            if not note_pooler(settings, error):
                raise
            conn = await AsyncConnection.connect(address, autocommit=True)
        async with conn:
            conn.prepare_threshold = None
            for listen in () if is_pooled(settings) else _channels(queue):
                await conn.execute(listen)
            yield conn
    except psycopg.OperationalError as error:
        raise unavailable(error) from error
