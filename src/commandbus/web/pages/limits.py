"""Limits and breakers."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def limits(request: Request) -> Response:
        """Limits and breakers."""
        limits, breakers = await bus.limits(), await bus.breakers()
        return console.page(
            request,
            "limits.html",
            limits=limits.items,
            breakers=[item for item in breakers if item.kind == "type"],
        )

    return {"/limits": limits}
