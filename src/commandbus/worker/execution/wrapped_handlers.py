"""The handlers of a registry as a worker calls them: with the middleware around them.

A worker makes the wrapped functions when it starts, one for each handler. A registry without middleware costs
nothing: its own handlers are used.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from commandbus.model.middleware import Inner, Middleware, Only, compose

if TYPE_CHECKING:
    from commandbus.worker.execution.handlers import Handler, HandlerRegistry


class WrappedHandlers:
    """What a worker asks for handlers. It takes the registry's middleware as it is now."""

    get: Callable[[str, str], Handler | None]

    def __init__(self, registry: HandlerRegistry) -> None:
        self._registry = registry
        self._middleware = registry._middleware
        self._made: dict[tuple[str, str], tuple[Handler, Handler]] = {}
        is_plain = not self._middleware and not any(handler.middleware for handler in registry)
        self.get = registry.get if is_plain else self._get

    @property
    def domains(self) -> list[str]:
        """The domains that have handlers."""
        return self._registry.domains

    def __iter__(self) -> Iterator[Handler]:
        for handler in self._registry:
            found = self.get(handler.domain, handler.command_type)
            if found is not None:
                yield found

    def _get(self, domain: str, command_type: str) -> Handler | None:
        bare = self._registry.get(domain, command_type)
        if bare is None:
            return None
        known = self._made.get((domain, command_type))
        if known is None or known[0] is not bare:
            known = self._made[domain, command_type] = bare, wrap(bare, self._middleware)
        return known[1]


def wrap(handler: Handler, outer: tuple[Middleware, ...]) -> Handler:
    """The handler with the middleware of a registry around it, and around that of registries it came with."""
    kind: Only = "async" if handler.is_async else "sync"
    every = [item for item in (*outer, *handler.middleware) if item.fits(kind)]
    if handler.many is not None:
        every = [item for item in every if item.chunks]
    if not every:
        return handler
    inner = _async_inner(handler) if handler.is_async else _sync_inner(handler)
    run: Any = compose(every, inner, kind)
    run.__module__ = getattr(handler.function, "__module__", "?")
    run.__qualname__ = getattr(handler.function, "__qualname__", repr(handler.function))
    many = None if handler.many is None else compose(every, handler.many, kind)
    return replace(handler, function=run, takes_command=True, many=many)


def _sync_inner(handler: Handler) -> Inner:
    function, takes_command = handler.function, handler.takes_command

    def inner(command: Any, ctx: Any) -> Any:
        result = function(command, ctx) if takes_command else function(ctx)
        if result is not None and inspect.isawaitable(result):
            return getattr(ctx, "_finish", run_to_end)(result)
        return result

    return inner


def run_to_end(awaitable: Awaitable[Any]) -> Any:
    """Run what is awaitable on an event loop of its own."""
    import asyncio  # a module of handlers is imported by programs that need none

    async def finish() -> Any:
        return await awaitable

    return asyncio.run(finish())


def _async_inner(handler: Handler) -> Inner:
    function, takes_command = handler.function, handler.takes_command

    async def inner(command: Any, ctx: Any) -> Any:
        return await (function(command, ctx) if takes_command else function(ctx))

    return inner
