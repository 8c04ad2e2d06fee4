"""Now: what needs a person, and the state of every domain; live while the page is open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from fastapi import Request
from fastapi.responses import Response

from commandbus.flow.workers.view import supervisors
from commandbus.web.attention import Fleet, concerns, headline
from commandbus.web.console import Console
from commandbus.web.event_stream import EventStream
from commandbus.web.live import TooManyWatchersError
from commandbus.web.pages.page_route import PageRoutes
from commandbus.web.rendering import environment

MOST_WORKERS: Final = 40
"""Whose slots are shown, those in trouble first. The page of workers has the others."""


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""

    async def now(request: Request) -> Response:
        """What needs a person, and the state of every domain."""
        return console.page(request, "now.html", **_now(await console.now()))

    async def events(request: Request) -> Response:
        """The same, again and again, for the page that is open."""
        root = str(request.scope.get("root_path", ""))
        template = environment().get_template("now_live.html")

        async def stream() -> AsyncGenerator[str, None]:
            try:
                async with aclosing(console.watched.values()) as values:
                    async for found in values:
                        if isinstance(found, Exception):
                            yield "event: trouble\ndata: the database does not answer\n\n"
                        else:
                            text = template.render(root=root, **_now(found))
                            yield "".join(f"data: {line}\n" for line in text.splitlines()) + "\n"
            except TooManyWatchersError:
                yield "event: trouble\ndata: too many pages are open\n\n"
            except asyncio.CancelledError:
                return  # the page was closed

        return EventStream(stream())

    return {"/": now, "/now/events": events}


def _now(fleet: Fleet) -> dict[str, Any]:
    found = concerns(fleet)
    live = [item for item in fleet.workers if item.state != "STOPPED"]
    views = [view for group in supervisors(live, fleet.slots) for view in group.workers]
    shown = sorted(views, key=lambda view: (not view.stuck, not view.is_silent))[:MOST_WORKERS]
    return {
        "headline": headline(found),
        "concerns": found,
        "domains": fleet.domains,
        "hours": {hour.domain: hour for hour in fleet.hours},
        "served": fleet.served,
        "views": shown,
        "more_workers": len(views) - len(shown),
    }
