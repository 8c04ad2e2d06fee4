"""Batches on the bus: the methods of both shells, and how one waits for a batch."""

from __future__ import annotations

import asyncio
import inspect
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from commandbus.bus.base import BusBase, whoami
from commandbus.clock import monotonic
from commandbus.errors import BatchNotFoundError, BatchTimeoutError, InvalidCommandError
from commandbus.flow.operation import Operation, Plan
from commandbus.lazy import lazy
from commandbus.model import names
from commandbus.model.command import NewCommand
from commandbus.model.durations import Duration, format_seconds, parse_seconds
from commandbus.model.json_values import JsonValue
from commandbus.model.page import Page

if TYPE_CHECKING:
    from commandbus.flow.batches import create as batch
    from commandbus.flow.batches import inspect as batch_look
    from commandbus.flow.batches import operate as batch_operate
    from commandbus.flow.commands import operate
    from commandbus.model.batch import (
        BatchCancelReport,
        BatchRecord,
        BatchRetryReport,
        BatchStatus,
        CreatedBatch,
        WhenComplete,
    )
else:
    batch = lazy("commandbus.flow.batches.create")
    batch_look = lazy("commandbus.flow.batches.inspect")
    batch_operate = lazy("commandbus.flow.batches.operate")
    operate = lazy("commandbus.flow.commands.operate")

T = TypeVar("T")
Commands = Iterable[NewCommand | Mapping[str, object]]
FIRST_LOOK_SECONDS = 0.05
LOOK_SECONDS = 0.5


class _BatchOperations(BusBase):
    """Operations made of arguments."""

    def _create_batch(self, domain: str, commands: Commands, **definition: Any) -> Operation[CreatedBatch]:
        limit = self.settings.max_payload_bytes
        made = batch.define(domain, max_bytes=limit, **definition)
        outgoing, guard = batch.prepare_all(commands, max_bytes=limit), self._guard(domain)
        if guard is None:
            return batch.create(made, outgoing)
        return guard.before(batch.create(made, guard.watch(outgoing)))

    def _add_to_batch(self, domain: str, batch_id: str, commands: Commands) -> Operation[int]:
        outgoing = batch.prepare_all(commands, max_bytes=self.settings.max_payload_bytes)
        guard = self._guard(names.check_domain(domain))
        if guard is None:
            return batch.add(domain, batch_id, outgoing)
        return guard.before(batch.add(domain, batch_id, guard.watch(outgoing)))


