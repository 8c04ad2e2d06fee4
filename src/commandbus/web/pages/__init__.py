"""The pages: one module for each entry of the menu. Each reads with the reading bus, and shows what it found.
Nothing here changes anything."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from commandbus.web.console import Console
from commandbus.web.pages import (
    audit,
    batches,
    commands,
    database,
    domains,
    effects,
    keys,
    limits,
    now,
    plans,
    processes,
    replies,
    retention,
    schedules,
    stack,
    troubleshooting,
    workers,
)

_MODULES: Final = (
    now,
    commands,
    troubleshooting,
    plans,
    limits,
    keys,
    schedules,
    batches,
    processes,
    effects,
    workers,
    stack,
    domains,
    replies,
    retention,
    database,
    audit,
)


def page_routes(console: Console) -> APIRouter:
    """The routes of all pages."""
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    for module in _MODULES:
        for path, page in module.routes(console).items():
            router.add_api_route(path, page, methods=["GET"])
    return router
