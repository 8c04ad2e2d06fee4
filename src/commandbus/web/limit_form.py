"""The options of a limit as a form shows them: what each is now, what its program declares, and who changed it."""

from __future__ import annotations

from typing import Final, NamedTuple

from commandbus.flow.limits.inspect import LimitInfo
from commandbus.model.durations import format_seconds
from commandbus.model.json_values import Json
from commandbus.model.limit import Limit


class LimitOption(NamedTuple):
    """One option. `now` and `declared` are texts that the form takes again; `declared` is None if no program
    declares the limit. `is_set`: an operator has changed it."""

    name: str
    label: str
    hint: str
    now: str
    declared: str | None
    is_set: bool


_LABELS: Final = {
    "concurrency": ("Calls at once", "5, or none"),
    "rate": ("Calls per time", "2/s, 120/m, 1000/h, or none"),
    "burst": ("Calls at the same moment", "1"),
    "lease": ("Lease of a permit", "120s"),
    "call_timeout": ("How long a call may take", "60s, or none"),
    "max_wait": ("Longest wait while no call succeeds", "1h, or none"),
    "tries": ("429s before a command needs a person", "4"),
    "backoff": ("Waits after a 429", "2,4,8,16,30"),
    "breaker_failures": ("Bad answers that open the breaker", "3; 0: never"),
    "breaker_reset": ("How long the breaker stays open", "60s"),
    "store": ("Where permits are kept, while nobody uses it", "postgres or redis"),
    "environment": ("Environment, while nobody uses it", "a name"),
    "shared": ("Shared with stand-alone semaphores", "yes or no"),
}


def limit_options(info: LimitInfo) -> list[LimitOption]:
    """The options of a limit, in the order of its declaration."""
    now = {
        "concurrency": info.concurrency,
        "rate": info.rate,
        "burst": info.burst,
        "lease": format_seconds(info.lease_seconds),
        "call_timeout": _duration(info.call_timeout_seconds),
        "max_wait": _duration(info.max_wait_seconds),
        "tries": info.tries,
        "backoff": _durations(info.backoff),
        "breaker_failures": info.breaker_failures,
        "breaker_reset": format_seconds(info.breaker_reset_seconds),
        "store": info.store,
        "environment": info.environment,
        "shared": info.shared,
    }
    declared = None if info.declared is None else _declared(info)
    set_here = info.override or {}
    return [
        LimitOption(
            name, label, hint, _text(now[name]), None if declared is None else declared[name], name in set_here
        )
        for name, (label, hint) in _LABELS.items()
    ]


def _declared(info: LimitInfo) -> dict[str, str]:
    """What its program declares, with defaults. Its settings decide on a `store` that is left out."""
    limit = Limit.from_json(info.name, info.declared)
    found: dict[str, object] = {name: getattr(limit, name) for name in _LABELS}
    found |= {
        "lease": format_seconds(limit.lease_seconds),
        "call_timeout": _duration(limit.call_timeout_seconds),
        "max_wait": _duration(limit.max_wait_seconds),
        "backoff": _durations(limit.backoff_seconds),
        "breaker_reset": format_seconds(limit.breaker_reset_seconds),
        "store": limit.store or "as configured",
        "environment": limit.environment or "as configured",
    }
    return {name: _text(value) for name, value in found.items()}


def _duration(seconds: float | None) -> str | None:
    return None if seconds is None else format_seconds(seconds)


def _durations(seconds: tuple[float, ...]) -> str:
    return ", ".join(map(format_seconds, seconds))


def _text(value: object | Json) -> str:
    return "none" if value is None else ("yes" if value else "no") if isinstance(value, bool) else str(value)
