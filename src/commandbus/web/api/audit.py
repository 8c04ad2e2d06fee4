"""What people did, as JSON."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from commandbus.flow.audit.list_actions import ActionRecord
from commandbus.model.page import Page
from commandbus.web.api.parameters import Cursor, Domain, Limit
from commandbus.web.console import Console
from commandbus.web.pages.audit import filters

_Text = Annotated[str, Query(max_length=200)]


def add_routes(router: APIRouter, console: Console) -> None:
    """The routes of this module."""

    @router.get("/audit")
    async def audit(
        operator: _Text = "",
        action: _Text = "",
        domain: Domain = "",
        since: _Text = "",
        before: _Text = "",
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> Page[ActionRecord]:
        """Who did what, when and why, newest first. Times are ISO 8601, or how long ago (2h). If the page is
        partial, continue with its cursor."""
        wanted = filters(operator, action, domain, since, before)
        return await console.reading.audit.list_actions(**wanted, limit=limit, cursor=cursor)
