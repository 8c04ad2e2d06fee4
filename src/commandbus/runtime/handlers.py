"""HandlerRegistry: which function runs which command.

    handlers = HandlerRegistry()

    @handlers.handler("orders", "ship")
    def ship(command, ctx): ...

A handler is `def` or `async def`, with `(command, ctx)` or `(ctx)`. Methods of a class are marked with
`@handler(domain, command_type)` and registered with an instance: `handlers.register_instance(Orders(db))`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from commandbus.errors import DuplicateHandlerError
from commandbus.model.names import check_domain, check_type
from commandbus.model.retry import RetryPolicy

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__commandbus_handlers__"


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered function and how it is called."""

    domain: str
    command_type: str
    function: Callable[..., Any]
    is_async: bool
    takes_command: bool
    retry_policy: RetryPolicy | None = None

    @property
    def name(self) -> str:
        """The function's name, for people."""
        module = getattr(self.function, "__module__", "?")
        return f"{module}.{getattr(self.function, '__qualname__', repr(self.function))}"


def handler(domain: str, command_type: str, *, retry_policy: RetryPolicy | None = None) -> Callable[[F], F]:
    """Mark a method as a handler, for `HandlerRegistry.register_instance`."""
    check_domain(domain)
    check_type(command_type)

    def mark(function: F) -> F:
        marks = [*getattr(function, _MARK, ()), (domain, command_type, retry_policy)]
        setattr(function, _MARK, marks)
        return function

    return mark


class HandlerRegistry:
    """Handlers by (domain, command_type). Filled at import time, read by workers."""

    def __init__(self) -> None:
        self._handlers: dict[tuple[str, str], Handler] = {}

    def handler(
        self, domain: str, command_type: str, *, retry_policy: RetryPolicy | None = None
    ) -> Callable[[F], F]:
        """Register the decorated function."""

        def register(function: F) -> F:
            self.register(domain, command_type, function, retry_policy=retry_policy)
            return function

        return register

    def register(
        self,
        domain: str,
        command_type: str,
        function: Callable[..., Any],
        *,
        retry_policy: RetryPolicy | None = None,
    ) -> Handler:
        """Register a function; a second one for the same command is refused."""
        key = (check_domain(domain), check_type(command_type))
        if (existing := self._handlers.get(key)) is not None:
            raise DuplicateHandlerError(
                f"command_type {command_type!r} of domain {domain!r} already has the handler {existing.name}"
            )
        if retry_policy is not None and not isinstance(retry_policy, RetryPolicy):
            raise TypeError(f"retry_policy must be a RetryPolicy, not {type(retry_policy).__name__}")
        made = Handler(domain, command_type, function, _is_async(function), _takes_command(function), retry_policy)
        self._handlers[key] = made
        return made

    def register_instance(self, instance: object) -> list[Handler]:
        """Register every method of an object that is marked with `@handler`; all or none."""
        found = [
            (mark, getattr(instance, name))
            for name in dir(type(instance))
            for mark in _marks_of(inspect.getattr_static(type(instance), name))
        ]
        if not found:
            raise ValueError(
                f"{type(instance).__name__} has no method marked with @commandbus.handler(domain, command_type)"
            )
        trial = HandlerRegistry()
        trial._handlers = dict(self._handlers)
        made = [
            trial.register(domain, command_type, method, retry_policy=policy)
            for (domain, command_type, policy), method in found
        ]
        self._handlers = trial._handlers
        return made

    def get(self, domain: str, command_type: str) -> Handler | None:
        """The handler for a command, if there is one."""
        return self._handlers.get((domain, command_type))

    @property
    def domains(self) -> list[str]:
        """The domains that have handlers."""
        return sorted({domain for domain, _ in self._handlers})

    def __iter__(self) -> Iterator[Handler]:
        return iter(list(self._handlers.values()))

    def __len__(self) -> int:
        return len(self._handlers)


def _marks_of(member: object) -> Sequence[tuple[str, str, RetryPolicy | None]]:
    """The marks of a method; a staticmethod or classmethod keeps them on the function inside."""
    found: Sequence[tuple[str, str, RetryPolicy | None]] = getattr(getattr(member, "__func__", member), _MARK, ())
    return found


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - a callable object may have an async __call__
    )


def _takes_command(function: Callable[..., Any]) -> bool:
    """Two parameters: (command, ctx). One: (ctx)."""
    if not callable(function):
        raise TypeError(f"a handler must be callable, not {type(function).__name__}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters) or len(required) > 2:
        raise TypeError(
            f"handler {getattr(function, '__qualname__', function)!r} must take (command, ctx) or (ctx), "
            f"not {inspect.signature(function)}"
        )
    if not positional:
        raise TypeError(
            f"handler {getattr(function, '__qualname__', function)!r} must take (command, ctx) or (ctx)"
        )
    if len(positional) == 1 and positional[0].name == "command":
        raise TypeError(
            f"handler {getattr(function, '__qualname__', function)!r} takes (command) alone, but a lone parameter "
            f"gets the context: write (command, ctx), or (ctx) and use ctx.command"
        )
    if [p.name for p in positional[:2]] == ["ctx", "command"]:
        raise TypeError(
            f"handler {getattr(function, '__qualname__', function)!r} takes (ctx, command): command comes first"
        )
    return len(positional) >= 2
