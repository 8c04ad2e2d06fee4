"""The JSON Schema (draft 2020-12) of a type that describes a payload.

pydantic and msgspec describe their own types. For everything else the schema says what `payload_reading.py`
accepts. Types with fields are in `$defs`, so that one may contain itself.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Literal, TypeVar
from uuid import UUID

from commandbus.errors import InvalidCommandError
from commandbus.model import payload
from commandbus.model.payload_reading import ARRAYS, OBJECTS, hints_of, is_required_key
from commandbus.model.payload_types import (
    bare,
    is_all,
    is_dataclass,
    is_pydantic,
    is_struct,
    is_typed_dict,
    is_union,
)
from commandbus.model.to_json import to_json

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_REF = "#/$defs/"
_DECIMAL = r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"
Schema = dict[str, Any]


def schema_of(annotation: Any) -> Schema:
    """The JSON Schema of a type."""
    making = _Making()
    made = making.of(annotation)
    return {"$schema": DRAFT, **made, **({"$defs": making.defs} if making.defs else {})}


_SIMPLE: dict[Any, Schema] = {
    Any: {},
    object: {},
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    None: {"type": "null"},
    type(None): {"type": "null"},
    datetime: {"type": "string", "format": "date-time"},
    date: {"type": "string", "format": "date"},
    time: {"type": "string", "format": "time"},
    timedelta: {"type": "string", "format": "duration"},
    UUID: {"type": "string", "format": "uuid"},
    Decimal: {"anyOf": [{"type": "string", "pattern": _DECIMAL}, {"type": "number"}]},
}


class _Making:
    """One schema, and the definitions that its parts share."""

    def __init__(self) -> None:
        self.defs: dict[str, Schema] = {}
        self._names: dict[Any, str] = {}

    def of(self, annotation: Any) -> Schema:
        """The schema of a type inside this one."""
        if is_all(annotation, is_pydantic):
            return self._of_pydantic(annotation)
        kind = bare(annotation)
        if is_struct(kind):
            return self._of_struct(kind)
        if kind in _SIMPLE:
            return dict(_SIMPLE[kind])
        if is_union(kind):
            return {"anyOf": [self.of(member) for member in typing.get_args(kind)]}
        if typing.get_origin(kind) is Literal:
            return {"enum": [to_json(value) for value in typing.get_args(kind)]}
        if isinstance(kind, type) and issubclass(kind, Enum):
            return {"enum": [to_json(member.value) for member in kind]}
        if is_dataclass(kind) or is_typed_dict(kind):
            return self._of_fields(typing.get_origin(kind) or kind)
        if isinstance(kind, TypeVar):
            return self.of(kind.__bound__ or Any)
        return self._of_container(typing.get_origin(kind) or kind, typing.get_args(kind))

    def _of_container(self, origin: Any, parameters: tuple[Any, ...]) -> Schema:
        if origin is tuple and parameters and parameters[-1] is not Ellipsis:
            count = len(parameters)
            items = [self.of(each) for each in parameters]
            return {"type": "array", "prefixItems": items, "minItems": count, "maxItems": count}
        if origin is tuple or origin in ARRAYS:
            return {"type": "array", "items": self.of(parameters[0] if parameters else Any)}
        if origin in OBJECTS:
            key, item = parameters or (str, Any)
            names = {"propertyNames": {"pattern": r"^-?\d+$"}} if bare(key) is int else {}
            return {"type": "object", "additionalProperties": self.of(item), **names}
        return {}

    def _of_fields(self, kind: Any) -> Schema:
        if kind not in self._names:
            self._names[kind] = name = self._free_name(kind)
            self.defs[name] = {}  # one that contains itself refers to it
            self.defs[name] = self._fields(kind)
        return {"$ref": _REF + self._names[kind]}

    def _free_name(self, kind: Any) -> str:
        own = kind.__name__
        return own if own not in self.defs else f"{kind.__module__}.{kind.__qualname__}"

    def _fields(self, kind: Any) -> Schema:
        hints = hints_of(kind)
        if is_typed_dict(kind):
            properties = {name: self.of(hint) for name, hint in hints.items()}
            required = [name for name, hint in hints.items() if is_required_key(kind, name, hint)]
        else:
            fields = dataclasses.fields(kind)
            properties = {field.name: self.of(hints[field.name]) | _default(field) for field in fields}
            required = [field.name for field in fields if field.init and not _has_default(field)]
        more = {"required": required} if required else {}
        return {
            "title": kind.__name__,
            "type": "object",
            "properties": properties,
            **more,
            "additionalProperties": False,
        }

    def _of_pydantic(self, kind: Any) -> Schema:
        adapter = sys.modules["pydantic"].TypeAdapter(kind)
        made: Schema = adapter.json_schema(ref_template=_REF + "{model}")
        self.defs |= made.pop("$defs", {})
        return made

    def _of_struct(self, kind: Any) -> Schema:
        msgspec: Any = sys.modules["msgspec"]
        (made,), parts = msgspec.json.schema_components([kind], ref_template=_REF + "{name}")
        self.defs |= parts
        return dict(made)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _default(field: dataclasses.Field[Any]) -> Schema:
    if field.default is dataclasses.MISSING:
        return {}
    try:
        return {"default": payload.loads(payload.dump(field.default, what="default"))}
    except InvalidCommandError:
        return {}