class BatchMethods(_BatchOperations):
    """What CommandBus can do with batches."""

    @abstractmethod
    def run(self, operation: Operation[T], conn: object = None) -> T: ...

    @abstractmethod
    def follow(self, plan: Plan[T], conn: object = None) -> T: ...

    def create_batch(
        self,
        domain: str,
        commands: Commands,
        *,
        batch_id: str | None = None,
        name: str | None = None,
        custom_data: JsonValue = None,
        on_complete: WhenComplete | None = None,
        is_open: bool = False,
        conn: object = None,
    ) -> CreatedBatch:
        """Send commands as one batch, all or none, in one transaction (with `conn`: the caller's).

        `commands` may be of any length; it is read while it is sent. When the last member has ended, `on_complete`
        is sent exactly once: a command (an OnComplete, a dict, or the handler itself) or a reply
        (`{"reply_to": queue}`). The same `batch_id` with the same content returns the existing batch (`created` is
        False); with other content it raises DuplicateBatchError. If a command exists already, this raises
        DuplicateCommandError. You can add to an open batch (`add_to_batch`); it ends only after `close_batch`.
        """
        operation = self._create_batch(
            domain, commands, batch_id=batch_id, name=name, custom_data=custom_data, on_complete=on_complete,
            is_open=is_open,
        )  # fmt: skip
        return self.run(operation, conn)

    def add_to_batch(self, domain: str, batch_id: str, commands: Commands, *, conn: object = None) -> int:
        """Send commands as members of an open batch, all or none. Returns how many."""
        return self.run(self._add_to_batch(domain, batch_id, commands), conn)

    def close_batch(self, domain: str, batch_id: str, *, conn: object = None) -> bool:
        """Close an open batch, so that it can end. Returns False if it was closed already."""
        return self.run(batch.close(domain, batch_id), conn)

    def get_batch(self, domain: str, batch_id: str) -> BatchRecord | None:
        """Returns what is known about a batch: counts, progress, rate; None if there is no such batch."""
        return self.run(batch_look.get(domain, batch_id))

    def query_batches(
        self,
        domain: str | None = None,
        status: BatchStatus | str | None = None,
        *,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[BatchRecord]:
        """A page of batches, newest first; the next begins at `cursor=page.next_cursor`."""
        return self.run(batch_look.query(domain=domain, status=status, limit=limit, cursor=cursor))

    def wait_for_batch(
        self,
        domain: str,
        batch_id: str,
        *,
        wait: Duration | None = None,
        on_progress: Callable[[BatchRecord], object] | None = None,
    ) -> BatchRecord:
        """Wait until a batch is finished; BatchTimeoutError if that takes longer than `wait`.

        `on_progress` is called with every look at the batch, twice a second. What must happen when the batch is
        finished, even if this process is not there any more, belongs in `on_complete`.
        """
        waiting = _Waiting(domain, batch_id, wait)
        while True:
            record = waiting.check(self.get_batch(domain, batch_id))
            if on_progress is not None:
                on_progress(record)
            if record.is_finished:
                return record
            time.sleep(waiting.pause(record))

    def cancel_batch(
        self, domain: str, batch_id: str, *, operator: str | None = None, reason: str | None = None
    ) -> BatchCancelReport:
        """Cancel a batch: members that wait or need a person are CANCELED, running ones are asked to stop.

        The batch ends CANCELED when the last one has stopped. If a crash interrupts this, workers continue it.
        """
        operator_action = operate.operator_action(operator or whoami(), reason, "CANCEL")
        return self.follow(batch_operate.cancel(domain, batch_id, operator_action))

    def retry_failed(
        self,
        domain: str,
        batch_id: str,
        *,
        name: str | None = None,
        on_complete: WhenComplete | None = None,
        operator: str | None = None,
        reason: str | None = None,
    ) -> BatchRetryReport:
        """Retry a batch's members in the troubleshooting queue, and send those that FAILED for good again.

        Those are sent in a new batch that names this one (`retry_of`), under new command_ids, each at most once. A
        command that fails again is a member of the new batch. `name` and `on_complete` are for the new batch.
        """
        operator_action = operate.operator_action(operator or whoami(), reason, "RETRY")
        return self.follow(
            batch_operate.retry_failed(domain, batch_id, operator_action, name=name, on_complete=on_complete)
        )


class AsyncBatchMethods(_BatchOperations):
    """What AsyncCommandBus can do with batches: the same, awaited."""

    @abstractmethod
    async def run(self, operation: Operation[T], conn: object = None) -> T: ...

    @abstractmethod
    async def follow(self, plan: Plan[T], conn: object = None) -> T: ...

    async def create_batch(
        self,
        domain: str,
        commands: Commands,
        *,
        batch_id: str | None = None,
        name: str | None = None,
        custom_data: JsonValue = None,
        on_complete: WhenComplete | None = None,
        is_open: bool = False,
        conn: object = None,
    ) -> CreatedBatch:
        """Send commands as one batch, all or none; see CommandBus.create_batch."""
        operation = self._create_batch(
            domain, commands, batch_id=batch_id, name=name, custom_data=custom_data, on_complete=on_complete,
            is_open=is_open,
        )  # fmt: skip
        return await self.run(operation, conn)

    async def add_to_batch(self, domain: str, batch_id: str, commands: Commands, *, conn: object = None) -> int:
        """Send commands as members of an open batch, all or none. Returns how many."""
        return await self.run(self._add_to_batch(domain, batch_id, commands), conn)

    async def close_batch(self, domain: str, batch_id: str, *, conn: object = None) -> bool:
        """Close an open batch, so that it can end. Returns False if it was closed already."""
        return await self.run(batch.close(domain, batch_id), conn)

    async def get_batch(self, domain: str, batch_id: str) -> BatchRecord | None:
        """Returns what is known about a batch: counts, progress, rate; None if there is no such batch."""
        return await self.run(batch_look.get(domain, batch_id))

    async def query_batches(
        self,
        domain: str | None = None,
        status: BatchStatus | str | None = None,
        *,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[BatchRecord]:
        """A page of batches, newest first; the next begins at `cursor=page.next_cursor`."""
        return await self.run(batch_look.query(domain=domain, status=status, limit=limit, cursor=cursor))

    async def wait_for_batch(
        self,
        domain: str,
        batch_id: str,
        *,
        wait: Duration | None = None,
        on_progress: Callable[[BatchRecord], object | Awaitable[object]] | None = None,
    ) -> BatchRecord:
        """Wait until a batch is finished; see CommandBus.wait_for_batch. `on_progress` may be async."""
        waiting = _Waiting(domain, batch_id, wait)
        while True:
            record = waiting.check(await self.get_batch(domain, batch_id))
            if on_progress is not None and inspect.isawaitable(told := on_progress(record)):
                await told
            if record.is_finished:
                return record
            await asyncio.sleep(waiting.pause(record))

    async def cancel_batch(
        self, domain: str, batch_id: str, *, operator: str | None = None, reason: str | None = None
    ) -> BatchCancelReport:
        """Cancel a batch; see CommandBus.cancel_batch."""
        operator_action = operate.operator_action(operator or whoami(), reason, "CANCEL")
        return await self.follow(batch_operate.cancel(domain, batch_id, operator_action))

    async def retry_failed(
        self,
        domain: str,
        batch_id: str,
        *,
        name: str | None = None,
        on_complete: WhenComplete | None = None,
        operator: str | None = None,
        reason: str | None = None,
    ) -> BatchRetryReport:
        """Retry what failed in a batch; see CommandBus.retry_failed."""
        operator_action = operate.operator_action(operator or whoami(), reason, "RETRY")
        return await self.follow(
            batch_operate.retry_failed(domain, batch_id, operator_action, name=name, on_complete=on_complete)
        )


class _Waiting:
    """One wait: how long it may take, and when to look again."""

    def __init__(self, domain: str, batch_id: str, wait: Duration | None) -> None:
        self._domain = domain
        self._batch_id = batch_id
        self._seconds = None if wait is None else parse_seconds(wait, name="wait", error=InvalidCommandError)
        self._until = None if self._seconds is None else monotonic() + self._seconds
        self._next = FIRST_LOOK_SECONDS

    def check(self, record: BatchRecord | None) -> BatchRecord:
        """There must be something to wait for."""
        if record is None:
            raise BatchNotFoundError(self._domain, self._batch_id)
        return record

    def pause(self, record: BatchRecord) -> float:
        """Seconds until the next look; raises when the time is up."""
        pause, self._next = self._next, min(self._next * 2, LOOK_SECONDS)
        if self._until is None:
            return pause
        left = self._until - monotonic()
        if left <= 0:
            raise BatchTimeoutError(
                f"batch {self._batch_id!r} of domain {self._domain!r} was not finished within "
                f"{format_seconds(self._seconds or 0.0)}: it is {record.status}, {_what_is_left(record)}; "
                f"it goes on"
            )
        return min(pause, left)


def _what_is_left(record: BatchRecord) -> str:
    if record.is_open and not record.remaining:
        return "still open, and nothing is left of what was added"
    still = " (it is still open)" if record.is_open else ""
    troubled = f", {record.in_tsq} of them in the troubleshooting queue" if record.in_tsq else ""
    return f"{record.remaining} of {record.total} are left{troubled}{still}"
