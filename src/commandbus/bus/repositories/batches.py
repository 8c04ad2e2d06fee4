"""BatchRepository and AsyncBatchRepository: batches and their members."""

from __future__ import annotations

import asyncio
import inspect as functions
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from commandbus.bus.base import BusBase, whoami
from commandbus.bus.one_body import awaited
from commandbus.bus.repositories.base import AsyncRepository, Repository
from commandbus.clock import monotonic
from commandbus.errors import BatchNotFoundError, BatchTimeoutError, InvalidCommandError
from commandbus.flow.operation import Operation, then
from commandbus.lazy import lazy
from commandbus.model import names
from commandbus.model.command import CommandRecord, CommandStatus, NewCommand
from commandbus.model.durations import Duration, format_seconds, parse_seconds
from commandbus.model.handle import given_by
from commandbus.model.json_values import JsonValue, PayloadObject
from commandbus.model.page import Page
from commandbus.model.priority import Priority
from commandbus.model.retry import OnExhausted

if TYPE_CHECKING:
    from commandbus.flow.batches import create as batch_create
    from commandbus.flow.batches import inspect as batch_inspect
    from commandbus.flow.batches import operate as batch_operate
    from commandbus.flow.commands import operate
    from commandbus.model.batch import (
        BatchCancelReport,
        BatchRecord,
        BatchRetryReport,
        BatchStatus,
        CompleteWhen,
        CreatedBatch,
        WhenComplete,
    )
else:
    batch_create = lazy("commandbus.flow.batches.create")
    batch_inspect = lazy("commandbus.flow.batches.inspect")
    batch_operate = lazy("commandbus.flow.batches.operate")
    operate = lazy("commandbus.flow.commands.operate")

Commands: TypeAlias = Iterable[NewCommand | Mapping[str, object] | PayloadObject]
FIRST_LOOK_SECONDS = 0.05
LOOK_SECONDS = 0.5


def _create(bus: BusBase, domain: str, commands: Commands, **definition: Any) -> Operation[CreatedBatch]:
    limit = bus.settings.max_payload_bytes
    made = batch_create.define(domain, max_bytes=limit, **definition)
    outgoing = batch_create.prepare_all(commands, max_bytes=limit, domain=domain, plain=bus._plain_or_none)
    guard = bus._guard(domain)
    if guard is None:
        return batch_create.create(made, outgoing)
    return guard.before(batch_create.create(made, guard.watch(outgoing)))


def _add(bus: BusBase, domain: str, batch_id: str, commands: Commands) -> Operation[int]:
    limit = bus.settings.max_payload_bytes
    outgoing = batch_create.prepare_all(commands, max_bytes=limit, domain=domain, plain=bus._plain_or_none)
    guard = bus._guard(names.check_domain(domain))
    if guard is None:
        return batch_create.add(domain, batch_id, outgoing)
    return guard.before(batch_create.add(domain, batch_id, guard.watch(outgoing)))


