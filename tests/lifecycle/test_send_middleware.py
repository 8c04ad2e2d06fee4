"""Middleware around what a bus sends: each command once, in order, in either bus, whatever sends it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from commandbus import (
    AsyncCommandBus,
    CommandBus,
    ConfigurationError,
    DuplicateCommandError,
    HandlerRegistry,
    InvalidCommandError,
    MiddlewareError,
    NewCommand,
    SentCommand,
    Worker,
    command,
)
from support.calling import Caller, caller_of
from support.workers import quick_settings

trace: ContextVar[str] = ContextVar("trace", default="none")


@pytest.fixture
def bus(database: str) -> Iterator[CommandBus]:
    with CommandBus(database) as bus:
        yield bus


@pytest.fixture(params=["sync", "async"])
def caller(request: pytest.FixtureRequest, database: str, bus: CommandBus) -> Iterator[Caller]:
    with caller_of(request.param, database) as caller:
        yield caller


def is_async(caller: Caller) -> bool:
    return isinstance(caller.bus, AsyncCommandBus)


def noting(caller: Caller, name: str, did: list[Any]) -> Callable[..., Any]:
    """A middleware of the bus's own kind, which marks the command."""

    def sync(domain: str, new: NewCommand, call_next: Any) -> Any:
        new.headers[name] = len(did)  # type: ignore[index]
        did.append((name, domain, new.command_type))
        receipt = call_next()
        did.append((name, type(receipt).__name__))
        return receipt

    async def asynchronous(domain: str, new: NewCommand, call_next: Any) -> Any:
        new.headers[name] = len(did)  # type: ignore[index]
        did.append((name, domain, new.command_type))
        receipt = await call_next()
        did.append((name, type(receipt).__name__))
        return receipt

    return asynchronous if is_async(caller) else sync


def do(caller: Caller, method: str, *args: Any, **kwargs: Any) -> Any:
    return caller._do(getattr(caller.bus, method), *args, **kwargs).result(20)


def test_every_way_to_send_goes_through_once_in_order(caller: Caller, bus: CommandBus, database: str) -> None:
    did: list[Any] = []

    def steps(domain: str, new: NewCommand) -> Iterator[None]:
        new.correlation_id = "c-1"
        receipt: Any = yield
        did.append(("steps", type(receipt).__name__))

    caller.bus.middleware(noting(caller, "a", did))
    caller.bus.middleware(steps)
    caller.bus.middleware(noting(caller, "b", did))
    single = [("a", "orders", "ship"), ("b", "orders", "ship"), ("b", "SentCommand"), ("steps", "SentCommand"),
              ("a", "SentCommand")]  # fmt: skip
    bulk = [(each[0], "NoneType") if len(each) == 2 else each for each in single]
    given = NewCommand("ship", headers={"own": 1})

    assert do(caller, "send", "orders", "ship", {"n": 1}, command_id="sent").created
    assert did == single
    did.clear()
    assert do(caller, "send", "orders", "ship", command_id="within", within=20).command_id == "within"
    assert did == single
    did.clear()
    assert caller._do(caller.bus.commands.save, "orders", given).result(20).created
    assert (did, given) == (single, NewCommand("ship", headers={"own": 1}))
    did.clear()
    many = do(caller, "send_many", "orders", ({"command_type": "ship", "data": n} for n in range(3)), chunk_size=2)
    assert len(many) == 3
    assert did == bulk * 3
    did.clear()
    batch = do(caller, "create_batch", "orders", [NewCommand("ship")] * 2, is_open=True)
    assert do(caller, "add_to_batch", "orders", batch.batch_id, [NewCommand("ship")]) == 1
    assert did == bulk * 3
    did.clear()
    handlers = HandlerRegistry()
    handlers.register("orders", "ship", lambda command, ctx: [command.headers, command.correlation_id])
    with Worker(handlers, settings=quick_settings(database)):
        assert do(caller, "call", "orders", "ship", wait=20) == [{"a": 0, "b": 1}, "c-1"]
    assert did == single
    records = bus.query_commands(domain="orders", limit=50)
    assert len(records.items) == 10
    assert all(record.headers and {"a", "b"} <= record.headers.keys() for record in records)
    assert {record.correlation_id for record in records} == {"c-1"}


@command("orders", "typed")
@dataclass
class Typed:
    """A command that is sent as an object."""

    n: int


