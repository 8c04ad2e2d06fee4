"""Schedules, when they fire next, and what they missed."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from commandbus.web.charts import firings_chart
from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes
from commandbus.web.schedule_detail import schedule_detail


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def schedules(request: Request) -> Response:
        """Schedules, when they fire next, and what they missed."""
        found = await bus.schedules.timeline()
        return console.page(request, "schedules.html", timeline=found, chart=firings_chart(found))

    async def schedule(request: Request, domain: str, name: str) -> Response:
        """One schedule: what it sends, its next firings, and who changed it."""
        detail = await schedule_detail(bus, domain, name)
        return console.page(request, "schedule.html", detail=detail, item=detail.schedule)

    return {"/schedules": schedules, "/schedule": schedule}
