"""Limits, breakers and schedules, as JSON."""

from __future__ import annotations

from fastapi import APIRouter

from commandbus.flow.breakers.operate import BreakerInfo
from commandbus.flow.limits.detail import LimitDetail
from commandbus.flow.limits.inspect import ControlAction, LimitInfo, list_actions
from commandbus.flow.schedules.operate import ScheduleRecord
from commandbus.flow.schedules.timeline import ScheduleTimeline
from commandbus.web.api.parameters import Name
from commandbus.web.console import Console


def add_routes(router: APIRouter, console: Console) -> None:
    """The routes of this module."""
    bus = console.reading

    @router.get("/limits")
    async def limits() -> list[LimitInfo]:
        """All limits."""
        return (await bus.limits()).items

    @router.get("/limit")
    async def limit(name: Name) -> LimitDetail:
        """One limit: who holds its permits, who waits, and its last back-offs."""
        return await bus.limit_detail(name)

    @router.get("/breakers")
    async def breakers() -> list[BreakerInfo]:
        """Breakers of command types and limits."""
        return (await bus.breakers()).items

    @router.get("/breaker/actions")
    async def actions(name: Name) -> list[ControlAction]:
        """What was done last to the breaker of a limit (`docai`) or a command type (`orders/ship`)."""
        return await bus.run(list_actions(name, limit=50))

    @router.get("/schedules/timeline")
    async def timeline() -> ScheduleTimeline:
        """The next firings of all schedules within a day, and those that were missed."""
        return await bus.schedules.timeline()

    @router.get("/schedules")
    async def schedules() -> list[ScheduleRecord]:
        """All schedules."""
        return (await bus.schedules.list()).items
