"""Schedules, and when they fire next."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def schedules(request: Request) -> Response:
        """Schedules, and when they fire next."""
        found = (await bus.schedules.list()).items
        firings = {
            (item.domain, item.name): await bus.schedules.next_firings(item.domain, item.name, count=3)
            for item in found[:100]
        }
        return console.page(request, "schedules.html", schedules=found, firings=firings)

    return {"/schedules": schedules}
