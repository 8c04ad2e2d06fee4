"""The kinds of values that settings have: what each accepts, the error for other values, and how it is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from commandbus.model.durations import Duration, format_seconds, parse_seconds
from commandbus.model.mask import parse_rules
from commandbus.model.names import check_domain
from commandbus.quick_dataclass import dataclass
from commandbus.settings.secrets import (
    POSTGRES_URL,
    conninfo_parts,
    is_embedded,
    mask_database_url,
    mask_redis_url,
    redis_parts,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """`parse(value, name)` raises a ValueError that names the setting and the value (but never a secret).
    `parse(show(v)) == v`."""

    parse: Callable[[object, str], Any]
    show: Callable[[Any], str] = str
    is_duration: bool = False


def or_word(kind: Kind, *words: str) -> Kind:
    """The same kind, with a word that stands for None (in TOML also `false`, if the word is `off`)."""

    def parse(value: object, name: str) -> Any:
        if value is False and "off" in words:
            return None
        if isinstance(value, str) and value.strip().lower() in words:
            return None
        try:
            return kind.parse(value, name)
        except ValueError as error:
            also = "" if words[0] == "unset" else f", or {words[0]!r}"
            raise ValueError(f"{error}{also}") from None

    return Kind(parse, lambda value: words[0] if value is None else kind.show(value), kind.is_duration)


def whole(lowest: int, highest: int = 10**12) -> Kind:
    def parse(value: object, name: str) -> int:
        if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value.strip(), re.ASCII):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise ValueError(
                f"{name}: {shown(value)} is not accepted; give a whole number from {lowest} to {highest}"
            )
        return value

    return Kind(parse)


def fraction() -> Kind:
    def parse(value: object, name: str) -> float:
        if isinstance(value, str) and re.fullmatch(r"\d*\.?\d+", value.strip(), re.ASCII):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"{name}: {shown(value)} is not accepted; give a number from 0 to 1")
        return float(value)

    return Kind(parse)


def duration(*, zero: bool = True) -> Kind:
    def parse(value: object, name: str) -> float:
        seconds = parse_seconds(cast(Duration, value), name=name)  # it refuses a value that is not a Duration
        if not zero and not seconds:
            raise ValueError(f"{name}: {shown(value)} is not accepted; give a duration of more than 0")
        return seconds

    return Kind(parse, format_seconds, is_duration=True)


def durations() -> Kind:
    def parse(value: object, name: str) -> tuple[float, ...]:
        seconds = tuple(duration().parse(item, name) for item in items(value, name))
        if not seconds:
            raise ValueError(f"{name}: {shown(value)} is empty; give durations such as 10s,60s,300s")
        return seconds

    return Kind(parse, lambda value: ",".join(map(format_seconds, value)), is_duration=True)


def domain_names() -> Kind:
    def parse(value: object, name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(check_domain(item) for item in items(value, name)))

    return Kind(parse, ",".join)


def mask_rules() -> Kind:
    def parse(value: object, name: str) -> tuple[str, ...]:
        try:
            return parse_rules(items(value, name))
        except ValueError as error:
            raise ValueError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from None

    return Kind(parse, ",".join)


_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0"})


def truth() -> Kind:
    def parse(value: object, name: str) -> bool:
        word = str(value).strip().lower() if isinstance(value, str | bool) else ""
        if word not in _TRUE | _FALSE:
            raise ValueError(f"{name}: {shown(value)} is not accepted; give true or false")
        return word in _TRUE

    return Kind(parse, lambda value: "true" if value else "false")


_BYTE_UNITS: Final = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1, "": 1}
_MAX_JSONB_BYTES: Final = 255 * 2**20  # PostgreSQL refuses a jsonb value whose parts exceed 2^28 - 1 bytes


def byte_size(most: int = _MAX_JSONB_BYTES) -> Kind:
    def parse(value: object, name: str) -> int:
        text = value.strip() if isinstance(value, str) else shown(value)
        matched = re.fullmatch(r"(\d{1,12})\s*([KMG]iB|B|)", text, re.ASCII)
        size = int(matched[1]) * _BYTE_UNITS[matched[2]] if matched else 0
        if not 1 <= size <= most:
            raise ValueError(
                f"{name}: {shown(value)} is not accepted; give bytes (1048576) or a size with a unit "
                f"(512KiB, 1MiB), at most {most // 2**20}MiB"
            )
        return size

    def show(size: int) -> str:
        unit = next(unit for unit, factor in _BYTE_UNITS.items() if size % factor == 0)
        return f"{size // _BYTE_UNITS[unit]}{unit}"

    return Kind(parse, show)


def choice(*choices: str) -> Kind:
    def parse(value: object, name: str) -> str:
        for choice in choices:
            if isinstance(value, str) and value.strip().lower() == choice.lower():
                return choice
        raise ValueError(f"{name}: {shown(value)} is not accepted; give one of {', '.join(choices)}")

    return Kind(parse)


def pattern(pattern: str, accepted: str) -> Kind:
    def parse(value: object, name: str) -> str:
        if isinstance(value, str) and re.fullmatch(pattern, value.strip()):
            return value.strip()
        raise ValueError(f"{name}: {shown(value)} is not accepted; give {accepted}")

    return Kind(parse)


def database_url() -> Kind:
    def parse(value: object, name: str) -> str:
        text = _clean_secret(value, name)
        if is_embedded(text) or (text and conninfo_parts(text) is not None):
            return text
        raise ValueError(
            f"{name} (not shown, as it may hold a password) is not a database{_database_hint(text)}; give "
            f"postgresql://user:password@host:5432/name, 'host=… dbname=…', 'embedded' or 'embedded:FOLDER'"
        )

    return Kind(parse, mask_database_url)


def redis_url() -> Kind:
    def parse(value: object, name: str) -> str:
        text = _clean_secret(value, name)
        if redis_parts(text):
            return text
        raise ValueError(
            f"{name} (not shown, as it may hold a password) is not a Redis URL: give redis://host:6379/0, "
            f"rediss://… or unix://…, with special characters in a password percent-encoded"
        )

    return Kind(parse, mask_redis_url)


def _database_hint(text: str) -> str:
    import difflib

    if difflib.get_close_matches(text.lower(), ["embedded"]):
        return ": did you mean 'embedded'?"
    if text.startswith(("postgresql+", "postgres+")):
        return ": leave out the driver's name, postgresql://… instead of postgresql+driver://…"
    if POSTGRES_URL.match(text):
        return ": special characters in a URL must be percent-encoded (@ is %40, / is %2F)"
    return ""


def _clean_secret(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, not {type(value).__name__}")  # noqa: TRY004 - one kind of error
    if re.search(r"[\x00-\x1f\x7f]", value.strip()):
        raise ValueError(f"{name} (not shown, as it may hold a password) contains a control character")
    return value.strip()


def items(value: object, name: str) -> Sequence[object]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    if isinstance(value, list | tuple):
        return value
    raise ValueError(f"{name}: {shown(value)} is not accepted; give a list, or text with commas between its items")


def shown(value: object) -> str:
    if isinstance(value, int) and abs(value) > 10**18:
        return "a number of more than 18 digits"  # repr() of a very large int raises an error
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
