"""Limits on the bus: a permit for a block of plain application code, and the state of limits."""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import socket
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar, Unpack
from weakref import WeakSet

from psycopg.errors import InsufficientPrivilege

from commandbus.bus.base import BusBase, whoami
from commandbus.db.bus_pool import keep
from commandbus.errors import ConfigurationError, UnknownLimitError
from commandbus.flow.operation import Operation
from commandbus.lazy import lazy
from commandbus.logger import safe_logger
from commandbus.model.durations import Duration
from commandbus.model.limit import WAIT_SECONDS, Limit, LimitOptions, PermitUsage
from commandbus.model.page import Page
from commandbus.settings import Settings

if TYPE_CHECKING:
    from commandbus.flow.commands import operate
    from commandbus.flow.limits import declare as limits
    from commandbus.flow.limits import detail
    from commandbus.flow.limits import inspect as limit_inspect
    from commandbus.flow.limits import metrics as limit_metrics
    from commandbus.flow.limits.declare import LimitRow
    from commandbus.flow.limits.detail import LimitDetail
    from commandbus.flow.limits.inspect import Estimate, LimitInfo
    from commandbus.limits import inspect_redis, make_client, with_block
    from commandbus.limits.client import LimitClient
    from commandbus.limits.with_block import Hold
else:
    detail = lazy("commandbus.flow.limits.detail")
    limit_metrics = lazy("commandbus.flow.limits.metrics")
    limit_inspect = lazy("commandbus.flow.limits.inspect")
    limits = lazy("commandbus.flow.limits.declare")
    operate = lazy("commandbus.flow.commands.operate")
    make_client = lazy("commandbus.limits.make_client")
    with_block = lazy("commandbus.limits.with_block")
    inspect_redis = lazy("commandbus.limits.inspect_redis")

T = TypeVar("T")
logger = safe_logger("commandbus.limits")
CLOSE_SECONDS = 5.0
AT_EXIT_SECONDS = 1.0


class LimitClientHolder:
    """The limit client of a bus: created on first use, and created again in a forked process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limit_client: LimitClient | None = None
        self.has_declared = False  # has the bus declared the limits of its settings?

    def get(self, settings: Callable[[], Settings]) -> LimitClient:
        """The limit client."""
        with self._lock:
            if self._limit_client is None or not self._limit_client.is_serving:
                owner = f"{socket.gethostname()[:40]}-{os.getpid()}-bus-{secrets.token_hex(3)}"
                self._limit_client = make_client.make_limit_client(settings(), owner)
                self._limit_client.start()
                _open.add(self._limit_client)
            return self._limit_client

    def leave_to_parent(self) -> None:
        """In a forked process: leave the limit client and its permits to the parent."""
        self._lock = threading.Lock()
        limit_client, self._limit_client = self._limit_client, None
        if limit_client is not None:
            limit_client.leave_to_parent()
            keep(limit_client)

    def close(self) -> None:
        """End the limit client, if there is one."""
        with self._lock:
            if self._limit_client is not None and self._limit_client.is_serving:
                self._limit_client.stop(CLOSE_SECONDS)
            self._limit_client = None


_open: WeakSet[LimitClient] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Release the permits of a program that ends without closing its bus."""
    for limit_client in list(_open):
        if limit_client.is_serving:
            limit_client.stop(AT_EXIT_SECONDS)


class _LimitOperations(BusBase):
    """Operations made from arguments."""

    def _declaration(self, *declared: Limit) -> Operation[list[str]]:
        return limits.declare(
            make_client.settle_limits(declared, self.settings), limits.location_of(self.settings)
        )

    def _log(self, notes: list[str]) -> None:
        for note in notes:
            logger.warning("%s", note)

    def _setting(self, name: str, options: LimitOptions, who: str | None, why: str | None) -> Operation[LimitRow]:
        if options.get("store") == "redis" and self.settings.redis_url is None:
            raise ConfigurationError(
                f"limit {name!r}: store 'redis' needs redis_url, which is not set; set COMMANDBUS_REDIS_URL"
            )
        return limits.set_limit(
            name, options, limits.location_of(self.settings), operate.operator_action(who or whoami(), why)
        )

    def _unsetting(
        self, name: str, options: tuple[str, ...], who: str | None, why: str | None
    ) -> Operation[LimitRow | None]:
        return limits.unset_limit(
            name, options, limits.location_of(self.settings), operate.operator_action(who or whoami(), why)
        )


