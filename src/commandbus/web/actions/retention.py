"""What operators do to what has finished: they prune it, a portion in each request."""

from __future__ import annotations

from typing import Final

from commandbus.bus import AsyncCommandBus
from commandbus.errors import InvalidCommandError
from commandbus.flow.commands.prune import PruneReport
from commandbus.model.durations import parse_seconds
from commandbus.shell_words import quoted
from commandbus.web.actions.fields import Action, Fields, Portion, as_whole

PORTION: Final = 20_000  # rows that one request looks at


async def _prune(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    age, count = retention_of(given.get("age"), given.get("count"))
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


def retention_of(age: str | None, count: str | None) -> tuple[float | None, int | None]:
    """What a form says is kept. An error names the field that is wrong, or says that none is given."""
    if not age and not count:
        raise InvalidCommandError("age or count is missing: give an age (30d), or how many of the newest to keep")
    seconds = None if not age else parse_seconds(age, name="age", error=InvalidCommandError)
    return seconds, None if not count else as_whole(count, "count")


def too_many_to_count(count: str | None) -> str:
    """What to do if the newest commands could not be counted in the time that a page has."""
    return (
        f"The newest {count} commands could not be counted within two seconds. Give an age instead, or let the "
        f"command line count them: `commandbus prune --count {quoted(count)} --preview`."
    )


ACTIONS: dict[str, Action] = {"prune": Action(("age?", "count?", "go_on_from?"), _prune)}
