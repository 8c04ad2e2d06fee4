"""Replies that could not be delivered, and those that moved no process, as JSON."""

from __future__ import annotations

from fastapi import APIRouter

from commandbus.flow.commands.inspect import UndeliveredReply
from commandbus.model.page import Page
from commandbus.model.process import StrayReply
from commandbus.web.api.parameters import Cursor, Domain, Limit
from commandbus.web.console import Console


def add_routes(router: APIRouter, console: Console) -> None:
    """The routes of this module."""
    bus = console.reading

    @router.get("/undelivered")
    async def undelivered(limit: Limit = 50, cursor: Cursor = None) -> Page[UndeliveredReply]:
        """Replies whose queue was gone, newest first."""
        return await bus.undelivered_replies(limit=limit, cursor=cursor)

    @router.get("/strays")
    async def strays(domain: Domain | None = None, limit: Limit = 50, cursor: Cursor = None) -> Page[StrayReply]:
        """Replies that moved no process, newest first."""
        return await bus.stray_replies(domain, limit=limit, cursor=cursor)
