"""What operators do to domains, breakers, schedules and workers."""

from __future__ import annotations

from typing import Any, Final

from commandbus.bus import AsyncCommandBus
from commandbus.model.priority import PRIORITIES
from commandbus.web.actions.fields import Action, Fields, Step, as_json, as_whole, one_of
from commandbus.web.rendering import query


async def _pause(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    changed = await bus.pause(
        given["domain"], given.get("command_type"), operator=operator, reason=given.get("reason")
    )
    return f"{_subject_of(given)} {'is' if changed else 'was already'} paused"


async def _resume(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.resume(given["domain"], given.get("command_type"), operator=operator, reason=given.get("reason"))
    return f"{_subject_of(given)} goes on"


async def _open_breaker(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.open_breaker(
        *_breaker_of(given), limit=given.get("limit"), operator=operator, reason=given.get("reason")
    )
    return f"the breaker of {_subject_of(given)} is open, until somebody closes it"


async def _close_breaker(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.close_breaker(
        *_breaker_of(given), limit=given.get("limit"), operator=operator, reason=given.get("reason")
    )
    return f"the breaker of {_subject_of(given)} is closed"


async def _reset_breaker(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.reset_breaker(
        *_breaker_of(given), limit=given.get("limit"), operator=operator, reason=given.get("reason")
    )
    return f"the breaker of {_subject_of(given)} is closed, and its counts are cleared"


async def _pause_schedule(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.schedules.pause(given["domain"], given["name"], operator=operator, reason=given.get("reason"))
    return f"schedule {given['name']} is paused"


async def _resume_schedule(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.schedules.resume(given["domain"], given["name"], operator=operator, reason=given.get("reason"))
    return f"schedule {given['name']} goes on"


async def _run_schedule(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    sent = await bus.schedules.run_now(
        given["domain"], given["name"], operator=operator, reason=given.get("reason")
    )
    return f"schedule {given['name']} has sent {sent.domain} {sent.command_id}"


async def _delete_schedule(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.schedules.delete(given["domain"], given["name"], operator=operator, reason=given.get("reason"))
    return f"schedule {given['name']} is deleted; the commands that it has sent stay"


async def _create_schedule(bus: AsyncCommandBus, operator: str, given: Fields) -> Step:
    options: Any = {name: given[name] for name in _PLAIN if name in given}
    options |= {name: as_whole(given[name], name) for name in ("max_attempts", "most") if name in given}
    options |= {name: as_json(given[name], name) for name in ("data", "headers") if name in given}
    options |= {name: one_of(_CHOICES[name], given[name], name) for name in _CHOICES if name in given}
    options["replace"] = one_of(("yes", "no"), given.get("replace", "no"), "replace") == "yes"
    made = await bus.schedules.create(
        given["domain"], given["name"], operator=operator, reason=given.get("reason"), **options
    )
    page = f"/schedule{query({'domain': made.domain, 'name': made.name})}"
    return Step(f"schedule {made.domain}/{made.name} is there: {made.times.text}", page)


_PLAIN: Final = ("cron", "every", "timezone", "command_type", "correlation_id", "reply_to", "timeout", "expires")
_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "priority": PRIORITIES,
    "missed": ("skip", "run_once", "run_all"),
    "overlap": ("allow", "skip", "queue"),
    "on_exhausted": ("troubleshoot", "fail"),
}
_CREATING: Final = (*_PLAIN, "data", "headers", "max_attempts", "most", *_CHOICES, "replace")


async def _recycle_worker(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.recycle_worker(given["worker"], operator=operator, reason=given.get("reason"))
    return f"worker {given['worker']} drains and is replaced"


async def _pause_worker(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    changed = await bus.pause_worker(given["worker"], operator=operator, reason=given.get("reason"))
    return f"worker {given['worker']} {'is' if changed else 'was already'} paused: it claims nothing more"


async def _resume_worker(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    changed = await bus.resume_worker(given["worker"], operator=operator, reason=given.get("reason"))
    return f"worker {given['worker']} {'goes on' if changed else 'was not paused'}"


ACTIONS: dict[str, Action] = {
    "pause": Action(("domain", "command_type?"), _pause),
    "resume": Action(("domain", "command_type?"), _resume),
    "open-breaker": Action(("domain?", "command_type?", "limit?"), _open_breaker),
    "close-breaker": Action(("domain?", "command_type?", "limit?"), _close_breaker),
    "reset-breaker": Action(("domain?", "command_type?", "limit?"), _reset_breaker),
    "pause-schedule": Action(("domain", "name"), _pause_schedule),
    "resume-schedule": Action(("domain", "name"), _resume_schedule),
    "run-schedule": Action(("domain", "name"), _run_schedule),
    "delete-schedule": Action(("domain", "name"), _delete_schedule),
    "create-schedule": Action(("domain", "name", *(f"{name}?" for name in _CREATING)), _create_schedule),
    "pause-worker": Action(("worker",), _pause_worker),
    "resume-worker": Action(("worker",), _resume_worker),
    "recycle-worker": Action(("worker",), _recycle_worker),
}


def _subject_of(given: Fields) -> str:
    if "limit" in given:
        return f"limit {given['limit']}"
    return "/".join(given[name] for name in ("domain", "command_type") if name in given)


def _breaker_of(given: Fields) -> tuple[str | None, str | None]:
    return given.get("domain"), given.get("command_type")
