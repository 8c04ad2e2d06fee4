"""Batches, and one batch with its commands."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from fastapi import Request
from fastapi.responses import Response

from commandbus.bus import AsyncCommandBus
from commandbus.errors import CommandNotFoundError
from commandbus.flow.batches.operate import list_actions
from commandbus.model.batch import BatchRecord
from commandbus.model.command import CommandRecord, CommandStatus
from commandbus.model.page import Page
from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes

FIRST: Final = 20
MOST_ACTIONS: Final = 20
LONGEST_SECONDS: Final = 10 * 365 * 86400.0


async def _troubled(bus: AsyncCommandBus, record: BatchRecord) -> dict[CommandStatus, Page[CommandRecord]]:
    """The newest members that need a person, and those that failed for good, if there are any."""
    counts = {
        CommandStatus.IN_TROUBLESHOOTING_QUEUE: record.in_tsq,
        CommandStatus.FAILED: record.failed,
    }
    return {
        status: await bus.batches.list_commands(record.domain, record.batch_id, status, limit=FIRST)
        for status, count in counts.items()
        if count and record.holds == "commands"
    }


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def batches(request: Request, cursor: str | None = None) -> Response:
        """Batches, newest first."""
        return console.page(request, "batches.html", page=await bus.query_batches(cursor=cursor))

    async def batch(
        request: Request,
        domain: str,
        id: str,  # noqa: A002
        status: CommandStatus | None = None,
        cursor: str | None = None,
    ) -> Response:
        """One batch: what needs a person and what failed first, then all its commands."""
        record = await bus.get_batch(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no batch {id!r} in domain {domain!r}")
        page = await bus.batches.list_commands(domain, id, status, cursor=cursor)
        first = {} if status is not None or cursor is not None else await _troubled(bus, record)
        eta = record.eta_seconds
        done_at = None if eta is None else datetime.now(UTC) + timedelta(seconds=min(eta, LONGEST_SECONDS))
        actions = await bus.run(list_actions(domain, id, limit=MOST_ACTIONS))
        return console.page(
            request,
            "batch.html",
            record=record,
            page=page,
            troubled=first,
            status=status,
            done_at=done_at,
            actions=actions,
        )

    return {"/batches": batches, "/batch": batch}
