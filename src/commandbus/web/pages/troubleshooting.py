"""Commands that need a person, and attempts that had to be stopped."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from commandbus.model.count import added
from commandbus.troubleshooting import AsyncTroubleshootingQueue
from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def troubleshooting(
        request: Request,
        domain: str | None = None,
        command_type: str | None = None,
        error_code: str | None = None,
        fingerprint: str | None = None,
        cursor: str | None = None,
    ) -> Response:
        """Commands that need a person."""
        given = {
            "domain": domain,
            "command_type": command_type,
            "error_code": error_code,
            "fingerprint": fingerprint,
        }
        wanted = {name: value for name, value in given.items() if value}
        queue = AsyncTroubleshootingQueue(bus)
        page = await queue.list(
            wanted.get("domain"),
            wanted.get("command_type"),
            error_code=wanted.get("error_code"),
            fingerprint=wanted.get("fingerprint"),
            cursor=cursor,
        )
        groups = await bus.list_failures(
            wanted.get("domain"), wanted.get("command_type"), in_troubleshooting=True, limit=50
        )
        counts = await queue.count_by_type(**wanted)
        return console.page(
            request,
            "troubleshooting.html",
            page=page,
            counts=counts,
            total=added(counts.values()),
            wanted=wanted,
            groups=groups.items,
        )

    async def stuck(request: Request, cursor: str | None = None) -> Response:
        """Attempts that had to be stopped."""
        groups = None if cursor is not None else await bus.list_stuck_groups()
        return console.page(request, "stuck.html", page=await bus.list_stuck(cursor=cursor), groups=groups)

    return {"/troubleshooting": troubleshooting, "/stuck": stuck}
