"""One body for each operation, used under all its names, and for sync and async code.

`bus.get_command` is `bus.commands.get`: `get_command = short("commands", CommandRepository.get)`. The async twin
of a class awaits what the sync body returns: `get = awaited(CommandRepository.get)`. That works if a body only
returns what `run` or `follow` of its bus returned, which is a coroutine in an async bus. To change a result before
that, use `flow.operation.then`. Signature and docstring are those of the method.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def short(part: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Returns a method that calls `method` of the owner's `part`."""
    name = method.__name__

    @functools.wraps(method)
    def call(owner: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return getattr(getattr(owner, part), name)(*args, **kwargs)  # type: ignore[no-any-return]

    @functools.wraps(method)
    async def call_async(owner: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return await getattr(getattr(owner, part), name)(*args, **kwargs)

    return call_async if inspect.iscoroutinefunction(method) else call  # type: ignore[return-value]


def awaited(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Returns the async twin of a method that only returns what its bus returns."""

    @functools.wraps(method)
    async def call(owner: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await method(owner, *args, **kwargs)  # type: ignore[no-any-return, misc]

    return call
