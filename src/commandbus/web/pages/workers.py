"""Workers: supervisors, their workers and slots, and those that died."""

from __future__ import annotations

from typing import Final

from fastapi import Request
from fastapi.responses import Response

from commandbus.flow.workers.view import supervisors
from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes

MOST_DEAD: Final = 20
MOST_STOPPED: Final = 20


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def workers(request: Request) -> Response:
        """Live ones first. They publish their slots from now on, for some seconds."""
        found, slots = await bus.workers(), await bus.watch_slots()
        dead = await bus.post_mortems(limit=MOST_DEAD)
        stopped = [item for item in found if item.state == "STOPPED"][:MOST_STOPPED]
        shown = [item for item in found if item.state != "STOPPED"] + stopped
        groups = supervisors(shown, slots.items)
        return console.page(request, "workers.html", supervisors=groups, post_mortems=dead.items)

    return {"/workers": workers}