class LimitMethods(_LimitOperations):
    """What CommandBus can do with limits."""

    _limit_clients: LimitClientHolder

    @abstractmethod
    def run(self, operation: Operation[T], conn: object = None) -> T: ...

    @abstractmethod
    def _resolved(self) -> Settings: ...

    @contextmanager
    def limit(
        self,
        name: str,
        *,
        wait: Duration = WAIT_SECONDS,
        timeout: Duration | None = None,
    ) -> Iterator[Hold]:
        """A permit of a limit for the block: `with bus.limit("docai", timeout=60) as call: …`.

        Waits up to `wait`, then raises LimitTimeoutError. The call may take `timeout` (default: the limit's
        `call_timeout`; 0 is any time). Nothing interrupts a longer call, but the end of the block raises
        ApiTimeoutError. So pass `call.remaining()` as the timeout to the client that makes the call. It raises
        LimitLostError if the permit is lost (`call.is_lost`), because its lease could not be renewed in time.
        """
        times = with_block.check_block_times(name, wait, timeout)
        with with_block.sync_block(with_block.ProgramPermits(self._ready_limit_client()), name, *times) as hold:
            yield hold

    def declare_limit(self, limit: Limit) -> None:
        """Declare a limit for all programs. Values that a person has set at run time still override it."""
        self._log(self.run(self._declaration(limit)))

    def limits(self) -> Page[LimitInfo]:
        """Returns all limits, with their state."""
        found = self.run(limit_inspect.list_waiting())
        looks = self._look(*(row for row, _ in found))
        return Page([limit_inspect.describe(row, looks[row.name], waiting) for row, waiting in found])

    def get_limit(self, name: str) -> LimitInfo | None:
        """Returns one limit, with its state; None if there is none."""
        try:
            return self._describe(name)
        except UnknownLimitError:
            return None

    def limit_detail(self, name: str) -> LimitDetail:
        """Returns one limit with the holders of its permits, the first 100 in its line, and its last back-offs."""
        return self.run(detail.limit_detail(self._describe(name)))

    def _describe(self, name: str) -> LimitInfo:
        row, waiting = self.run(limit_inspect.get_waiting(name))
        return limit_inspect.describe(row, self._look(row)[name], waiting)

    def set_limit(
        self, name: str, *, operator: str | None = None, reason: str | None = None, **options: Unpack[LimitOptions]
    ) -> LimitInfo:
        """Change a limit at run time: `bus.set_limit("docai", concurrency=5, rate="120/m")`. All workers follow
        at once, and it stays so over deployments, until it is unset."""
        self.run(self._setting(name, options, operator, reason))
        return self._describe(name)

    def unset_limit(
        self, name: str, *options: str, operator: str | None = None, reason: str | None = None
    ) -> LimitInfo | None:
        """Go back to the declared values, for these options or all. If nobody declares the limit, deletes it and
        returns None."""
        row = self.run(self._unsetting(name, options, operator, reason))
        return None if row is None else self.get_limit(name)

    def estimate(self, name: str, *, domain: str | None = None, command_id: str | None = None) -> Estimate:
        """Estimate how long a command that is sent now would wait for a limit, or a waiting one (by its id)."""
        row, ahead = self.run(limit_inspect.row_and_ahead(name, domain, command_id))
        look = self._look(row)[name]
        return limit_inspect.estimate(row, look, ahead, is_waiting=command_id is not None)

    @abstractmethod
    def _mind_the_loop(self) -> None: ...

    def _ready_limit_client(self) -> LimitClient:
        self._mind_the_loop()
        if self.settings.permit_limits and not self._limit_clients.has_declared:
            with suppress(InsufficientPrivilege):  # a role that only sends may not; workers and operators declare
                self._log(self.run(self._declaration(*self.settings.permit_limits)))
            self._limit_clients.has_declared = True
        return self._limit_clients.get(self._resolved)

    def _look(self, *rows: LimitRow) -> dict[str, PermitUsage]:
        kept, elsewhere = _by_backend(rows)
        return (
            kept
            if not elsewhere
            else kept | inspect_redis.look_at(self.settings, elsewhere, self.run(limit_metrics.redis_fleet()))
        )


