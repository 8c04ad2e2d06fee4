"""Replies that could not be delivered, and those that moved no process."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def undelivered(request: Request, cursor: str | None = None) -> Response:
        """Replies whose queue was gone, newest first."""
        return console.page(request, "undelivered.html", page=await bus.undelivered_replies(cursor=cursor))

    async def strays(request: Request, domain: str | None = None, cursor: str | None = None) -> Response:
        """Replies that moved no process, newest first."""
        return console.page(request, "strays.html", page=await bus.stray_replies(domain, cursor=cursor))

    return {"/undelivered": undelivered, "/strays": strays}
