"""Prune: what would be deleted, before an operator does it."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from commandbus.web.actions.retention import keeps_all, retention_of
from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""

    async def prune(request: Request, age: str | None = None, count: str | None = None) -> Response:
        """What a prune by age or by count would delete now. Without either, the settings of the console decide."""
        seconds, keeps = retention_of(age, count)
        is_off = seconds is None and keeps is None and keeps_all(console.settings)
        found = None if is_off else await console.reading.preview_prune(age=seconds, count=keeps)
        return console.page(request, "prune.html", preview=found, age=age or "", count=count or "")

    return {"/prune": prune}
