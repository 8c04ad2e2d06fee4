"""The same as JSON, under /api. `/api/openapi.json` describes it."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from commandbus.web.api import (
    actions,
    audit,
    commands,
    controls,
    database,
    fleet,
    groups,
    keys_and_effects,
    plans,
    rehearsals,
    replies,
    retention,
    slots,
)
from commandbus.web.api.problems import PROBLEMS
from commandbus.web.console import Console

_MODULES: Final = (
    fleet,
    slots,
    commands,
    controls,
    groups,
    keys_and_effects,
    replies,
    retention,
    plans,
    rehearsals,
    audit,
    database,
    actions,
)


def api_routes(console: Console) -> APIRouter:
    """The routes of the API."""
    router = APIRouter(prefix="/api", responses=PROBLEMS)
    for module in _MODULES:
        module.add_routes(router, console)
    return router
