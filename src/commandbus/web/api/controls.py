"""Limits, breakers and schedules, as JSON."""

from __future__ import annotations

from fastapi import APIRouter

from commandbus.flow.breakers.operate import BreakerInfo
from commandbus.flow.limits.detail import LimitDetail
from commandbus.flow.limits.inspect import ControlAction, Estimate, LimitInfo, list_actions
from commandbus.flow.schedules.operate import ScheduleRecord
from commandbus.flow.schedules.timeline import ScheduleTimeline
from commandbus.web.api.parameters import Domain, Id, Name
from commandbus.web.console import Console
from commandbus.web.schedule_detail import ScheduleDetail, schedule_detail


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

    @router.get("/limit/estimate")
    async def estimate(name: Name, domain: Domain | None = None, id: Id | None = None) -> Estimate:  # noqa: A002
        """How long a new command would wait for a limit, or how long one that waits still has to."""
        return await bus.estimate(name, domain=domain, command_id=id)

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

    @router.get("/schedule")
    async def schedule(domain: Domain, name: Name) -> ScheduleDetail:
        """One schedule: what it sends, its next firings, and who changed it."""
        return await schedule_detail(bus, domain, name)

    @router.get("/schedules")
    async def schedules() -> list[ScheduleRecord]:
        """All schedules."""
        return (await bus.schedules.list()).items
