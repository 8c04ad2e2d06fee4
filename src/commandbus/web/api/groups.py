"""Batches and processes, as JSON."""

from __future__ import annotations

from fastapi import APIRouter

from commandbus.errors import CommandNotFoundError
from commandbus.model.batch import BatchRecord
from commandbus.model.page import Page
from commandbus.model.process import ProcessRecord
from commandbus.model.process_graph import ProcessGraph, process_graph
from commandbus.web.api.parameters import Cursor, Domain, Id, Limit
from commandbus.web.console import Console


def add_routes(router: APIRouter, console: Console) -> None:
    """The routes of this module."""
    bus = console.reading

    @router.get("/batches")
    async def batches(limit: Limit = 50, cursor: Cursor = None) -> Page[BatchRecord]:
        """Batches, newest first."""
        return await bus.query_batches(limit=limit, cursor=cursor)

    @router.get("/batch")
    async def batch(domain: Domain, id: Id) -> BatchRecord:  # noqa: A002
        """One batch."""
        record = await bus.get_batch(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no batch {id!r} in domain {domain!r}")
        return record

    @router.get("/processes")
    async def processes(limit: Limit = 50, cursor: Cursor = None) -> Page[ProcessRecord]:
        """Processes, newest first."""
        return await bus.query_processes(limit=limit, cursor=cursor)

    @router.get("/process/graph")
    async def graph(domain: Domain, id: Id) -> ProcessGraph:  # noqa: A002
        """The steps of a process as a graph, what it waits for, and what a cancel would undo."""
        record = await bus.get_process(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no process {id!r} in domain {domain!r}")
        return process_graph(record)

    @router.get("/process")
    async def process(domain: Domain, id: Id) -> ProcessRecord:  # noqa: A002
        """One process with its steps."""
        record = await bus.get_process(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no process {id!r} in domain {domain!r}")
        return record
