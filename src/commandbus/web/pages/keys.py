"""Key limits, and the keys of one that have unfinished commands."""

from __future__ import annotations

from typing import Final

from fastapi import Request
from fastapi.responses import Response

from commandbus.errors import UnknownKeyLimitError
from commandbus.flow.keys.operate import list_actions
from commandbus.model.key_limit import MOST_COUNTED
from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes

MOST_ACTIONS: Final = 50


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def keys(request: Request) -> Response:
        """All key limits."""
        return console.page(request, "keys.html", limits=await bus.key_limits.list())

    async def key(request: Request, domain: str, name: str) -> Response:
        """One key limit: the keys with the most waiting commands first."""
        found = {item.name: item for item in await bus.key_limits.list(domain)}
        if name not in found:
            raise UnknownKeyLimitError(domain, name)
        return console.page(
            request,
            "key.html",
            item=found[name],
            lines=await bus.key_limits.lines(domain, name),
            overrides=await bus.key_limits.overrides(domain, name),
            actions=await bus.run(list_actions(domain, name, limit=MOST_ACTIONS)),
            most_counted=MOST_COUNTED,
        )

    return {"/keys": keys, "/key": key}
