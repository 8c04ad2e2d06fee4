"""Reads parsed JSON as Python types: what `payload_types.py` does not leave to pydantic or msgspec.

A reader is made of readers: `reader_of(list[Item])` reads each element with the reader of Item. It is strict where
JSON is clear (no text for a number, no bool for an int) and converts what JSON has no type for: dates, UUIDs,
Decimals and enums are text, tuples and sets are arrays. Objects must have all required fields and no unknown ones.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import re
import typing
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any, Literal, TypeVar
from uuid import UUID

from commandbus.errors import ConfigurationError
from commandbus.model import payload
from commandbus.model.payload_packages import pydantic_reader, struct_reader
from commandbus.model.payload_types import (
    MismatchError,
    Problem,
    Reader,
    bare,
    is_all,
    is_dataclass,
    is_pydantic,
    is_struct,
    is_typed_dict,
    is_union,
    name_of,
)
from commandbus.model.to_json import to_json

_made: dict[Any, Reader] = {}


def reader_of(annotation: Any) -> Reader:
    """What reads a parsed JSON value as this type. ConfigurationError if it describes no JSON."""
    kind = annotation if is_all(annotation, is_pydantic) else bare(annotation)
    try:
        if (known := _made.get(kind)) is not None:
            return known
    except TypeError:  # not hashable
        return _make(kind)
    # One that contains itself finds this one while it is made.
    _made[kind] = lambda value: _made[kind](value)  # noqa: PLW0108 - looked up when it is called
    try:
        _made[kind] = made = _make(kind)
    except BaseException:
        del _made[kind]
        raise
    return made


def _make(kind: Any) -> Reader:
    if is_all(kind, is_pydantic):
        return pydantic_reader(kind)
    if is_all(kind, is_struct) and (made := struct_reader(kind)) is not None:
        return made
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if is_union(kind):
        return _of_union(kind)
    if typing.get_origin(kind) is Literal:
        return _of_choices([(to_json(value), value) for value in typing.get_args(kind)])
    if is_dataclass(kind):
        return _of_dataclass(typing.get_origin(kind) or kind)
    if is_typed_dict(kind):
        return _of_typed_dict(typing.get_origin(kind) or kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _of_choices([(to_json(member.value), member) for member in kind])
    if isinstance(kind, TypeVar):
        return reader_of(kind.__bound__ or Any)
    return _of_container(kind)


# --- leaves ---------------------------------------------------------------------------------------------------


def _wrong(text: str, value: object) -> MismatchError:
    return MismatchError(Problem((), text, value))


def _of_class(kinds: tuple[type, ...], text: str) -> Reader:
    def read(value: Any) -> Any:
        if type(value) in kinds:
            return value
        raise _wrong(f"must be {text}", value)

    return read


def _float(value: Any) -> float:
    if type(value) in (int, float):
        return float(value)
    raise _wrong("must be a number", value)


def _of_text(parse: Callable[[str], Any], text: str) -> Reader:
    def read(value: Any) -> Any:
        if isinstance(value, str):
            try:
                return parse(value)
            except (ValueError, InvalidOperation):
                pass
        raise _wrong(f"must be {text}", value)

    return read


def _decimal(value: Any) -> Decimal:
    if type(value) in (str, int, float):
        try:
            made = Decimal(str(value))
        except InvalidOperation:
            made = Decimal("NaN")
        if made.is_finite():
            return made
    raise _wrong("must be a decimal number, as text or as a number", value)


_DURATION = re.compile(
    r"(-)?P(?!\Z)(?:(\d+)W)?(?:(\d+)D)?(?:T(?!\Z)(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?\Z", re.ASCII
)


def _duration(text: str) -> timedelta:
    found = _DURATION.match(text)
    if found is None:
        raise ValueError(text)
    sign, weeks, days, hours, minutes, seconds = found.groups()
    try:
        made = timedelta(
            weeks=int(weeks or 0),
            days=int(days or 0),
            hours=int(hours or 0),
            minutes=int(minutes or 0),
            seconds=float(seconds or 0),
        )
    except OverflowError:
        raise ValueError(text) from None
    return -made if sign else made


def _anything(value: Any) -> Any:
    return value


_SIMPLE: dict[Any, Reader] = {
    Any: _anything,
    object: _anything,
    str: _of_class((str,), "text"),
    int: _of_class((int,), "a whole number"),
    float: _float,
    bool: _of_class((bool,), "true or false"),
    type(None): _of_class((type(None),), "null"),
    None: _of_class((type(None),), "null"),
    datetime: _of_text(datetime.fromisoformat, "a date and time in ISO 8601, such as 2026-01-31T12:00:00Z"),
    date: _of_text(date.fromisoformat, "a date in ISO 8601, such as 2026-01-31"),
    time: _of_text(time.fromisoformat, "a time in ISO 8601, such as 12:00:00"),
    timedelta: _of_text(_duration, "a duration in ISO 8601, such as PT90S"),
    UUID: _of_text(UUID, "a UUID"),
    Decimal: _decimal,
}


def _of_choices(choices: list[tuple[Any, Any]]) -> Reader:
    """A Literal or an Enum. 1 and true are equal in Python, and not in JSON."""
    known = {(type(plain), plain): value for plain, value in choices if not isinstance(plain, dict | list)}
    shown = ", ".join(payload.dump(plain, what="choice") for _, plain in known)
    text = f"must be one of {shown}"[:300]

    def read(value: Any) -> Any:
        try:
            return known[type(value), value]
        except (KeyError, TypeError):
            raise _wrong(text, value) from None

    return read


# --- containers -------------------------------------------------------------------------------------------------

ARRAYS: dict[Any, Callable[[Iterable[Any]], Any]] = {
    list: list,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Iterable: list,
    collections.abc.Collection: list,
    collections.abc.Set: frozenset,
    collections.abc.MutableSet: set,
}
OBJECTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def _of_container(kind: Any) -> Reader:
    origin, parameters = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is tuple:
        return _of_tuple(parameters)
    if origin in ARRAYS:
        return _of_array(ARRAYS[origin], reader_of(parameters[0] if parameters else Any))
    if origin in OBJECTS:
        key, item = parameters or (str, Any)
        return _of_mapping(_of_key(key), reader_of(item))
    raise ConfigurationError(
        f"the type {name_of(kind)} has no form in JSON that is known here; use a type that has (str, int, list, a "
        f"dataclass, datetime, …), or a pydantic model"
    )


def _array(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    raise _wrong("must be an array", value)


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise _wrong("must be an object", value)


def _each(pairs: Iterable[tuple[str | int, Any]], read: Reader) -> Iterable[Any]:
    for place, item in pairs:
        try:
            yield read(item)
        except MismatchError as error:
            raise MismatchError(*(problem.below(place) for problem in error.problems)) from None


def _of_array(make: Callable[[Iterable[Any]], Any], read: Reader) -> Reader:
    return lambda value: make(list(_each(enumerate(_array(value)), read)))


def _of_tuple(parameters: tuple[Any, ...]) -> Reader:
    if not parameters or parameters[-1] is Ellipsis:
        return _of_array(tuple, reader_of(parameters[0] if parameters else Any))
    readers = [reader_of(each) for each in parameters]

    def read(value: Any) -> Any:
        if len(_array(value)) != len(readers):
            raise _wrong(f"must have {len(readers)} elements", value)
        found: list[Any] = []
        for place, (item, reader) in enumerate(zip(value, readers, strict=True)):
            found += _each([(place, item)], reader)
        return tuple(found)

    return read


def _of_key(kind: Any) -> Reader:
    """A key of a JSON object is text; it may stand for a number."""
    if bare(kind) is int:
        return _of_text(int, "a whole number, as the key")
    return reader_of(kind)


def _of_mapping(key: Reader, read: Reader) -> Reader:
    def made(value: Any) -> Any:
        pairs = _object(value)
        keys = _each(((name, name) for name in pairs), key)
        return dict(zip(keys, _each(pairs.items(), read), strict=True))

    return made


def _of_union(kind: Any) -> Reader:
    members = typing.get_args(kind)
    others = [member for member in members if member is not type(None)]
    readers = [reader_of(member) for member in others]

    def read(value: Any) -> Any:
        if value is None and len(others) < len(members):
            return None
        refused: list[MismatchError] = []
        for reader in readers:
            try:
                return reader(value)
            except MismatchError as error:
                refused.append(error)
        if len(readers) == 1:
            raise refused[0]
        firsts = (error.problems[0] for error in refused)
        said = "; ".join(f"{name_of(each)}: {problem}" for each, problem in zip(others, firsts, strict=True))
        raise MismatchError(Problem((), f"fits none of {', '.join(map(name_of, others))} ({said})"))

    return read


# --- objects with fields -----------------------------------------------------------------------------------------


class _Field(typing.NamedTuple):
    read: Reader
    is_required: bool
    is_ignored: bool = False


def hints_of(kind: type) -> dict[str, Any]:
    """The annotations of its fields, resolved; ConfigurationError if one cannot be."""
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise ConfigurationError(
            f"an annotation of {kind.__qualname__} cannot be resolved ({error}): import the name in its module, "
            f"outside of `if TYPE_CHECKING`, and define the class at the module's level"
        ) from None


def _field(kind: type, name: str, hint: Any, *, is_required: bool, is_ignored: bool = False) -> _Field:
    try:
        return _Field(reader_of(hint), is_required, is_ignored)
    except ConfigurationError as error:
        raise ConfigurationError(f"field {name!r} of {kind.__qualname__}: {error}") from None


def _of_fields(name: str, fields: dict[str, _Field], make: Callable[[dict[str, Any]], Any]) -> Reader:
    def read(value: Any) -> Any:
        given = _object(value)
        problems = [
            Problem((key,), f"is not a field of {name}, which has {', '.join(fields)}"[:300])
            for key in given
            if key not in fields
        ]
        problems += [
            Problem((key,), "is missing") for key in fields if fields[key].is_required and key not in given
        ]
        values: dict[str, Any] = {}
        for key, (reader, _, is_ignored) in fields.items():
            if key in given and not is_ignored:
                try:
                    values[key] = reader(given[key])
                except MismatchError as error:
                    problems += [problem.below(key) for problem in error.problems]
        if problems:
            raise MismatchError(*problems)
        return make(values)

    return read


def _of_dataclass(kind: Any) -> Reader:
    hints = hints_of(kind)
    fields = {
        field.name: _field(
            kind,
            field.name,
            hints[field.name],
            is_required=field.init
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING,
            is_ignored=not field.init,
        )
        for field in dataclasses.fields(kind)
    }

    def make(values: dict[str, Any]) -> Any:
        try:
            return kind(**values)
        except (ValueError, AssertionError) as error:  # its __post_init__ says no
            raise MismatchError(Problem((), str(error) or type(error).__name__)) from error

    return _of_fields(kind.__name__, fields, make)


def _of_typed_dict(kind: Any) -> Reader:
    fields = {
        name: _field(kind, name, hint, is_required=is_required_key(kind, name, hint))
        for name, hint in hints_of(kind).items()
    }
    return _of_fields(kind.__name__, fields, lambda values: values)


def is_required_key(kind: Any, name: str, hint: Any) -> bool:
    """Must a TypedDict have this key?"""
    origin = typing.get_origin(hint)
    if origin in (typing.Required, typing.NotRequired):
        return origin is typing.Required
    return name in kind.__required_keys__
