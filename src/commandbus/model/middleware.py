"""Middleware: functions around an attempt or around a send, in one of three forms.

    def timed(command, ctx, call_next):             # around `def` handlers, or sends of a CommandBus
        return call_next()

    async def timed(command, ctx, call_next):       # around `async def` handlers, or sends of an AsyncCommandBus
        return await call_next()

    def traced(command, ctx):                       # a generator with one `yield`: around both kinds
        result = yield

`compose` nests them around an inner function of two arguments, the first of them outermost. It is called once for
each handler or bus: what has no middleware is called as if there were none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

from commandbus.errors import ConfigurationError, MiddlewareError
from commandbus.quick_dataclass import dataclass

Only: TypeAlias = Literal["sync", "async"]
Inner: TypeAlias = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Middleware:
    """A function around attempts or sends. `kind`: what it can be around; None: sync and async alike. `only`: the
    kind that it is meant for, if its author has said that. Around a chunk it gets the list of its commands."""

    function: Callable[..., Any]
    kind: Only | None
    has_steps: bool
    only: Only | None = None
    chunks: bool | None = None  # is it around chunks, too? None: nobody has said that

    @property
    def name(self) -> str:
        """The function's name, for people."""
        module = getattr(self.function, "__module__", "?")
        return f"{module}.{getattr(self.function, '__qualname__', repr(self.function))}"

    def fits(self, kind: Only) -> bool:
        """Is it around what is of this kind?"""
        return self.kind in (None, kind) and self.only in (None, kind)

    def is_missing_in(self, kind: Only) -> bool:
        """Is it not around what is of this kind, although nobody has said that this is meant?"""
        return not self.fits(kind) and self.only is None


def make_middleware(
    function: object, arguments: Sequence[str], only: object = None, chunks: object = None
) -> Middleware:
    """Checks a function. `arguments` are what it is called with, besides `call_next`."""
    if not callable(function):
        raise TypeError(f"a middleware must be a function, not {function!r:.80}")
    if only not in (None, "sync", "async"):
        raise ValueError(f'only must be "sync" or "async", not {only!r}')
    if chunks not in (None, True, False):
        raise TypeError(f"chunks must be True or False, not {chunks!r}")
    code = _code_of(function)
    has_steps = inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code)
    is_async = inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code)
    kind: Only | None = "async" if is_async else None if has_steps else "sync"
    made = Middleware(function, kind, has_steps, only, chunks)
    _check_parameters(made, arguments if has_steps else (*arguments, "call_next"), arguments)
    if kind is not None and only not in (None, kind):
        raise ValueError(f'middleware {made.name} is {_written(kind)}, so it cannot be only="{only}"')
    return made


def compose(middleware: Iterable[Middleware], inner: Inner, kind: Only) -> Inner:
    """Nest those that fit around `inner`; the first is outermost. A function that comes twice counts once."""
    chosen: list[Middleware] = []
    for item in middleware:
        if item.fits(kind) and all(item.function != other.function for other in chosen):
            chosen.append(item)
    run = inner
    for item in reversed(chosen):
        run = _WRAPPERS[kind, item.has_steps](item, run)
    return run


def refuse_gaps(middleware: Iterable[Middleware], kind: Only, what: str) -> None:
    """Raises an error if one of them would be left out around something of this kind."""
    for item in middleware:
        if item.is_missing_in(kind):
            raise ConfigurationError(
                f"middleware {item.name} is {_written(item.kind or 'sync')}, but {what} is {kind}, so it would "
                f"run without it: write the middleware as a generator with one `yield`, which is around both "
                f'kinds, or say only="{item.kind}" if it is not meant for that'
            )


def refuse_unsaid_chunks(middleware: Iterable[Middleware], what: str) -> None:
    """Raises an error if nobody has said whether one of them is around chunks."""
    for item in middleware:
        if item.chunks is None:
            raise ConfigurationError(
                f"middleware {item.name} is around one command, but {what} takes chunks: say chunks=False if it "
                f"is not meant for that, or chunks=True if it can take a list of commands instead of one"
            )


