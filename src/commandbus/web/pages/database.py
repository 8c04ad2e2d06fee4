"""Database: dead rows, vacuum, open transactions and who holds them, connections, slow statements."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from commandbus.flow.database.report import LONG_SECONDS
from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""

    async def database(request: Request) -> Response:
        """What the server says."""
        report = await console.reading.database_report()
        return console.page(request, "database.html", report=report, long=LONG_SECONDS)

    return {"/database": database}
