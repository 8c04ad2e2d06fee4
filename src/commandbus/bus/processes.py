"""What both buses can do with processes. The operations are made once, in `ProcessShell`; the rest is running
them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from commandbus.bus.base import BusBase, whoami
from commandbus.errors import InvalidCommandError
from commandbus.flow.operation import Operation, Plan
from commandbus.lazy import lazy
from commandbus.model import names
from commandbus.model.durations import Duration
from commandbus.model.json_values import JsonValue
from commandbus.model.page import Page

if TYPE_CHECKING:
    from commandbus.flow.batches import batches_of_processes as process_batch
    from commandbus.flow.batches import create as batch
    from commandbus.flow.commands import operate
    from commandbus.flow.processes import inspect as process_inspect
    from commandbus.flow.processes import operate as process_operate
    from commandbus.flow.processes import start as process_start
    from commandbus.flow.processes.start import Starting
    from commandbus.model import process as model
    from commandbus.model.batch import CreatedBatch, WhenComplete
    from commandbus.model.process import NewProcess, ProcessRecord, ProcessStatus, StartedProcess, StrayReply
    from commandbus.processes import manager as managers
    from commandbus.processes.manager import BaseProcessManager
else:
    batch = lazy("commandbus.flow.batches.create")
    operate = lazy("commandbus.flow.commands.operate")
    process_batch = lazy("commandbus.flow.batches.batches_of_processes")
    process_inspect = lazy("commandbus.flow.processes.inspect")
    process_operate = lazy("commandbus.flow.processes.operate")
    process_start = lazy("commandbus.flow.processes.start")
    model = lazy("commandbus.model.process")
    managers = lazy("commandbus.processes.manager")

T = TypeVar("T")
Manager: TypeAlias = "BaseProcessManager[Any] | str"
"""A process manager, or just the name of its process_type."""


Items: TypeAlias = "Iterable[NewProcess | Mapping[str, object]]"


def start(max_bytes: int, manager: Manager, items: Items, domain: str | None) -> Operation[list[StartedProcess]]:
    """Start processes: checked one by one, as they are sent."""
    of_domain, process_type, starting = _prepare(max_bytes, manager, items, domain)
    return process_start.start(of_domain, process_type, starting)


def create_batch(
    max_bytes: int, manager: Manager, items: Items, domain: str | None, **definition: Any
) -> Operation[CreatedBatch]:
    """Create a batch of processes."""
    of_domain, process_type, starting = _prepare(max_bytes, manager, items, domain)
    made = batch.define(of_domain, holds="processes", max_bytes=max_bytes, **definition)
    return process_batch.create(made, process_type, starting)


def add_to_batch(
    max_bytes: int, manager: Manager, batch_id: str, items: Items, domain: str | None
) -> Operation[int]:
    """Start processes in an open batch."""
    of_domain, process_type, starting = _prepare(max_bytes, manager, items, domain)
    return process_batch.add(of_domain, batch_id, process_type, starting)


def _prepare(
    max_bytes: int, manager: Manager, items: Items, domain: str | None
) -> tuple[str, str, Iterator[Starting]]:
    of_domain, process_type, deadline = _address(manager, domain)

    def prepare(item: NewProcess | Mapping[str, object]) -> Starting:
        new = process_start.to_new_process(item)
        if not isinstance(manager, str):
            new = managers.check_new(manager, new)
        return process_start.prepare_start(new, deadline=deadline, max_bytes=max_bytes)

    return of_domain, process_type, _numbered(items, prepare)


def _numbered(items: Items, prepare: Callable[[Any], Starting]) -> Iterator[Starting]:
    """Prepare them one by one; an error says which of several it was, counted from 1."""
    is_one = isinstance(items, list) and len(items) == 1
    for number, item in enumerate(items, 1):
        try:
            prepared = prepare(item)
        except InvalidCommandError as error:
            if is_one:
                raise
            raise InvalidCommandError(f"process {number} of those to be started: {error}") from None
        yield prepared


def _address(manager: Manager, domain: str | None) -> tuple[str, str, Duration | None]:
    if isinstance(manager, str):
        return names.check_domain(domain or model.DEFAULT_DOMAIN), names.check_type(manager), None
    managers.check_manager(manager)
    return names.check_domain(domain or manager.domain), manager.process_type, manager.deadline


def cancel(domain: str, process_id: str, operator: str | None, reason: str | None) -> Plan[ProcessStatus]:
    return process_operate.cancel_process(
        domain, process_id, operate.operator_action(operator or whoami(), reason, "CANCEL")
    )


def retry(domain: str, process_id: str, operator: str | None, reason: str | None) -> Operation[None]:
    return process_operate.retry_process(
        domain, process_id, operate.operator_action(operator or whoami(), reason, "RETRY")
    )


class ProcessMethods(BusBase):
    """The part of CommandBus that is about processes."""

    @abstractmethod
    def run(self, operation: Operation[T], conn: object = None) -> T: ...

    @abstractmethod
    def follow(self, plan: Plan[T], conn: object = None) -> T: ...

    def start_process(
        self,
        manager: Manager,
        data: object = None,
        *,
        process_id: str | None = None,
        deadline: Duration | None = None,
        reply_to: str | None = None,
        correlation_id: str | None = None,
        domain: str | None = None,
        conn: object = None,
    ) -> StartedProcess:
        """Start a process, with `conn` in the caller's transaction; `manager` is its manager, or its process_type.

        `process_id` is an idempotency key, as command_id is. `deadline` is how long it may take in all; then it is
        undone. `reply_to` is a queue that is told how it ended.
        """
        new = model.NewProcess(data, process_id, deadline, reply_to, correlation_id)
        return self.run(start(self.settings.max_payload_bytes, manager, [new], domain), conn)[0]

    def start_processes(
        self,
        manager: Manager,
        processes: Items,
        *,
        domain: str | None = None,
        conn: object = None,
    ) -> list[StartedProcess]:
        """Start many processes of one type, all or none."""
        return self.run(start(self.settings.max_payload_bytes, manager, processes, domain), conn)

    def create_process_batch(
        self,
        manager: Manager,
        processes: Items,
        *,
        batch_id: str | None = None,
        name: str | None = None,
        custom_data: JsonValue = None,
        on_complete: WhenComplete | None = None,
        is_open: bool = False,
        domain: str | None = None,
        conn: object = None,
    ) -> CreatedBatch:
        """Start processes as one batch, all or none; the rest is as in create_batch."""
        operation = create_batch(
            self.settings.max_payload_bytes, manager, processes, domain, batch_id=batch_id, name=name,
            custom_data=custom_data, on_complete=on_complete, is_open=is_open,
        )  # fmt: skip
        return self.run(operation, conn)

    def add_processes_to_batch(
        self, manager: Manager, batch_id: str, processes: Items, *, domain: str | None = None, conn: object = None
    ) -> int:
        """Start processes as members of an open batch, all or none. Returns how many."""
        operation = add_to_batch(self.settings.max_payload_bytes, manager, batch_id, processes, domain)
        return self.run(operation, conn)

    def get_process(self, domain: str, process_id: str, *, conn: object = None) -> ProcessRecord | None:
        """Returns what is known about a process, with its trail; None if there is no such process."""
        return self.run(process_inspect.get_process(domain, process_id), conn)

    def query_processes(
        self,
        domain: str | None = None,
        process_type: str | None = None,
        *,
        status: ProcessStatus | str | None = None,
        process_id: str | None = None,
        batch_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[ProcessRecord]:
        """A page of processes, newest first; the next begins at `cursor=page.next_cursor`."""
        return self.run(
            process_inspect.query_processes(
                domain=domain, process_type=process_type, status=status, process_id=process_id, batch_id=batch_id,
                limit=limit, cursor=cursor,
            )
        )  # fmt: skip

    def cancel_process(
        self, domain: str, process_id: str, *, operator: str | None = None, reason: str | None = None
    ) -> ProcessStatus:
        """Cancel a process: outstanding steps are canceled, completed ones are undone, and it ends CANCELED.

        Returns the status that it had. Raises InvalidOperationError if it has ended or is being undone already.
        """
        return self.follow(cancel(domain, process_id, operator, reason))

    def retry_process(
        self, domain: str, process_id: str, *, operator: str | None = None, reason: str | None = None
    ) -> None:
        """Let a FAILED process go on from the step, or the compensation, that failed."""
        self.run(retry(domain, process_id, operator, reason))

    def stray_replies(
        self,
        domain: str | None = None,
        *,
        process_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[StrayReply]:
        """Messages to processes that moved nothing, and why, newest first."""
        return self.run(process_inspect.list_strays(domain, process_id=process_id, limit=limit, cursor=cursor))


class AsyncProcessMethods(BusBase):
    """The part of AsyncCommandBus that is about processes; see `ProcessMethods`."""

    @abstractmethod
    async def run(self, operation: Operation[T], conn: object = None) -> T: ...

    @abstractmethod
    async def follow(self, plan: Plan[T], conn: object = None) -> T: ...

    async def start_process(
        self,
        manager: Manager,
        data: object = None,
        *,
        process_id: str | None = None,
        deadline: Duration | None = None,
        reply_to: str | None = None,
        correlation_id: str | None = None,
        domain: str | None = None,
        conn: object = None,
    ) -> StartedProcess:
        """Start a process, with `conn` in the caller's transaction."""
        new = model.NewProcess(data, process_id, deadline, reply_to, correlation_id)
        return (await self.run(start(self.settings.max_payload_bytes, manager, [new], domain), conn))[0]

    async def start_processes(
        self,
        manager: Manager,
        processes: Items,
        *,
        domain: str | None = None,
        conn: object = None,
    ) -> list[StartedProcess]:
        """Start many processes of one type, all or none."""
        return await self.run(start(self.settings.max_payload_bytes, manager, processes, domain), conn)

    async def create_process_batch(
        self,
        manager: Manager,
        processes: Items,
        *,
        batch_id: str | None = None,
        name: str | None = None,
        custom_data: JsonValue = None,
        on_complete: WhenComplete | None = None,
        is_open: bool = False,
        domain: str | None = None,
        conn: object = None,
    ) -> CreatedBatch:
        """Start processes as one batch, all or none; the rest is as in create_batch."""
        operation = create_batch(
            self.settings.max_payload_bytes, manager, processes, domain, batch_id=batch_id, name=name,
            custom_data=custom_data, on_complete=on_complete, is_open=is_open,
        )  # fmt: skip
        return await self.run(operation, conn)

    async def add_processes_to_batch(
        self, manager: Manager, batch_id: str, processes: Items, *, domain: str | None = None, conn: object = None
    ) -> int:
        """Start processes as members of an open batch, all or none. Returns how many."""
        operation = add_to_batch(self.settings.max_payload_bytes, manager, batch_id, processes, domain)
        return await self.run(operation, conn)

    async def get_process(self, domain: str, process_id: str, *, conn: object = None) -> ProcessRecord | None:
        """Returns what is known about a process, with its trail; None if there is no such process."""
        return await self.run(process_inspect.get_process(domain, process_id), conn)

    async def query_processes(
        self,
        domain: str | None = None,
        process_type: str | None = None,
        *,
        status: ProcessStatus | str | None = None,
        process_id: str | None = None,
        batch_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[ProcessRecord]:
        """A page of processes, newest first; the next begins at `cursor=page.next_cursor`."""
        return await self.run(
            process_inspect.query_processes(
                domain=domain, process_type=process_type, status=status, process_id=process_id, batch_id=batch_id,
                limit=limit, cursor=cursor,
            )
        )  # fmt: skip

    async def cancel_process(
        self,
        domain: str,
        process_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
    ) -> ProcessStatus:
        """Ask a process to stop; it ends CANCELED."""
        return await self.follow(cancel(domain, process_id, operator, reason))

    async def retry_process(
        self,
        domain: str,
        process_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
    ) -> None:
        """Let a FAILED process go on from the step, or the compensation, that failed."""
        await self.run(retry(domain, process_id, operator, reason))

    async def stray_replies(
        self,
        domain: str | None = None,
        *,
        process_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[StrayReply]:
        """Messages to processes that moved nothing, and why, newest first."""
        return await self.run(
            process_inspect.list_strays(domain, process_id=process_id, limit=limit, cursor=cursor)
        )