class AsyncLimitMethods(_LimitOperations):
    """What AsyncCommandBus can do with limits."""

    _limit_clients: LimitClientHolder

    @abstractmethod
    async def run(self, operation: Operation[T], conn: object = None) -> T: ...

    @abstractmethod
    def _resolved(self) -> Settings: ...

    @asynccontextmanager
    async def limit(
        self,
        name: str,
        *,
        wait: Duration = WAIT_SECONDS,
        timeout: Duration | None = None,
    ) -> AsyncIterator[Hold]:
        """A permit of a limit for the block: `async with bus.limit("docai", timeout=60): …`.

        Waits up to `wait`, then raises LimitTimeoutError. After `timeout` (default: the limit's `call_timeout`; 0
        is any time), the code that the block awaits is canceled, and the block raises ApiTimeoutError. If the
        permit is lost, because its lease could not be renewed in time, the code is canceled, too, and the block
        raises LimitLostError.
        """
        times = with_block.check_block_times(name, wait, timeout)
        user = with_block.ProgramPermits(await self._ready_limit_client(), asyncio.get_running_loop())
        async with with_block.async_block(user, name, *times) as hold:
            yield hold

    async def declare_limit(self, limit: Limit) -> None:
        """Declare a limit for all programs. Values that a person has set at run time still override it."""
        self._log(await self.run(self._declaration(limit)))

    async def limits(self) -> Page[LimitInfo]:
        """Returns all limits, with their state."""
        found = await self.run(limit_inspect.list_waiting())
        looks = await self._look(*(row for row, _ in found))
        return Page([limit_inspect.describe(row, looks[row.name], waiting) for row, waiting in found])

    async def get_limit(self, name: str) -> LimitInfo | None:
        """Returns one limit, with its state; None if there is none."""
        try:
            return await self._describe(name)
        except UnknownLimitError:
            return None

    async def limit_detail(self, name: str) -> LimitDetail:
        """Returns one limit with the holders of its permits, the first 100 in its line, and its last back-offs."""
        return await self.run(detail.limit_detail(await self._describe(name)))

    async def _describe(self, name: str) -> LimitInfo:
        row, waiting = await self.run(limit_inspect.get_waiting(name))
        return limit_inspect.describe(row, (await self._look(row))[name], waiting)

    async def set_limit(
        self, name: str, *, operator: str | None = None, reason: str | None = None, **options: Unpack[LimitOptions]
    ) -> LimitInfo:
        """Change a limit at run time: `await bus.set_limit("docai", concurrency=5, rate="120/m")`. All workers
        follow at once, and it stays so over deployments, until it is unset."""
        await self.run(self._setting(name, options, operator, reason))
        return await self._describe(name)

    async def unset_limit(
        self, name: str, *options: str, operator: str | None = None, reason: str | None = None
    ) -> LimitInfo | None:
        """Go back to the declared values, for these options or all. If nobody declares the limit, deletes it and
        returns None."""
        row = await self.run(self._unsetting(name, options, operator, reason))
        return None if row is None else await self.get_limit(name)

    async def estimate(self, name: str, *, domain: str | None = None, command_id: str | None = None) -> Estimate:
        """Estimate how long a command that is sent now would wait for a limit, or a waiting one (by its id)."""
        row, ahead = await self.run(limit_inspect.row_and_ahead(name, domain, command_id))
        look = (await self._look(row))[name]
        return limit_inspect.estimate(row, look, ahead, is_waiting=command_id is not None)

    async def _ready_limit_client(self) -> LimitClient:
        if self.settings.permit_limits and not self._limit_clients.has_declared:
            with suppress(InsufficientPrivilege):  # a role that only sends may not; workers and operators declare
                self._log(await self.run(self._declaration(*self.settings.permit_limits)))
            self._limit_clients.has_declared = True
        return await asyncio.to_thread(self._limit_clients.get, self._resolved)

    async def _look(self, *rows: LimitRow) -> dict[str, PermitUsage]:
        kept, elsewhere = _by_backend(rows)
        if not elsewhere:
            return kept
        fleet = await self.run(limit_metrics.redis_fleet())
        return kept | await asyncio.to_thread(inspect_redis.look_at, self.settings, elsewhere, fleet)


def _by_backend(rows: Sequence[LimitRow]) -> tuple[dict[str, PermitUsage], list[LimitRow]]:
    """The usage of limits whose permits are in PostgreSQL, and the rows of the other limits."""
    return (
        {row.name: row.usage for row in rows if row.store == "postgres"},
        [row for row in rows if row.store != "postgres"],
    )
