"""BatchRepository and AsyncBatchRepository: batches and their members."""

from __future__ import annotations

from commandbus.bus.base import whoami
from commandbus.bus.batches import Commands
from commandbus.bus.repositories.base import AsyncRepository, Repository
from commandbus.flow.batches import create as batch_create
from commandbus.flow.batches import inspect as batch_inspect
from commandbus.flow.batches import operate as batch_operate
from commandbus.flow.commands import inspect, operate
from commandbus.flow.commands.inspect import CommandQuery
from commandbus.model.batch import (
    BatchCancelReport,
    BatchRecord,
    BatchRetryReport,
    BatchStatus,
    CreatedBatch,
    WhenComplete,
)
from commandbus.model.command import CommandRecord, CommandStatus
from commandbus.model.json_values import JsonValue
from commandbus.model.page import Page


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
        conn: object = None,
    ) -> CreatedBatch:
        """Send commands that are counted together, all or nothing; see `CommandBus.create_batch`."""
        operation = self._bus._create_batch(
            domain, commands, batch_id=batch_id, name=name, custom_data=custom_data, on_complete=on_complete,
            is_open=is_open,
        )  # fmt: skip
        return self._bus.run(operation, conn)

    def add(self, domain: str, batch_id: str, commands: Commands, *, conn: object = None) -> int:
        """Send commands as members of an open batch, all or nothing; returns how many."""
        return self._bus.run(self._bus._add_to_batch(domain, batch_id, commands), conn)

    def close(self, domain: str, batch_id: str, *, conn: object = None) -> bool:
        """Nothing more will be added to an open batch: now it can be complete. False if it was closed."""
        return self._bus.run(batch_create.close(domain, batch_id), conn)

    def get(self, domain: str, batch_id: str, *, conn: object = None) -> BatchRecord | None:
        """What is known of a batch: counts, progress, rate; None if there is none."""
        return self._bus.run(batch_inspect.get(domain, batch_id), conn)

    def exists(self, domain: str, batch_id: str, *, conn: object = None) -> bool:
        """Is there such a batch?"""
        found = self._bus.run(batch_inspect.query(domain=domain, status=None, limit=1, batch_id=batch_id), conn)
        return bool(found)

    def query(
        self,
        domain: str | None = None,
        status: BatchStatus | None = None,
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
        query = CommandQuery(domain=domain, batch_id=batch_id, status=status)
        return self._bus.run(inspect.query_commands(query, limit=limit, cursor=cursor), conn)

    def cancel(
        self,
        domain: str,
        batch_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> BatchCancelReport:
        """Cancel a batch: what waits or needs a person is CANCELED, what runs is asked to stop."""
        action = operate.operator_action(operator or whoami(), reason, "CANCEL")
        return self._bus.follow(batch_operate.cancel(domain, batch_id, action), conn)

    def retry_failed(
        self,
        domain: str,
        batch_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        name: str | None = None,
        on_complete: WhenComplete | None = None,
        conn: object = None,
    ) -> BatchRetryReport:
        """Retry a batch's members in the troubleshooting queue, and send those that FAILED for good again."""
        action = operate.operator_action(operator or whoami(), reason, "RETRY")
        plan = batch_operate.retry_failed(domain, batch_id, action, name=name, on_complete=on_complete)
        return self._bus.follow(plan, conn)


class AsyncBatchRepository(AsyncRepository):
    """Batches for async code: `bus.batches`, or `AsyncBatchRepository(pool)`. The same methods, awaited."""

    async def save(
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
        """Send commands that are counted together, all or nothing; see `CommandBus.create_batch`."""
        operation = self._bus._create_batch(
            domain, commands, batch_id=batch_id, name=name, custom_data=custom_data, on_complete=on_complete,
            is_open=is_open,
        )  # fmt: skip
        return await self._bus.run(operation, conn)

    async def add(self, domain: str, batch_id: str, commands: Commands, *, conn: object = None) -> int:
        """Send commands as members of an open batch, all or nothing; returns how many."""
        return await self._bus.run(self._bus._add_to_batch(domain, batch_id, commands), conn)

    async def close(self, domain: str, batch_id: str, *, conn: object = None) -> bool:
        """Nothing more will be added to an open batch: now it can be complete. False if it was closed."""
        return await self._bus.run(batch_create.close(domain, batch_id), conn)

    async def get(self, domain: str, batch_id: str, *, conn: object = None) -> BatchRecord | None:
        """What is known of a batch: counts, progress, rate; None if there is none."""
        return await self._bus.run(batch_inspect.get(domain, batch_id), conn)

    async def exists(self, domain: str, batch_id: str, *, conn: object = None) -> bool:
        """Is there such a batch?"""
        found = await self._bus.run(
            batch_inspect.query(domain=domain, status=None, limit=1, batch_id=batch_id), conn
        )
        return bool(found)

    async def query(
        self,
        domain: str | None = None,
        status: BatchStatus | None = None,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[BatchRecord]:
        """A page of batches, newest first; the next begins at `cursor=page.next_cursor`."""
        operation = batch_inspect.query(domain=domain, status=status, limit=limit, cursor=cursor)
        return await self._bus.run(operation, conn)

    async def list_by_status(
        self,
        domain: str | None,
        status: BatchStatus,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[BatchRecord]:
        """A page of the batches that have this status, newest first."""
        return await self.query(domain, status, limit=limit, cursor=cursor, conn=conn)

    async def list_commands(
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
        query = CommandQuery(domain=domain, batch_id=batch_id, status=status)
        return await self._bus.run(inspect.query_commands(query, limit=limit, cursor=cursor), conn)

    async def cancel(
        self,
        domain: str,
        batch_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> BatchCancelReport:
        """Cancel a batch: what waits or needs a person is CANCELED, what runs is asked to stop."""
        action = operate.operator_action(operator or whoami(), reason, "CANCEL")
        return await self._bus.follow(batch_operate.cancel(domain, batch_id, action), conn)

    async def retry_failed(
        self,
        domain: str,
        batch_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        name: str | None = None,
        on_complete: WhenComplete | None = None,
        conn: object = None,
    ) -> BatchRetryReport:
        """Retry a batch's members in the troubleshooting queue, and send those that FAILED for good again."""
        action = operate.operator_action(operator or whoami(), reason, "RETRY")
        plan = batch_operate.retry_failed(domain, batch_id, action, name=name, on_complete=on_complete)
        return await self._bus.follow(plan, conn)
