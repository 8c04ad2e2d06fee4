"""What the server says about our tables and sessions, as JSON."""

from __future__ import annotations

from fastapi import APIRouter

from commandbus.flow.database.report import DatabaseReport
from commandbus.web.console import Console


def add_routes(router: APIRouter, console: Console) -> None:
    """The routes of this module."""

    @router.get("/database")
    async def database() -> DatabaseReport:
        """Dead rows and vacuum, open transactions and who holds them, connections, slow statements."""
        return await console.reading.database_report()