def test_objects_go_through_as_they_are_and_handlers_get_them_inside(
    caller: Caller, bus: CommandBus, database: str
) -> None:
    seen: list[Any] = []

    def noting(domain: str, new: NewCommand) -> Iterator[None]:
        seen.append((domain, new.command_type, new.data))
        yield

    caller.bus.middleware(noting)
    sent = [do(caller, "send", Typed(1)), *do(caller, "send_many", "orders", [Typed(2)])]
    assert seen == [("orders", "typed", Typed(n)) for n in (1, 2)]
    handlers = HandlerRegistry()

    @handlers.middleware
    def wrapped(command: Any, ctx: Any, call_next: Any) -> Any:
        return [command.data, call_next()]

    @handlers.handler(Typed)
    def handle(payload: Typed) -> int:
        return payload.n + 10

    with Worker(handlers, settings=quick_settings(database)):
        assert [bus.wait(each) for each in sent] == [[{"n": 1}, 11], [{"n": 2}, 12]]


def test_an_error_refuses_the_command_and_nothing_is_sent(caller: Caller, bus: CommandBus) -> None:
    did: list[Any] = []

    def guard(domain: str, new: NewCommand) -> Iterator[None]:
        if new.data == "bad":
            raise PermissionError(f"{new.command_type} is not for you")
        try:
            yield
        except DuplicateCommandError as error:
            did.append(error.command_id)
            raise

    caller.bus.middleware(guard)
    with pytest.raises(PermissionError, match="ship is not for you"):
        do(caller, "send", "orders", "ship", "bad")
    with pytest.raises(PermissionError) as raised:
        do(caller, "send_many", "orders", [NewCommand("ship"), NewCommand("ship", "bad")])
    assert "command 2 of those to be sent" in raised.value.__notes__[0]
    with pytest.raises(PermissionError):
        do(caller, "create_batch", "orders", [NewCommand("ship"), NewCommand("ship", "bad")])
    with pytest.raises(PermissionError):
        do(caller, "call", "orders", "ship", "bad")
    assert bus.query_commands().items == []
    with pytest.raises(InvalidCommandError, match="command 2 of send_many"):
        do(caller, "send_many", "orders", [NewCommand("ship"), 7])
    do(caller, "send", "orders", "ship", 1, command_id="x")
    with pytest.raises(DuplicateCommandError):
        do(caller, "send", "orders", "ship", 2, command_id="x")
    assert did == ["x"]


def test_no_command_is_lost_without_an_error(caller: Caller, bus: CommandBus, database: str) -> None:
    """A middleware that does not call call_next, forgets `await`, or swallows the error of the send."""
    first = bus.send("orders", "first")

    def odd(domain: str, new: NewCommand, call_next: Any) -> Any:
        if new.data == "cached":
            return first
        if new.data == "swallow":
            with contextlib.suppress(Exception):
                call_next()
        if new.data == "twice":
            call_next()
            call_next()
        return None

    async def odd_async(domain: str, new: NewCommand, call_next: Any) -> Any:
        if new.data == "cached":
            return first
        if new.data == "swallow":
            with contextlib.suppress(Exception):
                await call_next()
        if new.data == "twice":
            await call_next()
            await call_next()
        if new.data == "forget":
            call_next()
        return None

    caller.bus.middleware(odd_async if is_async(caller) else odd)
    with pytest.raises(MiddlewareError, match="has returned without having sent the command of type 'ship'"):
        do(caller, "send", "orders", "ship", "skip")
    with pytest.raises(MiddlewareError, match="swallowed the error"):
        do(caller, "send", "nowhere", "ship", "swallow")
    with pytest.raises(MiddlewareError):
        do(caller, "send_many", "orders", [NewCommand("ship", "skip")])
    if is_async(caller):
        with pytest.raises(MiddlewareError, match="without `await`"):
            do(caller, "send", "orders", "ship", "forget")
    assert len(bus.query_commands().items) == 1
    assert do(caller, "send", "orders", "ship", "cached") == first
    handlers = HandlerRegistry()
    handlers.register("orders", "first", lambda ctx: "first")
    with Worker(handlers, settings=quick_settings(database)):
        assert do(caller, "call", "orders", "ship", "cached") == "first"
    with pytest.raises(MiddlewareError, match="twice"):
        do(caller, "send", "orders", "ship", "twice")


