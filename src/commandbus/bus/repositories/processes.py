"""ProcessRepository and AsyncProcessRepository: processes and their steps."""

from __future__ import annotations

from commandbus.bus import processes as process_operations
from commandbus.bus.processes import Items, Manager
from commandbus.bus.repositories.base import AsyncRepository, Repository
from commandbus.flow.processes import inspect as process_inspect
from commandbus.flow.processes import process_of_command
from commandbus.model.page import Page
from commandbus.model.process import (
    NewProcess,
    ProcessRecord,
    ProcessStatus,
    StartedProcess,
    StepRecord,
    StrayReply,
)


class ProcessRepository(Repository):
    """Processes: `bus.processes`, or `ProcessRepository(pool)`."""

    def save(
        self, manager: Manager, process: NewProcess, *, domain: str | None = None, conn: object = None
    ) -> StartedProcess:
        """Start a process; `manager` is its manager, or its process_type."""
        limit = self._bus.settings.max_payload_bytes
        (started,) = self._bus.run(process_operations.start(limit, manager, [process], domain), conn)
        return started

    def save_many(
        self, manager: Manager, processes: Items, *, domain: str | None = None, conn: object = None
    ) -> list[StartedProcess]:
        """Start many processes of one type, all or none."""
        limit = self._bus.settings.max_payload_bytes
        return self._bus.run(process_operations.start(limit, manager, processes, domain), conn)

    def get(self, domain: str, process_id: str, *, conn: object = None) -> ProcessRecord | None:
        """What is known of a process, its steps included; None if there is none."""
        return self._bus.run(process_inspect.get_process(domain, process_id), conn)

    def get_by_command(self, domain: str, command_id: str, *, conn: object = None) -> ProcessRecord | None:
        """The process that sent a command; None if none did."""
        return self._bus.run(process_of_command.get_process_of(domain, command_id), conn)

    def get_steps(self, domain: str, process_id: str, *, conn: object = None) -> list[StepRecord]:
        """The steps and compensations of a process in their order; empty if there is no such process."""
        record = self.get(domain, process_id, conn=conn)
        return [] if record is None else record.steps

    def exists(self, domain: str, process_id: str, *, conn: object = None) -> bool:
        """Is there such a process?"""
        found = self._bus.run(process_inspect.query_processes(domain=domain, process_id=process_id, limit=1), conn)
        return bool(found)

    def query(
        self,
        domain: str | None = None,
        *,
        process_type: str | None = None,
        status: ProcessStatus | None = None,
        batch_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[ProcessRecord]:
        """A page of processes that match, newest first; the next begins at `cursor=page.next_cursor`."""
        operation = process_inspect.query_processes(
            domain=domain, process_type=process_type, status=status, batch_id=batch_id, limit=limit,
            cursor=cursor,
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

    def cancel(
        self,
        domain: str,
        process_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> ProcessStatus:
        """Ask a process to stop: what was done is undone, it ends CANCELED. Returns the status that it had."""
        return self._bus.follow(process_operations.cancel(domain, process_id, operator, reason), conn)

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
        self._bus.run(process_operations.retry(domain, process_id, operator, reason), conn)


class AsyncProcessRepository(AsyncRepository):
    """Processes for async code: `bus.processes`, or `AsyncProcessRepository(pool)`. The same methods, awaited."""

    async def save(
        self, manager: Manager, process: NewProcess, *, domain: str | None = None, conn: object = None
    ) -> StartedProcess:
        """Start a process; `manager` is its manager, or its process_type."""
        limit = self._bus.settings.max_payload_bytes
        (started,) = await self._bus.run(process_operations.start(limit, manager, [process], domain), conn)
        return started

    async def save_many(
        self, manager: Manager, processes: Items, *, domain: str | None = None, conn: object = None
    ) -> list[StartedProcess]:
        """Start many processes of one type, all or none."""
        limit = self._bus.settings.max_payload_bytes
        return await self._bus.run(process_operations.start(limit, manager, processes, domain), conn)

    async def get(self, domain: str, process_id: str, *, conn: object = None) -> ProcessRecord | None:
        """What is known of a process, its steps included; None if there is none."""
        return await self._bus.run(process_inspect.get_process(domain, process_id), conn)

    async def get_by_command(self, domain: str, command_id: str, *, conn: object = None) -> ProcessRecord | None:
        """The process that sent a command; None if none did."""
        return await self._bus.run(process_of_command.get_process_of(domain, command_id), conn)

    async def get_steps(self, domain: str, process_id: str, *, conn: object = None) -> list[StepRecord]:
        """The steps and compensations of a process in their order; empty if there is no such process."""
        record = await self.get(domain, process_id, conn=conn)
        return [] if record is None else record.steps

    async def exists(self, domain: str, process_id: str, *, conn: object = None) -> bool:
        """Is there such a process?"""
        found = await self._bus.run(
            process_inspect.query_processes(domain=domain, process_id=process_id, limit=1), conn
        )
        return bool(found)

    async def query(
        self,
        domain: str | None = None,
        *,
        process_type: str | None = None,
        status: ProcessStatus | None = None,
        batch_id: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[ProcessRecord]:
        """A page of processes that match, newest first; the next begins at `cursor=page.next_cursor`."""
        operation = process_inspect.query_processes(
            domain=domain, process_type=process_type, status=status, batch_id=batch_id, limit=limit,
            cursor=cursor,
        )  # fmt: skip
        return await self._bus.run(operation, conn)

    async def list_by_status(
        self,
        domain: str | None,
        status: ProcessStatus,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[ProcessRecord]:
        """A page of the processes that have this status, newest first."""
        return await self.query(domain, status=status, limit=limit, cursor=cursor, conn=conn)

    async def list_by_type(
        self,
        domain: str | None,
        process_type: str,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[ProcessRecord]:
        """A page of the processes of a type, newest first."""
        return await self.query(domain, process_type=process_type, limit=limit, cursor=cursor, conn=conn)

    async def list_by_batch(
        self, domain: str, batch_id: str, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[ProcessRecord]:
        """A page of the processes of a batch, newest first."""
        return await self.query(domain, batch_id=batch_id, limit=limit, cursor=cursor, conn=conn)

    async def list_strays(
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
        return await self._bus.run(operation, conn)

    async def cancel(
        self,
        domain: str,
        process_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> ProcessStatus:
        """Ask a process to stop: what was done is undone, it ends CANCELED. Returns the status that it had."""
        return await self._bus.follow(process_operations.cancel(domain, process_id, operator, reason), conn)

    async def retry(
        self,
        domain: str,
        process_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> None:
        """Let a FAILED process go on from the step, or the compensation, that failed."""
        await self._bus.run(process_operations.retry(domain, process_id, operator, reason), conn)
