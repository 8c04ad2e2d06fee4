"""Workers: live ones first."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def workers(request: Request) -> Response:
        """Workers: live ones first."""
        found = sorted(await bus.workers(), key=lambda item: (item.state == "STOPPED", not item.is_alive))
        return console.page(request, "workers.html", workers=found)

    return {"/workers": workers}
