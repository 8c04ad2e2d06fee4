"""What a worker does before its first claim and after its last attempt: a part of HandlerRegistry.

    @handlers.on_start
    def connect(state): state.mailer = Mailer()

    @handlers.lifespan                     # both in one: a generator with one `yield`
    async def session(state):
        async with aiohttp.ClientSession() as state.http:
            yield

`state` is `ctx.state` in handlers: one object for each process that runs handlers. `worker/lifespans.py` runs
these functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, TypeVar

from commandbus.errors import ConfigurationError
from commandbus.quick_dataclass import dataclass

F = TypeVar("F", bound=Callable[..., Any])


class Role(StrEnum):
    """When a function runs: at the start, at the stop, or around both."""

    START = "on_start"
    STOP = "on_stop"
    AROUND = "lifespan"


@dataclass(frozen=True, slots=True)
class Lifespan:
    """One such function."""

    function: Callable[..., Any]
    role: Role
    is_async: bool

    @property
    def name(self) -> str:
        """Its role and the function's name, for people."""
        module = getattr(self.function, "__module__", "?")
        return f"{self.role} {module}.{getattr(self.function, '__qualname__', repr(self.function))}"


class WorkerState(SimpleNamespace):
    """`ctx.state`: what the start of a worker made for its handlers. All attempts of the process share it.

    `is_child` says whether this is a child process that runs isolated attempts.
    """

    is_child: bool

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the state of this worker has no {name!r}; set it in a function of handlers.on_start or "
            f"handlers.lifespan"
        )


class LifespanDeclarations:
    """Functions around the life of a worker, in the order in which they were registered."""

    def __init__(self) -> None:
        self._lifespans: tuple[Lifespan, ...] = ()

    def on_start(self, function: F) -> F:
        """Register `def f(state)` or `async def f(state)`: it runs in each worker before its first claim. If it
        raises, the worker does not start."""
        self._declare(function, Role.START)
        return function

    def on_stop(self, function: F) -> F:
        """Register `def f(state)` or `async def f(state)`: it runs after the worker's last attempt, in the reverse
        of the order in which they were registered. A worker that is killed runs none."""
        self._declare(function, Role.STOP)
        return function

    def lifespan(self, function: F) -> F:
        """Register a generator `def f(state)` or `async def f(state)` with one `yield`: what is before it runs as
        `on_start`, what is after it as `on_stop`."""
        self._declare(function, Role.AROUND)
        return function

    @property
    def has_async_lifespans(self) -> bool:
        """Does one of them need an event loop?"""
        return any(item.is_async for item in self._lifespans)

    def _declare(self, function: Callable[..., Any], role: Role) -> None:
        made = _checked(function, role)
        if any(item.function == function and item.role is role for item in self._lifespans):
            raise ConfigurationError(f"{made.name} is registered twice; once is enough")
        self._lifespans = (*self._lifespans, made)

    def _adopt_lifespans(self, other: LifespanDeclarations) -> None:
        self._lifespans += tuple(item for item in other._lifespans if item not in self._lifespans)


def _checked(function: Any, role: Role) -> Lifespan:
    if not callable(function):
        raise TypeError(f"{role} takes a function, not {function!r:.80}")
    code = _code_of(function)
    has_steps = inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code)
    made = Lifespan(function, role, inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code))
    if has_steps is not (role is Role.AROUND):
        raise TypeError(
            f"{made.name} is {'a' if has_steps else 'no'} generator: on_start and on_stop take plain functions, "
            f"and lifespan takes a generator with one `yield`"
        )
    try:
        inspect.signature(function).bind("state")
    except TypeError:
        raise TypeError(f"{made.name} takes {inspect.signature(function)}; it must take (state)") from None
    except ValueError:
        pass  # it does not say what it takes
    return made


def _code_of(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
