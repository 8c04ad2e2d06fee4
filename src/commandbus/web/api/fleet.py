"""What needs a person, domains, pauses and workers, as JSON."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime

from fastapi import APIRouter
from pydantic import BaseModel

from commandbus.flow.commands.inspect import DomainStatus, WorkerInfo
from commandbus.flow.commands.pause import PauseInfo
from commandbus.web.attention import concerns
from commandbus.web.console import Console


class ConcernOut(BaseModel):
    """One thing that needs a person, and since when, if that is known."""

    text: str
    link: str
    since: datetime | None = None


def add_routes(router: APIRouter, console: Console) -> None:
    """The routes of this module."""
    bus = console.reading

    @router.get("/concerns")
    async def list_concerns() -> list[ConcernOut]:
        """What needs a person now."""
        return [ConcernOut(**asdict(item)) for item in concerns(await console.fleet())]

    @router.get("/domains")
    async def domains() -> list[DomainStatus]:
        """What waits and runs, per domain."""
        return (await bus.status()).items

    @router.get("/pauses")
    async def pauses() -> list[PauseInfo]:
        """What is paused."""
        return (await bus.pauses()).items

    @router.get("/workers")
    async def workers() -> list[WorkerInfo]:
        """All workers in the registry."""
        return (await bus.workers()).items
