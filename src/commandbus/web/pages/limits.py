"""Limits and breakers, and one limit with its holders, its line and its back-offs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from fastapi import Request
from fastapi.responses import Response

from commandbus.errors import CommandNotFoundError
from commandbus.flow.limits.inspect import list_actions
from commandbus.web.charts import backoff_chart
from commandbus.web.console import Console
from commandbus.web.limit_form import limit_options
from commandbus.web.pages.page_route import PageRoutes

MOST_ACTIONS: Final = 50


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
        options = limit_options(detail.limit)
        estimate = await bus.estimate(name)
        return console.page(
            request,
            "limit.html",
            item=detail.limit,
            detail=detail,
            chart=chart,
            options=options,
            estimate=estimate,
        )

    async def breaker(request: Request, name: str) -> Response:
        """The breaker of one command type, and what happened to it."""
        found = [item for item in await bus.breakers() if item.kind == "type" and item.name == name]
        if not found:
            raise CommandNotFoundError(f"no breaker {name!r} of a command type has counted anything")
        until = found[0].until
        left = None if until is None else (until - datetime.now(UTC)).total_seconds()
        actions = await bus.run(list_actions(name, limit=MOST_ACTIONS))
        return console.page(request, "breaker.html", item=found[0], actions=actions, left=left)

    return {"/limits": limits, "/limit": limit, "/breaker": breaker}
