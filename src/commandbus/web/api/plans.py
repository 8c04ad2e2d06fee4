"""Plans, as JSON. The actions preview-plan, start-plan and stop-plan make, start and stop them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from commandbus.model.page import MAX_ID, Page
from commandbus.model.plan import PlannedCommand, PlanRecord
from commandbus.web.api.parameters import Cursor, Domain, Limit
from commandbus.web.console import Console

PlanId = Annotated[int, Query(ge=1, le=MAX_ID)]


class PlanOut(BaseModel):
    """A plan, what it does and how far it is, and a page of its commands."""

    plan: PlanRecord
    text: str
    progress: str
    commands: Page[PlannedCommand]


def add_routes(router: APIRouter, console: Console) -> None:
    """The routes of this module."""
    bus = console.reading

    @router.get("/plans")
    async def plans(domain: Domain | None = None, limit: Limit = 50, cursor: Cursor = None) -> Page[PlanRecord]:
        """Plans, newest first."""
        return await bus.plans.list(domain, limit=limit, cursor=cursor)

    @router.get("/plan")
    async def plan(id: PlanId, limit: Limit = 50, cursor: Cursor = None) -> PlanOut:  # noqa: A002 - the link's own
        """One plan, and a page of its commands."""
        found = await bus.plans.get(id)
        commands = await bus.plans.commands(id, limit=limit, cursor=cursor)
        return PlanOut(plan=found, text=found.text, progress=found.progress_text, commands=commands)
