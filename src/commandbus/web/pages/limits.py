"""Limits and breakers, and one limit with its holders, its line and its back-offs."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import Request
from fastapi.responses import Response

from commandbus.web.charts import backoff_chart
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

    async def limit(request: Request, name: str) -> Response:
        """One limit: who holds its permits, its line, and its back-offs."""
        detail = await bus.limit_detail(name)
        chart = backoff_chart(detail.backoffs, datetime.now(UTC))
        return console.page(request, "limit.html", item=detail.limit, detail=detail, chart=chart)

    return {"/limits": limits, "/limit": limit}
