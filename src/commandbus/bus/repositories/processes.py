"""ProcessRepository and AsyncProcessRepository: processes and their steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commandbus.bus.base import whoami
from commandbus.bus.one_body import awaited
from commandbus.bus.repositories import new_processes
from commandbus.bus.repositories.base import AsyncRepository, Repository
from commandbus.bus.repositories.new_processes import Items, Manager
from commandbus.flow.operation import then
from commandbus.lazy import lazy
from commandbus.model.handle import given_by
from commandbus.model.json_values import JsonValue
from commandbus.model.page import Page

if TYPE_CHECKING:
    from commandbus.flow.commands import operate
    from commandbus.flow.processes import inspect as process_inspect
    from commandbus.flow.processes import operate as process_operate
    from commandbus.flow.processes import process_of_command
    from commandbus.flow.processes import signal as process_signal
    from commandbus.model.batch import CreatedBatch, WhenComplete
    from commandbus.model.process import (
        NewProcess,
        ProcessRecord,
        ProcessStatus,
        ProcessSummary,
        SentSignal,
        StartedProcess,
        StepRecord,
        StrayReply,
    )
else:
    operate = lazy("commandbus.flow.commands.operate")
    process_inspect = lazy("commandbus.flow.processes.inspect")
    process_of_command = lazy("commandbus.flow.processes.process_of_command")
    process_operate = lazy("commandbus.flow.processes.operate")
    process_signal = lazy("commandbus.flow.processes.signal")


class ProcessRepository(Repository):
    """Processes: `bus.processes`, or `ProcessRepository(pool)`."""

    def save(
        self, manager: Manager, process: NewProcess, *, domain: str | None = None, conn: object = None
    ) -> StartedProcess:
        """Start a process; `manager` is its manager, or its process_type."""
        starting = new_processes.start(self._bus, manager, [process], domain)
        return self._bus.run(then(starting, lambda started: started[0]), conn)

    def save_many(
        self, manager: Manager, processes: Items, *, domain: str | None = None, conn: object = None
    ) -> list[StartedProcess]:
        """Start many processes of one type, all or none."""
        return self._bus.run(new_processes.start(self._bus, manager, processes, domain), conn)

    def save_batch(
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
        """Start processes as one batch, all or none. For the other options see create_batch."""
        operation = new_processes.create_batch(
            self._bus, manager, processes, domain, batch_id=batch_id, name=name,
            custom_data=custom_data, on_complete=on_complete, is_open=is_open,
        )  # fmt: skip
        return self._bus.run(then(operation, lambda made: given_by(self._bus, made)), conn)

    def add_to_batch(
        self, manager: Manager, batch_id: str, processes: Items, *, domain: str | None = None, conn: object = None
    ) -> int:
        """Start processes as members of an open batch, all or none. Returns how many."""
        return self._bus.run(new_processes.add_to_batch(self._bus, manager, batch_id, processes, domain), conn)

    def get(self, domain: str, process_id: str, *, conn: object = None) -> ProcessRecord | None:
        """Returns what is known about a process, with its steps; None if there is no such process."""
        return self._bus.run(process_inspect.get_process(domain, process_id), conn)

    def view(self, domain: str, process_id: str, *, conn: object = None) -> ProcessRecord | None:
        """As `get`, but bounded, for a page: the last 500 steps without data and results, and data and state up to
        256 KiB. `left_out` says what is missing."""
        return self._bus.run(process_inspect.get_process(domain, process_id, bounds=process_inspect.VIEW), conn)

    def summaries(
        self,
        domain: str | None = None,
        process_type: str | None = None,
        *,
        status: ProcessStatus | str | None = None,
        batch_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[ProcessSummary]:
        """As `query`, but without data and state, which may have a megabyte each: for lists."""
        operation = process_inspect.list_summaries(
            domain=domain, process_type=process_type, status=status, batch_id=batch_id, limit=limit, cursor=cursor
        )
        return self._bus.run(operation, conn)

    def get_by_command(self, domain: str, command_id: str, *, conn: object = None) -> ProcessRecord | None:
        """The process that sent a command; None if no process sent it."""
        return self._bus.run(process_of_command.get_process_of(domain, command_id), conn)

    def get_steps(self, domain: str, process_id: str, *, conn: object = None) -> list[StepRecord]:
        """The steps and compensations of a process in their order; empty if there is no such process."""
        found = process_inspect.get_process(domain, process_id)
        return self._bus.run(then(found, lambda record: [] if record is None else record.steps), conn)

    def exists(self, domain: str, process_id: str, *, conn: object = None) -> bool:
        """Is there such a process?"""
        found = process_inspect.query_processes(domain=domain, process_id=process_id, limit=1)
        return self._bus.run(then(found, bool), conn)

    def query(
        self,
        domain: str | None = None,
        process_type: str | None = None,
        *,
        status: ProcessStatus | str | None = None,
        process_id: str | None = None,
        batch_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[ProcessRecord]:
        """A page of processes that match, newest first; the next begins at `cursor=page.next_cursor`."""
        operation = process_inspect.query_processes(
            domain=domain, process_type=process_type, status=status, process_id=process_id, batch_id=batch_id,
            limit=limit, cursor=cursor,
        )  # fmt: skip
        return self._bus.run(operation, conn)

    def list_by_status(
        self,
        domain: str | None,
        status: ProcessStatus,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[ProcessRecord]:
        """A page of the processes that have this status, newest first."""
        return self.query(domain, status=status, limit=limit, cursor=cursor, conn=conn)

    def list_by_type(
        self,
        domain: str | None,
        process_type: str,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[ProcessRecord]:
        """A page of the processes of a type, newest first."""
        return self.query(domain, process_type=process_type, limit=limit, cursor=cursor, conn=conn)

    def list_by_batch(
        self, domain: str, batch_id: str, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[ProcessRecord]:
        """A page of the processes of a batch, newest first."""
        return self.query(domain, batch_id=batch_id, limit=limit, cursor=cursor, conn=conn)

    def list_strays(
        self,
        domain: str | None = None,
        *,
        process_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[StrayReply]:
        """Returns a page of the messages to processes that moved nothing, newest first, each with the reason."""
        operation = process_inspect.list_strays(domain, process_id=process_id, limit=limit, cursor=cursor)
        return self._bus.run(operation, conn)

    def signal(
        self,
        domain: str,
        process_id: str,
        name: str,
        data: JsonValue = None,
        *,
        signal_id: str | None = None,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> SentSignal:
        """Send a signal to a process, for a step that waits for it now or later (`wait_for`); with `conn` in the
        caller's transaction. Exactly one step takes it.

        `signal_id` is an idempotency key: the same id with the same content sends nothing twice; with other
        content it raises DuplicateSignalError. Raises ProcessNotFoundError, or InvalidOperationError if the
        process has ended or is being undone. `operator` and `reason` are recorded.
        """
        is_told = operator is not None or reason is not None
        operation = process_signal.signal(
            domain, process_id, name, data, signal_id=signal_id,
            by=operate.operator_action(operator or whoami(), reason) if is_told else None,
            max_bytes=self._bus.settings.max_payload_bytes,
        )  # fmt: skip
        return self._bus.run(operation, conn)

    def cancel(
        self,
        domain: str,
        process_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> ProcessStatus:
        """Cancel a process: outstanding steps are canceled, completed ones that have an undo are undone, and it
        ends CANCELED.

        Returns the status that it had. Raises InvalidOperationError if it has ended or is being undone already.
        """
        action = operate.operator_action(operator or whoami(), reason, "CANCEL")
        return self._bus.follow(process_operate.cancel_process(domain, process_id, action), conn)

    def retry(
        self,
        domain: str,
        process_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> None:
        """Let a FAILED process go on from the step, or the compensation, that failed."""
        action = operate.operator_action(operator or whoami(), reason, "RETRY")
        return self._bus.run(process_operate.retry_process(domain, process_id, action), conn)


class AsyncProcessRepository(AsyncRepository):
    """Processes for async code: `bus.processes`, or `AsyncProcessRepository(pool)`. The same methods, awaited."""

    save = awaited(ProcessRepository.save)
    save_many = awaited(ProcessRepository.save_many)
    save_batch = awaited(ProcessRepository.save_batch)
    add_to_batch = awaited(ProcessRepository.add_to_batch)
    get = awaited(ProcessRepository.get)
    view = awaited(ProcessRepository.view)
    summaries = awaited(ProcessRepository.summaries)
    get_by_command = awaited(ProcessRepository.get_by_command)
    get_steps = awaited(ProcessRepository.get_steps)
    exists = awaited(ProcessRepository.exists)
    query = awaited(ProcessRepository.query)
    list_by_status = awaited(ProcessRepository.list_by_status)
    list_by_type = awaited(ProcessRepository.list_by_type)
    list_by_batch = awaited(ProcessRepository.list_by_batch)
    list_strays = awaited(ProcessRepository.list_strays)
    signal = awaited(ProcessRepository.signal)
    cancel = awaited(ProcessRepository.cancel)
    retry = awaited(ProcessRepository.retry)