def test_a_trace_goes_from_bus_to_handler_to_the_next_command(database: str, bus: CommandBus) -> None:
    """A registry has both halves; the bus that a handler sends with uses it, too."""
    handlers = HandlerRegistry()
    own = CommandBus(database, middleware=handlers)  # before anything is registered
    seen: list[tuple[str, str]] = []

    @handlers.send_middleware
    def tracing(domain: str, new: NewCommand) -> Iterator[None]:
        new.headers.setdefault("traceparent", trace.get())  # type: ignore[union-attr]
        yield

    @handlers.middleware
    def traced(command: Any, ctx: Any) -> Iterator[None]:
        token = trace.set((command.headers or {}).get("traceparent", "lost"))
        yield
        trace.reset(token)

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> None:
        seen.append(("ship", trace.get()))
        with ctx.transaction() as tx:
            own.send("orders", "bill", conn=tx)

    @handlers.handler("orders", "bill")
    async def bill(command: Any, ctx: Any) -> None:
        seen.append(("bill", trace.get()))

    for n in range(3):
        trace.set(f"t-{n}")
        own.send("orders", "ship")
    Worker(handlers, settings=quick_settings(database)).run(until_idle=True)
    own.close()
    assert sorted(seen) == [(kind, f"t-{n}") for kind in ("bill", "ship") for n in range(3)]


def test_the_headers_of_a_trace_are_no_content(caller: Caller, bus: CommandBus) -> None:
    """A sender that tries again does so in another span: the command is the same. Other headers count."""
    spans = iter(range(100))

    def tracing(domain: str, new: NewCommand) -> Iterator[None]:
        new.headers["traceparent"] = f"00-{next(spans)}"  # type: ignore[index]
        yield

    caller.bus.middleware(tracing)
    assert do(caller, "send", "orders", "ship", 1, command_id="o").created
    assert not do(caller, "send", "orders", "ship", 1, command_id="o").created
    assert not bus.send("orders", "ship", 1, command_id="o").created
    pair = [NewCommand("ship", 1, "m"), NewCommand("ship", 1, "m")]
    assert len({each.id for each in do(caller, "send_many", "orders", pair)}) == 1
    assert do(caller, "create_batch", "orders", [NewCommand("ship")], batch_id="b").created
    assert not do(caller, "create_batch", "orders", [NewCommand("ship")], batch_id="b").created
    with pytest.raises(DuplicateCommandError, match="headers"):
        do(caller, "send", "orders", "ship", 1, command_id="o", headers={"tenant": 2})
    with pytest.raises(DuplicateCommandError, match="headers"):
        bus.send_many("orders", [NewCommand("ship", 1, "t", headers={"t": n}) for n in (1, 2)])


def test_without_headers_of_its_own_a_command_has_none(database: str, bus: CommandBus) -> None:
    def nothing(domain: str, new: NewCommand) -> Iterator[None]:
        yield

    with CommandBus(database, middleware=[nothing]) as own, psycopg.connect(database) as conn:
        sent = own.send("orders", "ship", conn=conn)
        own.send("orders", "ship", conn=conn, headers={})
        rows = conn.execute("SELECT headers FROM commandbus.command ORDER BY id").fetchall()
        assert rows == [(None,), ({},)]
        assert isinstance(sent, SentCommand)
        with pytest.raises(InvalidCommandError, match="headers"):
            own.send("orders", "ship", headers=7, conn=conn)  # type: ignore[arg-type]


def test_what_cannot_be_around_a_send_is_refused(database: str) -> None:
    async def asynchronous(domain: str, new: NewCommand, call_next: Any) -> Any:
        return await call_next()

    def sync(domain: str, new: NewCommand, call_next: Any) -> Any:
        return call_next()

    with pytest.raises(ConfigurationError, match=r"asynchronous is written with `async def`, but this CommandBus"):
        CommandBus(database, middleware=[asynchronous])
    with pytest.raises(ConfigurationError, match=r"sync is written with `def`, but this AsyncCommandBus is async"):
        AsyncCommandBus(database, middleware=[sync])
    with pytest.raises(TypeError, match="must be a list of functions or a HandlerRegistry, not 7"):
        CommandBus(database, middleware=7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"it must take \(domain, new, call_next\)"):
        CommandBus(database, middleware=[lambda new: None])
    handlers = HandlerRegistry()
    handlers.send_middleware(only="async")(asynchronous)
    handlers.send_middleware(only="sync")(sync)
    other = HandlerRegistry()
    other.include(handlers)
    with CommandBus(database, middleware=other) as bus:
        bus.create_domain("orders")
        assert bus.send("orders", "ship").created
    handlers.send_middleware(lambda domain, new, call_next: call_next())
    assert len(other._send_middleware) == 2