class BatchRepository(Repository):
    """Batches: `bus.batches`, or `BatchRepository(pool)`."""

    def save(
        self,
        domain: str,
        commands: Commands,
        *,
        batch_id: str | None = None,
        name: str | None = None,
        custom_data: JsonValue = None,
        on_complete: WhenComplete | None = None,
        is_open: bool = False,
        complete_when: CompleteWhen = "finished",
        on_exhausted: OnExhausted | None = None,
        priority: Priority | None = None,
        conn: object = None,
    ) -> CreatedBatch:
        """Send commands as one batch, all or none, in one transaction (with `conn`: the caller's).

        `commands` may be of any length; it is read while it is sent. When the last member has ended, `on_complete`
        is sent exactly once: a command (an OnComplete, a dict, or the handler itself) or a reply
        (`{"reply_to": queue}`). The same `batch_id` with the same content returns the existing batch (`created` is
        False); with other content it raises DuplicateBatchError. If a command exists already, this raises
        DuplicateCommandError. You can add to an open batch (`add`, `bus.add_to_batch`); it ends only after it is
        closed (`close`, `bus.close_batch`).

        With `complete_when="only_troubleshooting_left"`, `on_complete` is sent when all members have ended except
        those that need a person; the batch itself ends when these have ended, too. `on_exhausted` is for members
        that have none of their own: with "fail", members whose attempts are used up are FAILED for good, and do
        not wait for a person. `priority` is for members that have none of their own, too.
        """

        def make(commands: Commands) -> Operation[CreatedBatch]:
            operation = _create(
                self._bus, domain, commands, batch_id=batch_id, name=name, custom_data=custom_data,
                on_complete=on_complete, is_open=is_open, complete_when=complete_when, on_exhausted=on_exhausted,
                priority=priority,
            )  # fmt: skip
            return then(operation, lambda made: given_by(self._bus, made))

        return self._bus._send_all(domain, commands, make, conn)  # type: ignore[no-any-return]

    def add(self, domain: str, batch_id: str, commands: Commands, *, conn: object = None) -> int:
        """Send commands as members of an open batch, all or none. Returns how many."""

        def make(commands: Commands) -> Operation[int]:
            return _add(self._bus, domain, batch_id, commands)

        return self._bus._send_all(domain, commands, make, conn)  # type: ignore[no-any-return]

    def close(
        self,
        domain: str,
        batch_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> bool:
        """Close an open batch, so that it can end. Returns False if it was closed already.

        With `operator`, it is what a person did: the audit has it, with the `reason`. A program that has sent all
        leaves both out.
        """
        if operator is None and reason is not None:
            raise InvalidCommandError("a reason needs an operator: say who closes the batch")
        what = None if operator is None else operate.operator_action(operator, reason)
        return self._bus.run(batch_create.close(domain, batch_id, what), conn)

    def get(self, domain: str, batch_id: str, *, conn: object = None) -> BatchRecord | None:
        """Returns what is known about a batch: counts, progress, rate; None if there is no such batch."""
        return self._bus.run(batch_inspect.get(domain, batch_id), conn)

    def exists(self, domain: str, batch_id: str, *, conn: object = None) -> bool:
        """Is there such a batch?"""
        found = batch_inspect.query(domain=domain, status=None, limit=1, batch_id=batch_id)
        return self._bus.run(then(found, bool), conn)

    def query(
        self,
        domain: str | None = None,
        status: BatchStatus | str | None = None,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[BatchRecord]:
        """A page of batches, newest first; the next begins at `cursor=page.next_cursor`."""
        operation = batch_inspect.query(domain=domain, status=status, limit=limit, cursor=cursor)
        return self._bus.run(operation, conn)

    def list_by_status(
        self,
        domain: str | None,
        status: BatchStatus,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[BatchRecord]:
        """A page of the batches that have this status, newest first."""
        return self.query(domain, status, limit=limit, cursor=cursor, conn=conn)

    def list_commands(
        self,
        domain: str,
        batch_id: str,
        status: CommandStatus | None = None,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[CommandRecord]:
        """A page of a batch's members, newest first."""
        return self._bus.commands.query(
            domain=domain, batch_id=batch_id, status=status, limit=limit, cursor=cursor, conn=conn
        )

    def wait_for(
        self,
        domain: str,
        batch_id: str,
        *,
        wait: Duration | None = None,
        on_progress: Callable[[BatchRecord], object] | None = None,
    ) -> BatchRecord:
        """Wait until a batch is finished. Raises BatchTimeoutError if that takes longer than `wait`.

        `on_progress` is called with every look at the batch, twice a second. If something must happen when the
        batch is finished, even if this process has ended by then, use `on_complete`.
        """
        waiting = _Waiting(domain, batch_id, wait)
        while True:
            record = waiting.check(self.get(domain, batch_id))
            if on_progress is not None:
                on_progress(record)
            if record.is_finished:
                return record
            time.sleep(waiting.pause(record))

    def cancel(
        self,
        domain: str,
        batch_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> BatchCancelReport:
        """Cancel a batch: members that wait or need a person are CANCELED, running ones are asked to stop.

        The batch ends CANCELED when its last member has stopped. If a crash interrupts this, workers continue it.
        """
        action = operate.operator_action(operator or whoami(), reason, "CANCEL")
        return self._bus.follow(batch_operate.cancel(domain, batch_id, action), conn)

    def retry_failed(
        self,
        domain: str,
        batch_id: str,
        *,
        name: str | None = None,
        on_complete: WhenComplete | None = None,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> BatchRetryReport:
        """Retry a batch's members in the troubleshooting queue, and send those that FAILED for good again.

        The FAILED members are sent in a new batch that names this one (`retry_of`), under new command_ids, each at
        most once. A command that fails again is a member of the new batch. `name` and `on_complete` are for the
        new batch.
        """
        action = operate.operator_action(operator or whoami(), reason, "RETRY")
        plan = batch_operate.retry_failed(domain, batch_id, action, name=name, on_complete=on_complete)
        return self._bus.follow(plan, conn)


class AsyncBatchRepository(AsyncRepository):
    """Batches for async code: `bus.batches`, or `AsyncBatchRepository(pool)`. The same methods, awaited."""

    save = awaited(BatchRepository.save)
    add = awaited(BatchRepository.add)
    close = awaited(BatchRepository.close)
    get = awaited(BatchRepository.get)
    exists = awaited(BatchRepository.exists)
    query = awaited(BatchRepository.query)
    list_by_status = awaited(BatchRepository.list_by_status)
    list_commands = awaited(BatchRepository.list_commands)
    cancel = awaited(BatchRepository.cancel)
    retry_failed = awaited(BatchRepository.retry_failed)

    async def wait_for(
        self,
        domain: str,
        batch_id: str,
        *,
        wait: Duration | None = None,
        on_progress: Callable[[BatchRecord], object | Awaitable[object]] | None = None,
    ) -> BatchRecord:
        """Wait until a batch is finished. Raises BatchTimeoutError if that takes longer than `wait`.

        See BatchRepository.wait_for. `on_progress` may be async.
        """
        waiting = _Waiting(domain, batch_id, wait)
        while True:
            record = waiting.check(await self.get(domain, batch_id))
            if on_progress is not None and functions.isawaitable(told := on_progress(record)):
                await told
            if record.is_finished:
                return record
            await asyncio.sleep(waiting.pause(record))


class _Waiting:
    """One wait: how long it may take, and when to look again."""

    def __init__(self, domain: str, batch_id: str, wait: Duration | None) -> None:
        self._domain = domain
        self._batch_id = batch_id
        self._seconds = None if wait is None else parse_seconds(wait, name="wait", error=InvalidCommandError)
        self._until = None if self._seconds is None else monotonic() + self._seconds
        self._next = FIRST_LOOK_SECONDS

    def check(self, record: BatchRecord | None) -> BatchRecord:
        """Raise an error if there is no batch to wait for."""
        if record is None:
            raise BatchNotFoundError(self._domain, self._batch_id)
        return record

    def pause(self, record: BatchRecord) -> float:
        """Seconds until the next look. Raises BatchTimeoutError when the time is up."""
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
