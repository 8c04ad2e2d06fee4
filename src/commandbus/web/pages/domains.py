"""What waits and runs per domain, what is paused, and messages that were no commands."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def domains(request: Request) -> Response:
        """What waits and runs, per domain, and what is paused."""
        status, pauses = await bus.status(), await bus.pauses()
        return console.page(request, "domains.html", domains=status.items, pauses=pauses.items)

    async def rejected(request: Request, domain: str | None = None, cursor: str | None = None) -> Response:
        """Messages that were no commands."""
        page = await bus.rejected(domain, cursor=cursor)
        return console.page(request, "rejected.html", page=page, domain=domain)

    return {"/domains": domains, "/rejected": rejected}
