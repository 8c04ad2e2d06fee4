"""The payload that a handler takes instead of its command: the type of its first parameter.

    @handlers.handler("orders", "ship")
    def ship(order: ShipOrder, ctx): ...

A type that is written as text (`from __future__ import annotations`) is resolved when the handler is registered,
or later, if its module does not have the name yet: at the latest when a worker starts.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

from commandbus.errors import ConfigurationError
from commandbus.model import payload_types as types
from commandbus.worker.execution.handler_signature import CONTEXT_NAMES

_UNKNOWN: Any = object()


class PayloadParameter:
    """Reads the payload of a command as the type of a handler's first parameter."""

    def __init__(self, function: Callable[..., Any], annotation: Any, resolved: Any = _UNKNOWN) -> None:
        self._function = function
        self._annotation = annotation
        self._type = resolved
        self._read: types.Reader | None = None

    @property
    def is_resolved(self) -> bool:
        """Is its type known by now?"""
        return self._type is not _UNKNOWN

    def resolve(self) -> Any:
        """Its type, and whether it can be read; ConfigurationError names the handler and the annotation.

        Returns None if it turns out to be no type of a payload: then the handler takes the command.
        """
        try:
            if self._type is _UNKNOWN:
                found = resolved(self._function, self._annotation)
                self._type = found if types.is_payload_type(found) else None
            if self._type is not None and self._read is None:
                from commandbus.model.payload_reading import reader_of

                self._read = reader_of(self._type)
        except (ConfigurationError, NameError, AttributeError, SyntaxError, TypeError) as error:
            raise self._error(error) from error
        return self._type

    def read(self, command: Any) -> Any:
        """The payload of a command, or the command itself if that is what the handler takes."""
        if self._read is None and self.resolve() is None:
            return command
        assert self._read is not None  # noqa: S101 - resolved
        return types.read_payload(self._read, command.data, self._type)

    def _error(self, error: Exception) -> ConfigurationError:
        name = getattr(self._function, "__qualname__", repr(self._function))
        text = f"the annotation {types.name_of(self._annotation)!r} of handler {name!r} "
        if isinstance(error, ConfigurationError):
            return ConfigurationError(f"{text}cannot be read as a payload: {error}")
        return ConfigurationError(
            f"{text}cannot be resolved ({error}): import the name in the handler's module, outside of "
            f"`if TYPE_CHECKING`, and define the class at the module's level; a handler that takes the command "
            f"writes `command: Command`"
        )


def payload_parameter(
    function: Callable[..., Any], signature: inspect.Signature | None, by_default: type | None
) -> PayloadParameter | None:
    """What the first parameter of a handler says about its payload; None if it takes the command or the context.

    `by_default`: the class that the handler is registered for, if its first parameter has no annotation.
    """
    first = _first(signature)
    if first is None:
        return None
    annotation = first.annotation
    if annotation is first.empty:
        if by_default is None or first.name in CONTEXT_NAMES:
            return None
        return PayloadParameter(function, by_default, by_default)
    try:
        found = resolved(function, annotation)
    except (NameError, AttributeError, SyntaxError, TypeError):
        return None if _is_ours(annotation, signature) else PayloadParameter(function, annotation)
    return PayloadParameter(function, annotation, found) if types.is_payload_type(found) else None


def refuse_typed_chunk(function: Callable[..., Any], signature: inspect.Signature | None) -> None:
    """A chunk handler gets commands. One that says otherwise would find out at its first chunk."""
    first = _first(signature)
    try:
        found = None if first is None else resolved(function, first.annotation)
    except (NameError, AttributeError, SyntaxError, TypeError):
        return
    if any(types.is_payload_type(kind) for kind in (found, *typing.get_args(found))):
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"chunk handler {name!r} gets a list of commands, not of {types.name_of(found)}: annotate it with "
            f"list[Command], and use command.data"
        )


def _first(signature: inspect.Signature | None) -> inspect.Parameter | None:
    parameters = () if signature is None else signature.parameters.values()
    return next((p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)), None)


def _is_ours(annotation: object, signature: inspect.Signature | None) -> bool:
    """Is it text that names our Command, imported for type checkers only? Or a lone parameter: the context."""
    places = [] if signature is None else list(signature.parameters.values())
    return str(annotation).rpartition(".")[2] == "Command" or len(places) == 1 or places[0].name in CONTEXT_NAMES


def resolved(function: Callable[..., Any], annotation: Any) -> Any:
    """The type that an annotation names, in the module of its function."""

    def probe() -> None: ...

    probe.__annotations__ = {"payload": annotation}
    found = typing.get_type_hints(probe, globalns=_globals_of(function), include_extras=True)
    return found["payload"]


def _globals_of(function: Any) -> dict[str, Any]:
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif not hasattr(function, "__globals__") and hasattr(type(function), "__call__"):  # noqa: B004
            return dict(getattr(type(function).__call__, "__globals__", {}))
        else:
            return dict(getattr(function, "__globals__", {}))
