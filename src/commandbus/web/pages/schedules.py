"""Schedules, when they fire next, and what they missed."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from commandbus.web.charts import firings_chart
from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def schedules(request: Request) -> Response:
        """Schedules, when they fire next, and what they missed."""
        found = await bus.schedules.timeline()
        return console.page(request, "schedules.html", timeline=found, chart=firings_chart(found))

    return {"/schedules": schedules}
