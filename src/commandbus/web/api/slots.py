"""What slots run, the last hour of each domain, and where a running command is, as JSON."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from commandbus.flow.workers.post_mortems import PostMortem
from commandbus.flow.workers.requests import LiveStack
from commandbus.flow.workers.slots import WorkerSlots
from commandbus.model.minute_figures import HourFigures
from commandbus.web.api.parameters import Domain, Id, Limit
from commandbus.web.console import Console


def add_routes(router: APIRouter, console: Console) -> None:
    """The routes of this module."""
    bus = console.reading

    @router.get("/slots")
    async def slots() -> list[WorkerSlots]:
        """What the slots of live workers run. Workers publish that only while somebody asks: ask again after a
        second if a worker is missing."""
        return (await bus.watch_slots()).items

    @router.get("/hours")
    async def hours(domain: Domain | None = None) -> list[HourFigures]:
        """The last sixty minutes of each domain. A figure that nobody knows is null."""
        return (await bus.last_hour(*([domain] if domain else []))).items

    @router.get("/post-mortems")
    async def post_mortems(limit: Limit = 50) -> list[PostMortem]:
        """The last workers that died: how, and which attempts were charged for it and which were not."""
        return (await bus.post_mortems(limit=limit)).items

    @router.get("/stack")
    async def stack(domain: Domain, id: Id, wait: Annotated[float, Query(ge=0, le=10)] = 4) -> LiveStack:  # noqa: A002
        """Where a running command is at this moment. `problem` says why that is not known."""
        return await bus.request_stack(domain, id, wait=wait)
