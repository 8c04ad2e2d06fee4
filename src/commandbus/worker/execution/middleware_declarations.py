"""Middleware that a registry declares: a part of HandlerRegistry. `model/middleware.py` says which forms it has.

@handlers.middleware
def traced(command, ctx): ...          # around attempts

@handlers.send_middleware
def tracing(domain, new): ...          # around sends of buses that are made with middleware=handlers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from commandbus.errors import ConfigurationError
from commandbus.model.middleware import Middleware, Only, make_middleware, refuse_gaps, refuse_unsaid_chunks

if TYPE_CHECKING:
    from commandbus.worker.execution.handlers import Handler

F = TypeVar("F", bound=Callable[..., Any])
ATTEMPT, SEND = ("command", "ctx"), ("domain", "new")


class MiddlewareDeclarations:
    """Functions around attempts and sends, in the order in which they were registered: the first is outermost."""

    def __init__(self) -> None:
        self._middleware: tuple[Middleware, ...] = ()
        self._send_middleware: tuple[Middleware, ...] = ()

    @overload
    def middleware(self, function: F) -> F: ...
    @overload
    def middleware(self, *, only: Only | None = None, chunks: bool | None = None) -> Callable[[F], F]: ...
    def middleware(
        self, function: F | None = None, *, only: Only | None = None, chunks: bool | None = None
    ) -> F | Callable[[F], F]:
        """Register a function around the attempts of all handlers of this registry, included ones too.

        `def f(command, ctx, call_next)` is around `def` handlers, `async def` around `async def` handlers, and a
        generator `def f(command, ctx)` with one `yield` around both. If a registry has handlers of the other kind,
        say with `only="sync"` or `only="async"` that the function is not meant for those.

        `chunks`: is it around chunk handlers, too? With True it gets a list of commands around a chunk, and one
        command if a chunk handler runs that by itself.
        """

        def register(function: F) -> F:
            self._middleware = _with(self._middleware, make_middleware(function, ATTEMPT, only, chunks))
            return function

        return register if function is None else register(function)

    @overload
    def send_middleware(self, function: F) -> F: ...
    @overload
    def send_middleware(self, *, only: Only | None = None) -> Callable[[F], F]: ...
    def send_middleware(self, function: F | None = None, *, only: Only | None = None) -> F | Callable[[F], F]:
        """Register a function around what is sent by buses that were made with `middleware=handlers`.

        `def f(domain, new, call_next)` is for CommandBus, `async def` for AsyncCommandBus, and a generator
        `def f(domain, new)` with one `yield` for both. `only` is as in `middleware`.
        """

        def register(function: F) -> F:
            self._send_middleware = _with(self._send_middleware, make_middleware(function, SEND, only))
            return function

        return register if function is None else register(function)

    def check_middleware(self, handlers: Iterable[Handler]) -> None:
        """Raises an error if a middleware would be left out around one of these handlers."""
        for handler in handlers:
            every = (*self._middleware, *handler.middleware)
            if handler.many is not None:
                refuse_unsaid_chunks(every, f"handler {handler.name}")
                every = tuple(item for item in every if item.chunks)
            refuse_gaps(every, "async" if handler.is_async else "sync", f"handler {handler.name}")

    def _adopt_middleware(self, other: MiddlewareDeclarations) -> None:
        """Take over what another registry has around sends. What it has around attempts its handlers carry."""
        known = [item.function for item in self._send_middleware]
        self._send_middleware += tuple(item for item in other._send_middleware if item.function not in known)


def _with(declared: tuple[Middleware, ...], new: Middleware) -> tuple[Middleware, ...]:
    if any(item.function == new.function for item in declared):
        raise ConfigurationError(f"middleware {new.name} is registered twice; once is enough")
    return (*declared, new)
