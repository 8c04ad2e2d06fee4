"""What operators do to what has finished: they prune it, a portion in each request."""

from __future__ import annotations

from typing import Final

from commandbus.bus import AsyncCommandBus
from commandbus.errors import InvalidCommandError
from commandbus.flow.commands.prune import PruneReport
from commandbus.model.durations import parse_seconds
from commandbus.settings import Settings
from commandbus.web.actions.fields import Action, Fields, Portion, as_whole

PORTION: Final = 20_000  # rows that one request looks at


async def _prune(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    age, count = retention_of(given.get("age"), given.get("count"))
    if age is None and count is None and keeps_all(bus.settings):
        raise nothing_given()
    report: PruneReport = await bus.prune(
        age=age,
        count=count,
        portion=PORTION,
        go_on_from=given.get("go_on_from"),
        operator=operator,
        reason=given.get("reason"),
    )
    if report.go_on_from is None:
        return f"{report.text}; nothing more is left to delete"
    again = {name: given[name] for name in ("age", "count") if name in given}
    return Portion(f"{report.text}; there may be more", {**again, "go_on_from": report.go_on_from})


def keeps_all(settings: Settings) -> bool:
    """Do the settings keep everything that has finished?"""
    return settings.retention_age is None and settings.retention_count is None


def nothing_given() -> InvalidCommandError:
    """The error for a prune that would delete nothing."""
    return InvalidCommandError("give an age (30d) or a count: the settings of this console keep everything")


def retention_of(age: str | None, count: str | None) -> tuple[float | None, int | None]:
    """What a form says is kept. An error names the field that is wrong."""
    seconds = None if not age else parse_seconds(age, name="age", error=InvalidCommandError)
    return seconds, None if not count else as_whole(count, "count")


ACTIONS: dict[str, Action] = {"prune": Action(("age?", "count?", "go_on_from?"), _prune)}
