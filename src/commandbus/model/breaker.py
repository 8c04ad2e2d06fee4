"""A breaker: after how much trouble a command type is left alone for a while (`model/breaker_rule.py`).

    closed ──enough attempts stuck, or failed, within the window──► open ──reset──► half open: one probe
       ▲                                                             ▲                  │
       └──────────────────── the probe went well ────────────────────┼──────────────────┤
                                                                     └── it did not ────┘

`Breaker` is the declaration, checked; its state is shared by the fleet and lives in the database. Limits have
breakers of their own, for their APIs: `model/limit_state.py`. Why there are two kinds: ADR 24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final, Literal, cast

from commandbus.errors import ConfigurationError
from commandbus.model.durations import Duration, format_seconds, parse_seconds
from commandbus.model.json_values import Json
from commandbus.model.names import shown
from commandbus.quick_dataclass import dataclass

OnOpen = Literal["park", "refuse"]
_MOST: Final = 1_000  # the moments are kept in one row
_SHORTEST: Final = 0.1


@dataclass(frozen=True, slots=True)
class Breaker:
    """When the breaker of a command type opens, and what happens then.

    `stuck`: at least so many attempts, of at least three commands, that were stuck (had to be given up) within the
    `window` open it, if they are half of all that ended. `failures`: so many failed ones do. 0: they are not
    counted. `reset`: how long it stays open before one command is tried. `on_open`: "park" keeps commands until it
    closes; "refuse" also makes `send` raise `BreakerOpenError`.
    """

    stuck: int = 5
    failures: int = 0
    window: Duration = 3600.0
    reset: Duration = 60.0
    on_open: OnOpen = "park"

    def __post_init__(self) -> None:
        for name in ("stuck", "failures"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
                raise _wrong(name, value, f"a whole number from 1 to {_MOST}, or 0 for not counted")
        for name in ("window", "reset"):
            object.__setattr__(self, name, _seconds(name, getattr(self, name)))
        if not isinstance(self.on_open, str) or self.on_open not in ("park", "refuse"):
            raise _wrong("on_open", self.on_open, '"park" or "refuse"')

    @classmethod
    def off(cls) -> Breaker:
        """One that counts nothing, and so never opens by itself."""
        return cls(stuck=0, failures=0)

    @property
    def is_off(self) -> bool:
        """Does it count nothing?"""
        return not self.stuck and not self.failures

    @property
    def refuses(self) -> bool:
        """Are sends refused while it is open?"""
        return self.on_open == "refuse"

    @property
    def window_seconds(self) -> float:
        """The window, as a type checker knows it."""
        return cast(float, self.window)

    @property
    def reset_seconds(self) -> float:
        """How long it stays open, likewise."""
        return cast(float, self.reset)

    def to_json(self) -> dict[str, Json]:
        """What differs from a bare `Breaker`, in JSON's types; `from_json` reads it."""
        options = {item.name: item.default for item in fields(self)}
        return {name: getattr(self, name) for name, default in options.items() if getattr(self, name) != default}

    @classmethod
    def from_json(cls, given: Mapping[str, Json]) -> Breaker:
        """From options by name."""
        for key in given:
            if key not in OPTIONS:
                raise ConfigurationError(
                    f"breaker: there is no option {shown(key)}; there are {', '.join(OPTIONS)}"
                )
        return cls(**given)


OPTIONS: Final = tuple(item.name for item in fields(Breaker))


def _seconds(name: str, value: Duration) -> float:
    seconds = parse_seconds(value, name=f"breaker: {name}", error=ConfigurationError)
    if seconds < _SHORTEST:
        raise _wrong(name, value, f"at least {format_seconds(_SHORTEST)}")
    return seconds


def _wrong(name: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(f"breaker: {name} must be {wanted}, not {shown(value)}")
