"""What `unique` and `debounce` of a send mean, checked.

A key names one command of a domain. A sender whose key names a command asks whether that command still
has it: while it waits, while it is unfinished, or for some time after it was sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, get_args

from commandbus.errors import InvalidCommandError
from commandbus.model import names
from commandbus.model.durations import Duration, format_seconds, parse_seconds
from commandbus.quick_dataclass import dataclass

if TYPE_CHECKING:
    from commandbus.model.command import NewCommand

OnConflict: TypeAlias = Literal["ignore", "replace", "raise"]
ON_CONFLICT: Final[tuple[str, ...]] = get_args(OnConflict)
DEFAULT_WINDOWS: Final = 10
"""Without `max_delay`, a debounced command runs no later than after so many windows."""

_OTHER: Final = {"ignore": "is ignored", "replace": "replaces it", "raise": "is an error"}
_OPTIONS: Final = ("unique", "unique_while", "on_conflict", "debounce", "max_delay")


class UniqueRule(NamedTuple):
    """What keeps a key taken, and what happens then."""

    key: str
    held_while: Literal["waiting", "unfinished", "window"]
    window_seconds: float | None
    on_conflict: OnConflict
    max_delay_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class UniqueKey:
    """The key (`unique`) of a command, and what the last send with it said: while what the command has the key
    (`held_while`; `window_seconds` for a time), and what happens to another one then. A debounced command is
    replaced by each send within `debounce_seconds`, and runs at most `max_delay_seconds` after the first one.

    `has_key`: the next send with the key looks at this command. If not, another one has taken the key over, or
    pruning has removed it."""

    key: str
    held_while: Literal["waiting", "unfinished", "window"]
    on_conflict: OnConflict
    window_seconds: float | None = None
    debounce_seconds: float | None = None
    max_delay_seconds: float | None = None
    has_key: bool = True

    @property
    def text(self) -> str:
        """The rule as a phrase."""
        if self.debounce_seconds is not None:
            latest = format_seconds(self.max_delay_seconds or 0.0)
            rule = f"debounced for {format_seconds(self.debounce_seconds)}, at most {latest}"
        else:
            times = {"waiting": "while it waits", "unfinished": "until it has ended"}
            held = (
                times.get(self.held_while) or f"for {format_seconds(self.window_seconds or 0.0)} after it was sent"
            )
            rule = f"unique {held}; another one {_OTHER[self.on_conflict]}"
        return rule if self.has_key else f"{rule}; it does not have the key any more"


def split(new: NewCommand) -> tuple[NewCommand, UniqueRule | None]:
    """Returns the command without its key, and the rule of its key (None: it has no key)."""
    if not _has_options(new):
        return new, None
    if new.unique is None:
        name, value = _first_option(new)
        raise InvalidCommandError(f"{name} ({names.shown(value)}) needs unique: the key that it is about")
    rule = _once(new) if new.debounce is None else _debounced(new, new.debounce)
    if rule.on_conflict == "replace" and new.command_id is not None:
        raise InvalidCommandError(
            f"command_id ({names.shown(new.command_id)}) names one content for good, so it cannot be given with "
            f"on_conflict='replace' or debounce; leave it out"
        )
    delay = new.delay if new.debounce is None else new.debounce
    plain = replace(
        new, unique=None, unique_while=None, on_conflict=None, debounce=None, max_delay=None, delay=delay
    )
    return plain, rule


def refuse(new: NewCommand) -> None:
    """Raise InvalidCommandError if a command has options of a key where none can be used."""
    if _has_options(new):
        name, value = _first_option(new)
        raise InvalidCommandError(
            f"{name} ({names.shown(value)}) is for commands that are sent one by one: use bus.send"
        )


def _has_options(new: NewCommand) -> bool:
    return not (
        new.unique is None
        and new.unique_while is None
        and new.on_conflict is None
        and new.debounce is None
        and new.max_delay is None
    )


def _first_option(new: NewCommand) -> tuple[str, object]:
    return next((name, value) for name in _OPTIONS if (value := getattr(new, name)) is not None)


def _once(new: NewCommand) -> UniqueRule:
    key = names.to_new_id(new.unique, "unique")
    if new.max_delay is not None:
        raise InvalidCommandError(f"max_delay ({names.shown(new.max_delay)}) needs debounce")
    on_conflict: OnConflict = "ignore" if new.on_conflict is None else new.on_conflict
    if on_conflict not in ON_CONFLICT:
        raise InvalidCommandError(
            f"on_conflict must be one of {', '.join(ON_CONFLICT)}, not {names.shown(on_conflict)}"
        )
    match new.unique_while:
        case None | "unfinished":
            return UniqueRule(key, "unfinished", None, on_conflict)
        case "waiting":
            return UniqueRule(key, "waiting", None, on_conflict)
        case window:
            return UniqueRule(key, "window", _window(window), on_conflict)


def _window(value: Duration) -> float:
    name = "unique_while ('waiting', 'unfinished' or a duration)"
    seconds = parse_seconds(value, name=name, error=InvalidCommandError)
    if not seconds:
        raise InvalidCommandError("unique_while must be longer than 0")
    return seconds


def _debounced(new: NewCommand, debounce: Duration) -> UniqueRule:
    for name in ("unique_while", "on_conflict", "delay", "at"):
        if (value := getattr(new, name)) is not None:
            raise InvalidCommandError(
                f"{name} ({names.shown(value)}) cannot be given with debounce, which decides that; leave it out"
            )
    window = parse_seconds(debounce, name="debounce", error=InvalidCommandError)
    if not window:
        raise InvalidCommandError("debounce must be longer than 0")
    most = window * DEFAULT_WINDOWS
    if new.max_delay is not None:
        most = parse_seconds(new.max_delay, name="max_delay", error=InvalidCommandError)
    if most < window:
        raise InvalidCommandError(
            f"max_delay ({names.shown(new.max_delay)}) must not be shorter than debounce ({names.shown(debounce)})"
        )
    return UniqueRule(names.to_new_id(new.unique, "unique"), "waiting", None, "replace", most)
