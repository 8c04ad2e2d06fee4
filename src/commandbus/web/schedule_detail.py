"""One schedule with its next firings and its changes, for the page and the API."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from commandbus.bus import AsyncCommandBus
from commandbus.errors import ScheduleNotFoundError
from commandbus.flow.limits.inspect import ControlAction
from commandbus.flow.schedules.operate import ScheduleRecord, list_actions
from commandbus.quick_dataclass import dataclass

FIRINGS: Final = 10
ACTIONS: Final = 50


@dataclass(frozen=True, slots=True)
class ScheduleDetail:
    """A schedule, when it fires next, and what people did to it, the newest first."""

    schedule: ScheduleRecord
    next_firings: list[datetime]
    actions: list[ControlAction]


async def schedule_detail(bus: AsyncCommandBus, domain: str, name: str) -> ScheduleDetail:
    """What is known of a schedule. Raises ScheduleNotFoundError if there is none of this name."""
    found = await bus.schedules.get(domain, name)
    if found is None:
        raise ScheduleNotFoundError(domain, name)
    firings = await bus.schedules.next_firings(domain, name, count=FIRINGS)
    return ScheduleDetail(found, list(firings), await bus.run(list_actions(domain, name, limit=ACTIONS)))
