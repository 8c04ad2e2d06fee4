"""What operators do to limits and key limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from commandbus.bus import AsyncCommandBus
from commandbus.errors import InvalidCommandError
from commandbus.flow.commands.known_types import doubt_limit
from commandbus.model.key_limit import OnFailure
from commandbus.model.limit import PERMIT_OPTIONS, LimitOptions
from commandbus.web.actions.fields import Action, Fields, as_whole, lines_of, one_of

_NONE: Final = "none"  # in a field: no such bound
YES: Final = ("yes", "no")


async def _set_limit(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    options = limit_options(given)
    if not options:
        raise InvalidCommandError(f"nothing to set; there are {', '.join(PERMIT_OPTIONS)}")
    info = await bus.set_limit(given["limit"], operator=operator, reason=given.get("reason"), **options)
    changed = ", ".join(name.replace("_", " ") for name in options)
    allows = "any number" if info.concurrency is None else str(info.concurrency)
    rate = "" if info.rate is None else f", {info.rate}"
    done = f"limit {info.name} allows {allows} at once{rate}; set: {changed}"
    if not info.warning:
        return done
    others = {item.name for item in await bus.limits()} - {info.name}
    return f"{done}. {doubt_limit(info.name, others)}"


async def _unset_limit(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    options = lines_of(given, "options")
    info = await bus.unset_limit(given["limit"], *options, operator=operator, reason=given.get("reason"))
    if info is None:
        return f"limit {given['limit']} is deleted: no program declares it"
    which = ", ".join(option.replace("_", " ") for option in options)
    return f"limit {given['limit']} is as its program declares it{f', in its {which}' if which else ''}"


async def _set_key_limit(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    chosen: OnFailure | None = (
        one_of(_ON_FAILURE, given["on_failure"], "on_failure") if "on_failure" in given else None
    )
    limit = await bus.key_limits.set(
        given["domain"],
        given["name"],
        concurrency=as_whole(given["concurrency"], "concurrency"),
        ordered=_is_yes(given.get("ordered", "no"), "ordered"),
        on_failure=chosen,
        operator=operator,
        reason=given.get("reason"),
    )
    order = "in the order of sending" if limit.ordered else "in any order"
    return f"key limit {limit.domain}/{limit.name} allows {limit.concurrency} of a key at once, {order}"


async def _override_key(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    concurrency = as_whole(given["concurrency"], "concurrency")
    await bus.key_limits.override(
        given["domain"],
        given["name"],
        given.get("key"),
        concurrency=concurrency,
        until=given["until"],
        operator=operator,
        reason=given.get("reason"),
    )
    return f"{_key(given)}: {concurrency} at once for {given['until']}"


async def _end_key_override(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    ended = await bus.key_limits.end_override(
        given["domain"], given["name"], given.get("key"), operator=operator, reason=given.get("reason")
    )
    return f"{_key(given)}: {'the override is ended' if ended else 'there was no override'}"


async def _delete_key_limit(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.key_limits.delete(given["domain"], given["name"], operator=operator, reason=given.get("reason"))
    return f"key limit {given['domain']}/{given['name']} is deleted"


ACTIONS: dict[str, Action] = {
    "set-limit": Action(("limit", *(f"{name}?" for name in PERMIT_OPTIONS)), _set_limit),
    "unset-limit": Action(("limit", "options?"), _unset_limit),
    "set-key-limit": Action(("domain", "name", "concurrency", "ordered?", "on_failure?"), _set_key_limit),
    "override-key": Action(("domain", "name", "key?", "concurrency", "until"), _override_key),
    "end-key-override": Action(("domain", "name", "key?"), _end_key_override),
    "delete-key-limit": Action(("domain", "name"), _delete_key_limit),
}
_ON_FAILURE: Final[tuple[OnFailure, ...]] = ("block", "step_aside")


def limit_options(given: Fields) -> LimitOptions:
    """The options of a limit that a form gives. What it leaves empty stays as it is."""
    options: Any = {name: _READ[name](given[name], name) for name in PERMIT_OPTIONS if name in given}
    return options  # type: ignore[no-any-return]


def _number_or_none(text: str, name: str) -> int | None:
    return None if text == _NONE else as_whole(text, name)


def _text_or_none(text: str, _name: str) -> str | None:
    return None if text == _NONE else text


def _text(text: str, _name: str) -> str:
    return text


def _durations(text: str, _name: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _is_yes(text: str, name: str) -> bool:
    return one_of(YES, text, name) == "yes"


_READ: Final[dict[str, Callable[[str, str], Any]]] = {
    "concurrency": _number_or_none,
    "rate": _text_or_none,
    "burst": as_whole,
    "lease": _text,
    "call_timeout": _text_or_none,
    "max_wait": _text_or_none,
    "tries": as_whole,
    "backoff": _durations,
    "breaker_failures": as_whole,
    "breaker_reset": _text,
    "store": _text,
    "environment": _text,
    "shared": _is_yes,
}


def _key(given: Fields) -> str:
    whose = f"key {given['key']}" if "key" in given else "all keys"
    return f"{whose} of {given['domain']}/{given['name']}"
