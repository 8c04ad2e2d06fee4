"""Short names: `bus.get_command` is `bus.commands.get`, with its signature and its docstring."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
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
