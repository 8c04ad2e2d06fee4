"""Key limits and open effects, as JSON."""

from __future__ import annotations

from datetime import datetime

from fastapi import APIRouter
from pydantic import BaseModel

from commandbus.flow.keys.operate import list_actions
from commandbus.flow.limits.inspect import ControlAction
from commandbus.model.effect import EffectRecord
from commandbus.model.key_limit import KeyLimit
from commandbus.model.page import Page
from commandbus.web.api.parameters import Cursor, Domain, Limit, Name
from commandbus.web.console import Console


class KeyLineOut(BaseModel):
    """One key with unfinished commands."""

    domain: str
    key_limit: str
    key: str
    concurrency: int
    released: int
    waiting: int
    blocked_by: str | None
    override_ends_at: datetime | None
    next_seconds: float | None


class KeyOverrideOut(BaseModel):
    """Another concurrency of one key, until a moment."""

    domain: str
    key_limit: str
    key: str | None
    concurrency: int
    ends_at: datetime


def add_routes(router: APIRouter, console: Console) -> None:
    """The routes of this module."""
    bus = console.reading

    @router.get("/keys")
    async def keys(domain: Domain | None = None) -> list[KeyLimit]:
        """Key limits, by name."""
        return list(await bus.key_limits.list(domain))

    @router.get("/key")
    async def key(domain: Domain, name: Name, limit: Limit = 50) -> list[KeyLineOut]:
        """The keys of a key limit that have unfinished commands, those with the most waiting first."""
        found = await bus.key_limits.lines(domain, name, limit=limit)
        return [KeyLineOut(**line._asdict()) for line in found]

    @router.get("/key/overrides")
    async def overrides(domain: Domain, name: Name, limit: Limit = 50) -> list[KeyOverrideOut]:
        """The keys of a key limit that have another concurrency for some time. `key` is null for all others."""
        found = await bus.key_limits.overrides(domain, name, limit=limit)
        return [KeyOverrideOut(**item._asdict()) for item in found]

    @router.get("/key/actions")
    async def actions(domain: Domain, name: Name, limit: Limit = 50) -> list[ControlAction]:
        """What people did to a key limit, newest first."""
        return await bus.run(list_actions(domain, name, limit=limit))

    @router.get("/effects")
    async def effects(
        domain: Domain | None = None, limit: Limit = 50, cursor: Cursor = None
    ) -> Page[EffectRecord]:
        """Effects of which nobody knows whether their calls were made, the oldest command first."""
        return await bus.commands.list_open_effects(domain, limit=limit, cursor=cursor)
