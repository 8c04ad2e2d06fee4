"""Batches, and one batch with its commands."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from commandbus.errors import CommandNotFoundError
from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def batches(request: Request, cursor: str | None = None) -> Response:
        """Batches, newest first."""
        return console.page(request, "batches.html", page=await bus.query_batches(cursor=cursor))

    async def batch(request: Request, domain: str, id: str, cursor: str | None = None) -> Response:  # noqa: A002
        """One batch and its commands."""
        record = await bus.get_batch(domain, id)
        if record is None:
            raise CommandNotFoundError(f"no batch {id!r} in domain {domain!r}")
        members = await bus.commands.list_by_batch(domain, id, cursor=cursor)
        return console.page(request, "batch.html", record=record, page=members)

    return {"/batches": batches, "/batch": batch}
