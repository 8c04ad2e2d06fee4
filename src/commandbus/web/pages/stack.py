"""Where a running command is at this moment. Its worker is asked when somebody opens the page, and not before."""

from __future__ import annotations

from typing import Final

from fastapi import Request
from fastapi.responses import Response

from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes

WAIT_SECONDS: Final = 4.0


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    bus = console.reading

    async def stack(request: Request, domain: str, id: str) -> Response:  # noqa: A002
        """Where a running command is."""
        found = await bus.request_stack(domain, id, wait=WAIT_SECONDS)
        return console.page(request, "stack.html", found=found)

    return {"/stack": stack}
