"""Prune: what would be deleted, before an operator does it."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response
from psycopg.errors import QueryCanceled

from commandbus.model.durations import format_seconds
from commandbus.web.actions.retention import retention_of, too_many_to_count
from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""

    settings = console.settings
    usual_age = None if settings.retention_age is None else format_seconds(settings.retention_age)
    usual_count = None if settings.retention_count is None else str(settings.retention_count)

    async def prune(request: Request, age: str | None = None, count: str | None = None) -> Response:
        """What a prune by age or by count would delete now. The form begins with the settings of the console."""
        if not age and not count:
            age, count = usual_age, usual_count
        found, problem = None, None
        if age or count:
            seconds, keeps = retention_of(age, count)
            try:
                found = await console.reading.preview_prune(age=seconds, count=keeps)
            except QueryCanceled:
                problem = too_many_to_count(count)
        return console.page(
            request, "prune.html", preview=found, problem=problem, age=age or "", count=count or ""
        )

    return {"/prune": prune}
