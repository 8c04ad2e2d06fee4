"""Payloads that pydantic and msgspec read: their own types, from the JSON text, by their own rules.

From text, because their strict modes allow text for a date only there. A program that has such a class has
imported its package, so nothing is imported here.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any

from commandbus.errors import ConfigurationError
from commandbus.model import payload
from commandbus.model.payload_types import MismatchError, Problem, Reader, is_union, name_of


def pydantic_reader(kind: Any) -> Reader:
    """Reads a pydantic type, or a union of them, by pydantic's rules for JSON."""
    pydantic: Any = sys.modules["pydantic"]
    try:
        adapter = pydantic.TypeAdapter(kind)
    except pydantic.errors.PydanticUserError as error:
        raise ConfigurationError(f"pydantic cannot read {name_of(kind)}: {str(error).splitlines()[0]}") from None

    def read(value: Any) -> Any:
        try:
            return adapter.validate_json(payload.compact(value))
        except pydantic.ValidationError as error:
            found = error.errors(include_url=False, include_context=False)
        raise MismatchError(*(_of_pydantic_error(each) for each in found))

    return read


def _of_pydantic_error(error: Any) -> Problem:
    value = dataclasses.MISSING if error["type"] in ("missing", "extra_forbidden") else error["input"]
    return Problem(tuple(error["loc"]), error["msg"], value)


_PLACE = re.compile(r" - at `\$?(.*)`\Z", re.DOTALL)
_PART = re.compile(r"\.([^.\[]+)|\[(\d+)\]|\[\.\.\.\]")


def struct_reader(kind: Any) -> Reader | None:
    """Reads a struct, or a union of them, by msgspec's rules for JSON. None for a union of structs without tags,
    which msgspec cannot tell apart."""
    msgspec: Any = sys.modules["msgspec"]
    try:
        decode = msgspec.json.Decoder(kind).decode
    except TypeError as error:
        if is_union(kind):
            return None
        raise ConfigurationError(f"msgspec cannot read {name_of(kind)}: {error}") from None

    def read(value: Any) -> Any:
        try:
            return decode(payload.compact(value).encode())
        except msgspec.ValidationError as error:
            said = str(error)
        place = _PLACE.search(said)
        parts = _PART.finditer(place[1]) if place else ()
        path = tuple(part[1] or (int(part[2]) if part[2] else "…") for part in parts)
        raise MismatchError(Problem(path, _PLACE.sub("", said)))

    return read
