"""`dataclass` as in the standard library, but made in a third of the time, so that every program starts sooner.

Until Python 3.13, the standard decorator compiles six functions for each frozen class. A worker has more than a
hundred such classes: making them took a quarter of its start. Here only `__init__` is compiled; the other methods
are closures. Everything but a class that is `frozen=True, slots=True` is left to the standard library.

Type checkers see the standard decorator. `fields`, `replace`, `asdict`, `match`, `copy` and `pickle` see no
difference (`tests/model/test_quick_dataclass.py`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, **options):
        """The standard decorator. A class that is only frozen and has slots is made more quickly."""

        def make(cls):
            if options == _FROZEN and sys.version_info < (3, 13) and _is_simple(cls):
                return _make(cls)
            return dataclasses.dataclass(**options)(cls)

        return make if cls is None else make(cls)


Method = Callable[..., Any]
Fields = Sequence["dataclasses.Field[Any]"]

_FROZEN: Final = {"frozen": True, "slots": True}
_OURS: Final = frozenset(
    ("__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__getstate__", "__setstate__")
)


class _Factory:
    """The default of a parameter whose value is made by a factory, as signatures show it."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY: Final = _Factory()


def _is_simple(cls: type) -> bool:
    """Does it inherit no fields, define none of our methods itself, and have a docstring?"""
    inherits = any(dataclasses.is_dataclass(base) for base in cls.__mro__[1:])
    return cls.__doc__ is not None and not inherits and not _OURS & cls.__dict__.keys()


def _make(cls: type) -> type:
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True)(cls)
    fields = dataclasses.fields(made)
    methods = {"__init__": _init(made, fields)} | _value_methods(fields) | _frozen_methods(made, fields)
    for name, method in methods.items():
        method.__name__ = name
        method.__qualname__ = f"{made.__qualname__}.{name}"
        method.__module__ = made.__module__
        setattr(made, name, method)
    params = made.__dataclass_params__
    params.init = params.repr = params.eq = params.frozen = True
    return made  # type: ignore[no-any-return]


def _init(cls: type, fields: Fields) -> Method:
    """It sets the slots through their descriptors, because the class lets nobody set them otherwise."""
    names: dict[str, Any] = {"_factory": _FACTORY}
    body = []
    for field in fields:
        names |= {
            f"_set_{field.name}": getattr(cls, field.name).__set__,
            f"_default_{field.name}": field.default,
            f"_make_{field.name}": field.default_factory,
        }
        if value := _value(field):
            body.append(f"    _set_{field.name}(self, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("    self.__post_init__()")
    plain = [_parameter(field) for field in fields if field.init and not field.kw_only]
    by_name = [_parameter(field) for field in fields if field.init and field.kw_only]
    parameters = ", ".join(["self", *plain, *(["*"] if by_name else []), *by_name])
    found: dict[str, Any] = {}
    source = "\n".join([f"def __init__({parameters}):", *body, "    return None"])
    exec(source, names, found)  # noqa: S102 - as the standard library does, with the names of our own fields
    init: Method = found["__init__"]
    init.__annotations__ = {field.name: field.type for field in fields if field.init} | {"return": None}
    return init


def _parameter(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"{field.name}=_default_{field.name}"
    return field.name if field.default_factory is dataclasses.MISSING else f"{field.name}=_factory"


def _value(field: dataclasses.Field[Any]) -> str:
    """The expression whose value `__init__` stores; empty if it leaves the field alone."""
    if field.default_factory is not dataclasses.MISSING:
        made = f"_make_{field.name}()"
        return f"{made} if {field.name} is _factory else {field.name}" if field.init else made
    if field.init:
        return field.name
    return "" if field.default is dataclasses.MISSING else f"_default_{field.name}"


def _value_methods(fields: Fields) -> dict[str, Method]:
    shown = [field.name for field in fields if field.repr]
    compared = _getter(field.name for field in fields if field.compare)
    hashed = _getter(field.name for field in fields if (field.compare if field.hash is None else field.hash))

    @recursive_repr()
    def show(self: Any) -> str:
        text = ", ".join([f"{name}={getattr(self, name)!r}" for name in shown])
        return f"{self.__class__.__qualname__}({text})"

    def equals(self: Any, other: object) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return compared(self) == compared(other)

    def hash_of(self: Any) -> int:
        return hash(hashed(self))

    return {"__repr__": show, "__eq__": equals, "__hash__": hash_of}


def _getter(names: Any) -> Callable[[Any], Any]:
    found = tuple(names)
    return attrgetter(*found) if found else lambda _: ()


def _frozen_methods(cls: Any, fields: Fields) -> dict[str, Method]:
    names = [field.name for field in fields]

    def refuse_to_set(self: Any, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def refuse_to_delete(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    def state(self: Any) -> list[Any]:
        return [getattr(self, name) for name in names]

    def set_state(self: Any, values: list[Any]) -> None:
        for name, value in zip(names, values, strict=True):
            object.__setattr__(self, name, value)

    return {
        "__setattr__": refuse_to_set,
        "__delattr__": refuse_to_delete,
        "__getstate__": state,
        "__setstate__": set_state,
    }
