"""Effects of which nobody knows whether their calls were made."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""

    async def effects(request: Request, domain: str | None = None, cursor: str | None = None) -> Response:
        """Open effects, the oldest command first."""
        page = await console.reading.commands.list_open_effects(domain, cursor=cursor)
        return console.page(request, "effects.html", page=page)

    return {"/effects": effects}
