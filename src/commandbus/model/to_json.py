"""Objects that JSON has no form for, as JSON: what `payload.dump` does when a value is not plain JSON.

    datetime, date, time     ISO 8601 text               Enum         its value
    timedelta                ISO 8601 text ("PT1.5S")    dataclass    an object with its fields
    UUID, Decimal            text                        pydantic model, msgspec struct: as they say themselves

For every other type there is the application's own function (`json_default`), or a refusal with advice. Sets are
refused because they have no order: the same command would have another text the next time. pydantic and msgspec
are never imported here: a program that has such an object has imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

JsonDefault = Callable[[Any], Any]
_LEAVES = frozenset({str, int, float, bool, type(None)})


def to_json(value: Any, default: JsonDefault | None = None) -> Any:
    """The value with everything in it that can be JSON made so; what cannot stays as it is."""
    if type(value) in _LEAVES:
        return value
    if isinstance(value, Enum):
        return to_json(value.value, default)
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, dict | Mapping):
        return {key: to_json(item, default) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item, default) for item in value]
    if isinstance(value, type):
        return value
    return _object(value, default)


def _object(value: Any, default: JsonDefault | None) -> Any:
    for kind, encode in _ENCODERS:
        if isinstance(value, kind):
            return encode(value)
    cls = type(value)
    if hasattr(cls, "__pydantic_serializer__"):
        return cls.__pydantic_serializer__.to_python(value, mode="json", by_alias=True, fallback=default)
    if hasattr(cls, "__struct_fields__") and "msgspec" in sys.modules:
        builtins = sys.modules["msgspec"].to_builtins(value, str_keys=True, enc_hook=default)
        return to_json(builtins, default)
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name), default) for field in fields(value)}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview | range):
        return [to_json(item, default) for item in value]
    return value if default is None else _by_application(value, default)


def _by_application(value: Any, default: JsonDefault) -> Any:
    made = default(value)
    return made if made is value else to_json(made, default)


def _decimal(value: Decimal) -> Any:
    return str(value) if value.is_finite() else value


def duration_text(value: timedelta) -> str:
    """ISO 8601: PT1.5S, P2DT3S, -PT1S."""
    if value < timedelta(0):
        return "-" + duration_text(-value)
    days = f"{value.days}D" if value.days else ""
    rest = value - timedelta(days=value.days)
    if not rest and days:
        return "P" + days
    fraction = f".{rest.microseconds:06d}".rstrip("0") if rest.microseconds else ""
    return f"P{days}T{rest.seconds}{fraction}S"


_ENCODERS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (datetime, datetime.isoformat),
    (date, date.isoformat),
    (time, time.isoformat),
    (timedelta, duration_text),
    (UUID, str),
    (Decimal, _decimal),
)


def advice(value: object) -> str:
    """What to do about a value that JSON has no form for."""
    if isinstance(value, float):
        return "JSON has no NaN and no infinity: send null or text instead"
    if isinstance(value, Decimal):
        return "JSON has no NaN and no infinity: send null or text instead"
    if isinstance(value, bytes | bytearray | memoryview):
        return "make it text: base64.b64encode(value).decode(), or value.decode() if it is text"
    if isinstance(value, set | frozenset):
        return "a set has no order: send sorted(value)"
    if isinstance(value, PurePath):
        return "send str(path)"
    if isinstance(value, type):
        return f"that is the class itself: send an instance, {value.__name__}(…)"
    if isinstance(value, int):
        return "the number is too long: send it as text"
    return (
        "send what JSON knows (dict, list, str, int, float, bool, None), make it a dataclass, or tell the bus how "
        "to encode it: CommandBus(json_default=…), and HandlerRegistry(json_default=…) for results"
    )
