"""The public API as a program sees it: everything in `commandbus.__all__`, by inspection."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import commandbus


class Parameter(NamedTuple):
    """One parameter of a public callable; `annotation` is its text."""

    owner: str
    name: str
    annotation: str
    kind: Any
    default: object

    @property
    def label(self) -> str:
        return f"{self.owner}({self.name})"


def public_classes() -> Iterator[tuple[str, type]]:
    for name in commandbus.__all__:
        found = getattr(commandbus, name)
        if inspect.isclass(found) and not issubclass(found, Enum):
            yield name, found


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions, constructors, and public methods (inherited ones too), as `CommandBus.send`."""
    for name in commandbus.__all__:
        found = getattr(commandbus, name)
        if inspect.isfunction(found):
            yield name, found
    for name, kind in public_classes():
        yield name, kind
        yield from public_methods(name, kind)


def public_methods(name: str, kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for attribute in dir(kind):
        static = inspect.getattr_static(kind, attribute)
        if not attribute.startswith("_") and (
            inspect.isfunction(static) or isinstance(static, classmethod | staticmethod)
        ):
            yield f"{name}.{attribute}", getattr(kind, attribute)


def parameters_of(owner: str, function: Callable[..., Any]) -> Iterator[Parameter]:
    """Its parameters; options that come as a TypedDict (`**options: Unpack[LimitOptions]`) one by one."""
    for parameter in inspect.signature(function).parameters.values():
        annotation = text_of(parameter.annotation)
        if parameter.kind is parameter.VAR_KEYWORD and (found := re.fullmatch(r"Unpack\[(\w+)\]", annotation)):
            for name, hint in getattr(commandbus, found[1]).__annotations__.items():
                yield Parameter(owner, name, text_of(hint), parameter.KEYWORD_ONLY, None)
        elif parameter.name != "self":
            yield Parameter(owner, parameter.name, annotation, parameter.kind, parameter.default)


def all_parameters() -> Iterator[Parameter]:
    for owner, function in public_callables():
        try:
            yield from parameters_of(owner, function)
        except ValueError:  # a class without a Python constructor, such as an error
            continue


def text_of(annotation: object) -> str:
    """An annotation as it is written: names, not objects."""
    if isinstance(annotation, str):
        return annotation
    forward = getattr(annotation, "__forward_arg__", None)
    return str(forward) if forward is not None else inspect.formatannotation(annotation)


def results() -> Iterator[tuple[str, str]]:
    """What comes out: return annotations, properties, and the fields of public classes, as (where, annotation)."""
    for owner, function in public_callables():
        if not inspect.isclass(function):
            yield owner, text_of(inspect.signature(function).return_annotation)
    for name, kind in public_classes():
        for attribute in dir(kind):
            static = inspect.getattr_static(kind, attribute)
            if isinstance(static, property | cached_property) and not attribute.startswith("_"):
                getter = static.fget if isinstance(static, property) else static.func
                yield f"{name}.{attribute}", text_of(inspect.signature(getter).return_annotation)
        for field in fields(kind) if is_dataclass(kind) else ():
            yield f"{name}.{field.name}", text_of(field.type)
