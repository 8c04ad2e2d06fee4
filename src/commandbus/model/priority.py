"""Priorities: what senders write, and the number that a command's row and its message have."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

Priority: TypeAlias = Literal["high", "normal", "low"]
PRIORITIES: Final[tuple[Priority, ...]] = ("high", "normal", "low")
HIGH: Final = 1
NORMAL: Final = 0
LOW: Final = -1

_NUMBERS: Final = {"high": HIGH, "normal": NORMAL, "low": LOW}
_NAMES: Final[dict[int, Priority]] = {HIGH: "high", NORMAL: "normal", LOW: "low"}


def to_number(value: object, error: type[Exception] = ValueError) -> int | None:
    """Returns the number that is stored; None if nobody said. Raises an error that names a bad value."""
    if value is None:
        return None
    if not isinstance(value, str) or value not in _NUMBERS:
        raise error(f'priority must be "high", "normal" or "low", not {value!r:.80}')
    return _NUMBERS[value]


def name_of(number: int | None) -> Priority:
    """Returns the priority that a stored number means."""
    return "normal" if number is None else _NAMES.get(number, "normal")
