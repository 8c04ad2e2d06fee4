"""Durations as people write them, and as they read them.

`parse_seconds` is the only parser: it turns what stands in an argument, a command-line option, an environment
variable or a TOML file into seconds. `format_seconds` turns seconds into what a person reads. The invariant: a
parsed duration is a finite number from 0 to ten years, and `parse_seconds(format_seconds(s))` is `s` to the
millisecond.

What a setting *means* (whether 0 is allowed, what it must be shorter than) is not decided here; see
`model/timeouts.py` and `settings.py`.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

Duration: TypeAlias = str | int | float | timedelta
"""Seconds (25, 0.5), text with units ("500ms", "25s", "2m", "1h", "1d", "1m30s"), or a timedelta."""

LONGEST_SECONDS: Final = 10 * 365.25 * 86_400.0
"""Ten years. Anything longer is a mistake of units, and PostgreSQL's intervals would soon be out of range."""

ACCEPTED: Final = "give seconds (25, 0.5) or numbers with units: 500ms, 25s, 2m, 1h, 1d, 1m30s"

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_PLAIN = re.compile(_NUMBER, re.ASCII)
# Largest unit first and each at most once; the look-ahead keeps `5ms` from being read as five minutes.
_WITH_UNITS = re.compile(
    rf"(?:{_NUMBER}\s*d\s*)?(?:{_NUMBER}\s*h\s*)?(?:{_NUMBER}\s*m(?!s)\s*)?(?:{_NUMBER}\s*s\s*)?(?:{_NUMBER}\s*ms)?",
    re.ASCII,
)
_UNIT_SECONDS: Final = (86_400.0, 3_600.0, 60.0, 1.0, 0.001)
_LONGEST_TEXT: Final = 64
_CLOCK: Final = re.compile(r"until \d\d:\d\d:\d\d \(in about ([^()]+)\)")


def parse_seconds(value: Duration, *, name: str, error: type[ValueError] = ValueError) -> float:
    """Returns the duration in seconds. Raises `error` with the parameter, the value and what is accepted."""
    seconds = _to_seconds(value)
    if seconds is None or math.isnan(seconds):
        raise error(f"{name}: {_shown(value)} is not a duration; {ACCEPTED}")
    if seconds < 0:
        raise error(f"{name}: {_shown(value)} is negative; {ACCEPTED}")
    if seconds > LONGEST_SECONDS:
        raise error(f"{name}: {_shown(value)} is longer than ten years; {ACCEPTED}")
    return seconds + 0.0  # -0.0 becomes 0.0


def format_seconds(seconds: float) -> str:
    """`1m30s`, `25s`, `500ms`; rounded to the millisecond, below one second to the microsecond."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if round(seconds, 6) < 1:
        return f"{_plain(seconds * 1000)}ms" if round(seconds, 6) else "0s"
    minutes, rest_ms = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = ((days, "d"), (hours, "h"), (minutes, "m"))
    text = "".join(f"{count}{unit}" for count, unit in parts if count)
    return text + f"{_plain(rest_ms / 1000)}s" if rest_ms else text


def in_utc(moment: datetime) -> str:
    """A moment, to the second, for texts that people in several time zones read."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def without_clock(text: str) -> str:
    """A sentence for somebody in another time zone: "until 12:03:07 (in about 14 s)" is "for about 14 s"."""
    return _CLOCK.sub(r"for about \1", text)


def without_moment(text: str) -> str:
    """The same sentence where the moment is said already: "until 12:03:07 (in about 14 s): 429" is "429"."""
    return _CLOCK.sub("", text).removeprefix(": ")


def roughly(seconds: float) -> str:
    """A time that nobody knows exactly, in a sentence: `14 s`, `2m10s`, `3h5m`; a second at least."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    unit = 1 if whole < 3600 else 60 if whole < 86_400 else 3600
    return format_seconds(round(whole / unit) * unit)


def _to_seconds(value: object) -> float | None:
    match value:
        case bool():
            return None
        case int():
            # Compared before the conversion: float() of a huge int is an OverflowError.
            if abs(value) > LONGEST_SECONDS:
                return math.inf if value > 0 else -math.inf
            return float(value)
        case float():
            return value
        case timedelta():
            return value.total_seconds()
        case str() if len(value) <= _LONGEST_TEXT:
            text = value.strip()
            magnitude = _text_to_seconds(text.removeprefix("-"))
            return -magnitude if magnitude is not None and text.startswith("-") else magnitude
        case _:
            return None


def _text_to_seconds(text: str) -> float | None:
    if _PLAIN.fullmatch(text):
        return float(text)
    matched = _WITH_UNITS.fullmatch(text)
    if not text or matched is None:
        return None
    counts = zip(matched.groups(), _UNIT_SECONDS, strict=True)
    return math.fsum(float(count) * unit for count, unit in counts if count)


def _plain(number: float) -> str:
    return f"{number:.3f}".rstrip("0").rstrip(".")


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) > 10**18:
        return "a number of more than 18 digits"  # repr() of a very large int is an error of its own
    text = repr(value)
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"
