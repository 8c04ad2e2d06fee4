"""Types that describe a payload: pydantic models, dataclasses, TypedDicts and msgspec structs.

`reader_of(annotation)` makes what reads a payload as such a type, once. pydantic and msgspec read their own types,
from the JSON text, by their own rules. Everything else is read by `model/payload_reading.py`, so that the result
does not depend on what is installed. Nothing is imported here: a program that has such a class has imported its
package.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, Union

from commandbus.errors import InvalidPayloadError
from commandbus.model import names
from commandbus.model.command import Command

MOST_PROBLEMS = 20
_MOST_IN_TEXT = 3
_LONGEST_VALUE = 100


class Problem(NamedTuple):
    """What is wrong with a payload, and where: ("items", 3, "price") is data.items[3].price."""

    path: tuple[str | int, ...]
    text: str
    value: object = dataclasses.MISSING

    def below(self, *path: str | int) -> Problem:
        """The same, seen from further up."""
        return self._replace(path=(*path, *self.path))

    def __str__(self) -> str:
        said = "" if self.value is dataclasses.MISSING else f", not {names.shown(self.value)[:_LONGEST_VALUE]}"
        return f"{path_text(self.path)}: {self.text}{said}"


class MismatchError(ValueError):
    """A value does not fit its type."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__()
        self.problems = problems


Reader = Callable[[Any], Any]
"""Makes an object of a parsed JSON value, or raises MismatchError."""


def path_text(path: Sequence[str | int]) -> str:
    """data.items[3].price"""
    return "data" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)


def read_payload(read: Reader, data: object, annotation: object) -> Any:
    """The payload as its type; InvalidPayloadError says what is wrong, and where."""
    try:
        return read(data)
    except MismatchError as error:
        problems = error.problems
    except RecursionError:
        problems = (Problem((), "is nested too deeply"),)
    said = "; ".join(str(problem) for problem in problems[:_MOST_IN_TEXT])
    if len(problems) > _MOST_IN_TEXT:
        said += f"; and {len(problems) - _MOST_IN_TEXT} more"
    details = [{"path": path_text(problem.path), "problem": problem.text} for problem in problems[:MOST_PROBLEMS]]
    raise InvalidPayloadError(f"the payload is not a valid {name_of(annotation)}: {said}", details=details)


def is_payload_type(annotation: object) -> bool:
    """Does it describe a payload: one of the four kinds, Annotated, or a union of them?"""
    kind = bare(annotation)
    if is_union(kind):
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        return bool(members) and all(is_payload_type(member) for member in members)
    return is_pydantic(kind) or is_struct(kind) or is_dataclass(kind) or is_typed_dict(kind)


def bare(annotation: Any) -> Any:
    """The type inside Annotated, Required, a type alias or a NewType."""
    while True:
        origin = typing.get_origin(annotation)
        if origin is Annotated or origin in _QUALIFIERS:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        else:
            return annotation


_QUALIFIERS = tuple(
    found
    for name in ("Required", "NotRequired", "ReadOnly", "Final", "ClassVar")
    if (found := getattr(typing, name, None)) is not None
)


def is_union(kind: object) -> bool:
    return typing.get_origin(kind) in (Union, types.UnionType)


def is_all(annotation: object, test: Callable[[object], bool]) -> bool:
    """Is it a type of this family, or a union of such types? Then the family reads it as a whole."""
    kind = bare(annotation)
    members = typing.get_args(kind) if is_union(kind) else (kind,)
    others = [bare(member) for member in members if member is not type(None)]
    return bool(others) and all(test(member) for member in others)


def is_pydantic(kind: object) -> bool:
    """A model of pydantic 2, or one of its dataclasses."""
    return isinstance(kind, type) and hasattr(kind, "__pydantic_validator__")


def is_struct(kind: object) -> bool:
    return isinstance(kind, type) and hasattr(kind, "__struct_fields__") and "msgspec" in sys.modules


def is_dataclass(kind: object) -> bool:
    """A dataclass, perhaps with parameters (`Box[int]`), but not our own Command."""
    kind = typing.get_origin(kind) or kind
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and not issubclass(kind, Command)


def is_typed_dict(kind: object) -> bool:
    kind = typing.get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, dict) and hasattr(kind, "__total__")


def name_of(annotation: object) -> str:
    """A type's name, for people."""
    kind = bare(annotation)
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