def _written(kind: Only) -> str:
    return "written with `async def`" if kind == "async" else "written with `def`"


def _code_of(function: Any) -> Any:
    """What says whether it is async: a partial's function, or the `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    is_plain = inspect.isroutine(function) or inspect.isclass(function)
    return function if is_plain else type(function).__call__


def _check_parameters(made: Middleware, called_with: Sequence[str], arguments: Sequence[str]) -> None:
    try:
        signature = inspect.signature(made.function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*called_with)
    except TypeError:
        steps, plain = ", ".join(arguments), ", ".join((*arguments, "call_next"))
        raise TypeError(
            f"middleware {made.name} takes {signature}; it must take ({plain}), or ({steps}) if it is a generator "
            f"with one `yield`"
        ) from None


def _around(item: Middleware, inner: Inner) -> Inner:
    function = item.function

    def run(first: Any, second: Any) -> Any:
        is_called = False

        def call_next() -> Any:
            nonlocal is_called
            if is_called:
                raise MiddlewareError(f"middleware {item.name} has called call_next() twice; it may do so once")
            is_called = True
            return inner(first, second)

        return function(first, second, call_next)

    return run


def _around_async(item: Middleware, inner: Inner) -> Inner:
    function = item.function

    async def run(first: Any, second: Any) -> Any:
        called: list[Any] = []
        has_begun = False

        async def go_on() -> Any:
            nonlocal has_begun
            has_begun = True
            return await inner(first, second)

        def call_next() -> Awaitable[Any]:
            if called:
                raise MiddlewareError(f"middleware {item.name} has called call_next() twice; it may do so once")
            called.append(go_on())
            return called[0]  # type: ignore[no-any-return]

        result = await function(first, second, call_next)
        if called and not has_begun:
            called[0].close()
            raise MiddlewareError(
                f"middleware {item.name} has called call_next() without `await`, so nothing was called; write "
                f"`await call_next()`"
            )
        return result

    return run


def _around_steps(item: Middleware, inner: Inner) -> Inner:
    def run(first: Any, second: Any) -> Any:
        steps = item.function(first, second)
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value
        try:
            result = inner(first, second)
        except BaseException as error:  # noqa: BLE001 - it goes on to the middleware
            return _throw(item, steps, error)
        return _send(item, steps, result)

    return run


def _around_steps_async(item: Middleware, inner: Inner) -> Inner:
    if item.kind == "async":
        return _around_async_steps(item, inner)

    async def run(first: Any, second: Any) -> Any:
        steps = item.function(first, second)
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value
        try:
            result = await inner(first, second)
        except BaseException as error:  # noqa: BLE001
            return _throw(item, steps, error)
        return _send(item, steps, result)

    return run


def _around_async_steps(item: Middleware, inner: Inner) -> Inner:
    """An async generator: `result = yield` is the same, but it has no value to return."""

    async def run(first: Any, second: Any) -> Any:
        steps = item.function(first, second)
        try:
            await anext(steps)
        except StopAsyncIteration:
            return None
        try:
            result = await inner(first, second)
        except BaseException as error:
            try:
                await steps.athrow(error)
            except StopAsyncIteration:
                return None
            raise _second_yield(item) from error
        try:
            await steps.asend(result)
        except StopAsyncIteration:
            return result
        raise _second_yield(item)

    return run


def _throw(item: Middleware, steps: Any, error: BaseException) -> Any:
    try:
        steps.throw(error)
    except StopIteration as stop:
        return stop.value
    raise _second_yield(item) from error


def _send(item: Middleware, steps: Any, result: Any) -> Any:
    try:
        steps.send(result)
    except StopIteration as stop:
        return result if stop.value is None else stop.value
    raise _second_yield(item)


def _second_yield(item: Middleware) -> MiddlewareError:
    return MiddlewareError(f"middleware {item.name} has reached a second `yield`; it may have one")


_WRAPPERS: dict[tuple[Only, bool], Callable[[Middleware, Inner], Inner]] = {
    ("sync", False): _around,
    ("sync", True): _around_steps,
    ("async", False): _around_async,
    ("async", True): _around_steps_async,
}
