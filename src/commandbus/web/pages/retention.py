"""Prune: what would be deleted, before an operator does it."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from commandbus.model.durations import format_seconds
from commandbus.web.actions.retention import retention_of
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
        found = None
        if age or count:
            seconds, keeps = retention_of(age, count)
            found = await console.reading.preview_prune(age=seconds, count=keeps)
        return console.page(request, "prune.html", preview=found, age=age or "", count=count or "")

    return {"/prune": prune}
