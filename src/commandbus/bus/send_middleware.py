"""Middleware around what a bus sends: `CommandBus(middleware=[…])`, `bus.middleware`, or a registry's functions.

    send, call, commands.save      call_next sends the command, and returns its receipt
    send_many, batches             call_next returns None: the command is sent with the others, in one statement

Each command goes through on its own, as a copy that the middleware may change. A middleware cannot drop a command:
it raises, or it calls `call_next`. `model/middleware.py` has the forms and nests them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeVar

from commandbus.bus.base import BusBase
from commandbus.errors import InvalidCommandError, MiddlewareError
from commandbus.flow.commands.send import Sendable, to_new_command
from commandbus.flow.operation import Operation
from commandbus.model.command import NewCommand, SentCommand
from commandbus.model.middleware import Middleware, Only, compose, make_middleware, refuse_gaps

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])
Commands: TypeAlias = Iterable[Sendable]
ARGUMENTS = ("domain", "new")


class SendMiddlewareSource(Protocol):
    """What has middleware around sends: a HandlerRegistry."""

    @property
    def _send_middleware(self) -> tuple[Middleware, ...]: ...


Given: TypeAlias = "Iterable[Callable[..., object]] | SendMiddlewareSource | None"


class Chain:
    """The middleware of one bus: that of a registry as it is at the moment, then its own."""

    def __init__(self, given: Given, kind: Only, bus: str) -> None:
        self._kind: Only = kind
        self._bus = bus
        self._source: Any = given if hasattr(given, "_send_middleware") else None
        self._own: tuple[Middleware, ...] = ()
        self._checked: tuple[Middleware, ...] = ()
        self._fitting: tuple[Middleware, ...] = ()
        if given is not None and self._source is None:
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise TypeError(f"middleware must be a list of functions or a HandlerRegistry, not {given!r:.80}")
            for function in given:
                self.add(function)

    def add(self, function: object) -> None:
        """One more, inside the others."""
        made = make_middleware(function, ARGUMENTS)
        refuse_gaps([made], self._kind, self._bus)
        self._own = (*self._own, made)

    def current(self) -> tuple[Middleware, ...]:
        """What is around a send now."""
        found = self._own if self._source is None else (*self._source._send_middleware, *self._own)
        if found != self._checked:
            refuse_gaps(found, self._kind, self._bus)
            self._fitting = tuple(replace(item, only=None) for item in found if item.fits(self._kind))
            self._checked = found
        return self._fitting

    @property
    def needs_await(self) -> bool:
        """Is there one that can only be awaited?"""
        return any(item.kind == "async" for item in self.current())


class _Passage:
    """One command on its way through the middleware."""

    def __init__(self, new: NewCommand) -> None:
        self._had_headers = new.headers is not None
        self.has_arrived = False
        self.receipt: SentCommand | None = None
        headers = new.headers
        is_usual = headers is None or isinstance(headers, Mapping)
        self.new = replace(new, headers=dict(headers or {})) if is_usual else replace(new)

    def arrive(self) -> NewCommand:
        """The innermost call_next: as the middleware has left it."""
        self.has_arrived = True
        if not self.new.headers and not self._had_headers:
            self.new.headers = None
        return self.new

    def check(self, returned: object, *, is_alone: bool = True) -> SentCommand | None:
        """Returns its receipt. A middleware may return that of another command instead of sending this one."""
        if self.receipt is None and is_alone and isinstance(returned, SentCommand):
            return returned
        if (self.receipt is None) if is_alone else not self.has_arrived:
            raise MiddlewareError(
                f"a middleware has returned without having sent the command of type {self.new.command_type!r}: it "
                f"did not call call_next(), or it swallowed the error of that. To refuse a command, raise an error"
            )
        return self.receipt


def _passages(domain: str, commands: Commands) -> Iterator[tuple[int, _Passage | object]]:
    """A passage for each command; what is no command goes on as it is, and is refused where all are checked."""
    for number, item in enumerate(commands, 1):
        try:
            passage: _Passage | object = _Passage(to_new_command(item, domain))
        except (InvalidCommandError, TypeError):
            passage = item
        yield number, passage


def _numbered(error: BaseException, number: int) -> None:
    error.add_note(f"(raised by a middleware, for command {number} of those to be sent)")


class SendMiddlewareMethods(BusBase):
    """What CommandBus has of it."""

    def middleware(self, function: F) -> F:
        """Register a function around what this bus sends: `def f(domain, new, call_next)`, or a generator
        `def f(domain, new)` with one `yield`. The first one is outermost."""
        if self._chain is None:
            self._chain = Chain(None, "sync", "this CommandBus")
        self._chain.add(function)
        return function

    def _send_one(self, domain: str, new: NewCommand, send: Callable[[NewCommand], Any]) -> Any:
        if not isinstance(new, NewCommand):
            return send(new)
        passage = _Passage(new)

        def go_on(_: object, __: object) -> SentCommand | None:
            passage.receipt = send(passage.arrive())
            return passage.receipt

        return passage.check(compose(self._chain.current(), go_on, "sync")(domain, passage.new))

    def _through(self, domain: str, commands: Commands) -> Iterator[Any]:
        """Each command as its middleware leaves it, as they come."""
        middleware = self._chain.current()
        for number, passage in _passages(domain, commands):
            if not isinstance(passage, _Passage):
                yield passage
                continue
            run = compose(middleware, lambda _, __, passage=passage: passage.arrive() and None, "sync")  # type: ignore[misc]
            try:
                passage.check(run(domain, passage.new), is_alone=False)
            except BaseException as error:
                _numbered(error, number)
                raise
            yield passage.new

    def _send_all(
        self, domain: str, commands: Commands, make: Callable[[Commands], Operation[Any]], conn: object
    ) -> Any:
        """Run the operation that sends many."""
        return self.run(make(commands if self._chain is None else self._through(domain, commands)), conn)

    def run(self, operation: Operation[Any], conn: object = None) -> Any:
        raise NotImplementedError


class AsyncSendMiddlewareMethods(BusBase):
    """What AsyncCommandBus has of it."""

    def middleware(self, function: F) -> F:
        """Register a function around what this bus sends: `async def f(domain, new, call_next)`, or a generator
        `def f(domain, new)` with one `yield`. The first one is outermost."""
        if self._chain is None:
            self._chain = Chain(None, "async", "this AsyncCommandBus")
        self._chain.add(function)
        return function

    async def _send_one(
        self, domain: str, new: NewCommand, send: Callable[[NewCommand], Awaitable[SentCommand]]
    ) -> SentCommand | None:
        if not isinstance(new, NewCommand):
            return await send(new)
        passage = _Passage(new)

        async def go_on(_: object, __: object) -> SentCommand | None:
            passage.receipt = await send(passage.arrive())
            return passage.receipt

        run = compose(self._chain.current(), go_on, "async")
        return passage.check(await run(domain, passage.new))

    async def _through(self, domain: str, commands: Commands) -> Any:
        """Each command as its middleware leaves it. If a middleware must be awaited, all commands are read before
        the first one is sent: what sends them awaits nothing of others."""
        middleware = self._chain.current()
        if not self._chain.needs_await:
            return SendMiddlewareMethods._through(self, domain, commands)  # type: ignore[arg-type]
        found: list[Any] = []
        for number, passage in _passages(domain, commands):
            if not isinstance(passage, _Passage):
                found.append(passage)
                continue

            async def go_on(_: object, __: object, passage: _Passage = passage) -> None:
                passage.arrive()

            try:
                passage.check(await compose(middleware, go_on, "async")(domain, passage.new), is_alone=False)
            except BaseException as error:
                _numbered(error, number)
                raise
            found.append(passage.new)
        return found

    async def _send_all(
        self, domain: str, commands: Commands, make: Callable[[Commands], Operation[Any]], conn: object
    ) -> Any:
        """Run the operation that sends many."""
        return await self.run(
            make(commands if self._chain is None else await self._through(domain, commands)), conn
        )

    async def run(self, operation: Operation[Any], conn: object = None) -> Any:
        raise NotImplementedError
