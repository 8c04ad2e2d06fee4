"""JSON in the signatures of the public API: what goes in, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeAlias
from uuid import UUID


class DataclassObject(Protocol):
    """An object of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class PydanticObject(Protocol):
    """An object of a pydantic model."""

    def model_dump_json(self) -> str:
        """As JSON text."""


class StructObject(Protocol):
    """An object of a msgspec struct."""

    __struct_fields__: ClassVar[tuple[str, ...]]


PayloadObject: TypeAlias = DataclassObject | PydanticObject | StructObject
"""An object that is sent as its fields."""

_Object: TypeAlias = date | time | timedelta | UUID | Decimal | Enum | PayloadObject
JsonValue: TypeAlias = "bool | int | float | str | _Object | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
"""What can be sent as JSON. Objects are dicts whose keys are text, dataclasses, pydantic models and msgspec
structs; arrays are lists or tuples. Dates, UUIDs, Decimals and enums are sent as text (`model/to_json.py`)."""

Json: TypeAlias = Any
"""A JSON value that comes out. Type checkers let you index it, as they do with what `json.loads` returns."""
