"""Batches and processes, as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter

from commandbus.errors import CommandNotFoundError
from commandbus.flow.batches.operate import list_actions
from commandbus.flow.limits.inspect import ControlAction
from commandbus.model.batch import BatchRecord
from commandbus.model.command import CommandRecord, CommandStatus
from commandbus.model.page import Page
from commandbus.model.process import ProcessRecord, ProcessSummary
from commandbus.model.process_graph import ProcessGraph, process_graph
from commandbus.web.api.parameters import Cursor, Domain, Id, Limit
from commandbus.web.console import Console


@dataclass(frozen=True, slots=True)
class BatchMember:
    """A command of a batch, without its data (`/api/command` has that)."""

    command_id: str
    command_type: str
    status: CommandStatus
    error_type: str | None
    error_code: str | None
    error: str | None

    @classmethod
    def of(cls, record: CommandRecord) -> BatchMember:
        """What the list shows of a command."""
        return cls(
            record.command_id,
            record.command_type,
            record.status,
            record.error_type,
            record.error_code,
            record.error,
        )


def add_routes(router: APIRouter, console: Console) -> None:
    """The routes of this module."""
    bus = console.reading

    @router.get("/batches")
    async def batches(limit: Limit = 50, cursor: Cursor = None) -> Page[BatchRecord]:
        """Batches, newest first."""
        return await bus.query_batches(limit=limit, cursor=cursor)

    @router.get("/batch/commands")
    async def members(
        domain: Domain,
        id: Id,  # noqa: A002
        status: CommandStatus | None = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Page[BatchMember]:
        """The commands of a batch, newest first; with `status`, only those that have it."""
        found = await bus.batches.list_commands(domain, id, status, limit=limit, cursor=cursor)
        return Page(
            [BatchMember.of(item) for item in found], found.next_cursor, found.is_partial, found.reached_at
        )

    @router.get("/batch/actions")
    async def batch_actions(domain: Domain, id: Id, limit: Limit = 50) -> list[ControlAction]:  # noqa: A002
        """Who closed, canceled and retried a batch, newest first."""
        return await bus.run(list_actions(domain, id, limit=limit))

    @router.get("/batch")
    async def batch(domain: Domain, id: Id) -> BatchRecord:  # noqa: A002
        """One batch."""
        record = await bus.get_batch(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no batch {id!r} in domain {domain!r}")
        return record

    @router.get("/processes")
    async def processes(limit: Limit = 50, cursor: Cursor = None) -> Page[ProcessSummary]:
        """Processes, newest first, without their data and state."""
        return await bus.processes.summaries(limit=limit, cursor=cursor)

    @router.get("/process/graph")
    async def graph(domain: Domain, id: Id) -> ProcessGraph:  # noqa: A002
        """The steps of a process as a graph, what it waits for, and what a cancel would undo."""
        record = await bus.processes.view(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no process {id!r} in domain {domain!r}")
        return process_graph(record)

    @router.get("/process")
    async def process(domain: Domain, id: Id) -> ProcessRecord:  # noqa: A002
        """One process with its last 500 steps, without their data and results (`/api/command` has them). Data and
        state of more than 256 KiB are left out; `left_out` says that."""
        record = await bus.processes.view(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no process {id!r} in domain {domain!r}")
        return record
