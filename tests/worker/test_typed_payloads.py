"""Handlers whose first parameter is a type: the payload is read as that type before the handler is called."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import commandbus
from commandbus import (
    AsyncCommandBus,
    Command,
    CommandBus,
    CommandRecord,
    CommandStatus,
    ConfigurationError,
    DuplicateCommandError,
    HandlerRegistry,
    InvalidCommandError,
    InvalidPayloadError,
    NewCommand,
    Saga,
    Worker,
    handler,
    step,
)
from support.typed_orders import (
    ORDERS,
    Color,
    DataclassOrder,
    DictOrder,
    Item,
    ModelOrder,
    StructOrder,
)
from support.waiting import until, until_settled
from support.workers import AT_ONCE

if TYPE_CHECKING:
    from nowhere import Missing  # type: ignore[import-not-found]

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
NUT = {"name": "nut", "price": "0.10"}


def record(bus: CommandBus, command_id: str) -> CommandRecord:
    found = bus.get_command("orders", command_id)
    assert found is not None
    return found


def test_objects_are_sent_read_and_returned(
    bus: CommandBus, database: str, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    seen: list[Any] = []

    @handlers.handler(DataclassOrder)
    def by_class(order, ctx):  # type: ignore[no-untyped-def]
        seen.append((order, ctx.command.command_type))
        return order

    @handlers.handler("orders", "ship_model")
    async def by_annotation(order: ModelOrder, ctx: Any) -> Any:
        seen.append((order, ctx.command.command_type))
        return order

    class Methods:
        @handler(StructOrder, transaction=True)
        def alone(self, order: StructOrder, ctx: Any, tx: Any) -> Any:
            seen.append((order, tx.execute("SELECT %s::text", (ctx.command.command_type,)).fetchone()[0]))
            return order

    handlers.register_instance(Methods())
    sent = [bus.send(order, command_id=f"c{n}") for n, order in enumerate(ORDERS)]
    assert [(each.domain, each.created) for each in sent] == [("orders", True)] * 3
    start_worker(handlers)
    until_settled(db)
    assert sorted(seen, key=lambda each: each[1]) == [
        (ORDERS[0], "ship_dataclass"),
        (ORDERS[1], "ship_model"),
        (ORDERS[2], "ship_struct"),
    ]
    for n in range(3):
        found = record(bus, f"c{n}")
        assert (found.status, found.result) == (CommandStatus.COMPLETED, found.data)
    assert record(bus, "c1").data["orderNo"] == 17
    assert not bus.send(ORDERS[0], command_id="c0").created, "the same content has the same text"
    with pytest.raises(DuplicateCommandError):
        bus.send(DataclassOrder(18, []), command_id="c0")
    assert bus.call(ORDERS[0], wait=20) == record(bus, "c0").data

    async def asynchronous() -> Any:
        async with AsyncCommandBus(database) as other:
            await other.send(ORDERS[1], delay="1h")
            return await other.call(ORDERS[2], wait=20)

    assert asyncio.run(asynchronous()) == record(bus, "c2").data


def test_a_payload_that_does_not_fit_never_reaches_its_handler(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    called: list[Any] = []

    @handlers.handler("orders", "a")
    def a(order: DataclassOrder, ctx: Any) -> None:
        called.append(order)

    @handlers.handler("orders", "b", transaction=True)
    async def b(order: DictOrder, ctx: Any, tx: Any) -> None:
        called.append(order)

    @handlers.handler("orders", "c")
    def c(order: ModelOrder) -> None:
        called.append(order)

    bad = {"order_no": 1, "orderNo": 1, "items": [NUT, NUT, NUT, {"name": "bolt", "price": "cheap"}]}
    for name in "abc":
        bus.send("orders", name, bad if name == "c" else {k: v for k, v in bad.items() if k != "orderNo"},
                 command_id=name)  # fmt: skip
    with caplog.at_level(logging.INFO, "commandbus.worker"):
        start_worker(handlers, retry_policy=AT_ONCE)
        until_settled(db)
    assert called == []
    for name in "abc":
        found = record(bus, name)
        assert (found.status, found.error_code) == (CommandStatus.IN_TROUBLESHOOTING_QUEUE, "INVALID_PAYLOAD")
        assert "data.items[3].price" in (found.error or "")
        assert "cheap" in (found.error or "")
        assert found.charged_attempts == 1
        (attempt,) = bus.get_attempts("orders", name)
        assert (attempt.verdict, attempt.error_type, attempt.traceback) == (
            "PERMANENT",
            "InvalidPayloadError",
            None,
        )
        assert attempt.details[0]["path"] == "data.items[3].price"
    assert sum("ERROR" in each.levelname for each in caplog.records) == 3


def test_forms_that_stay_as_they_are(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """Annotated with our own types, under whatever name, or not at all: they get the command, or the context."""
    got: dict[str, Any] = {}

    def command_only(command: Command, ctx: Any) -> None:
        got["command"] = command

    def for_checkers(command: "commandbus.Command", ctx: "Missing") -> None:  # noqa: UP037
        got["quoted"] = command

    def anything(command: Any, ctx: Any) -> None:
        got["any"] = command

    def a_dict(command: dict[str, Any], ctx: Any) -> None:
        got["dict"] = command

    def lone(c: "Missing") -> None:  # noqa: UP037
        got["lone"] = c.command

    def bare(command, ctx):  # type: ignore[no-untyped-def]
        got["bare"] = command

    functions = {"command": command_only, "quoted": for_checkers, "any": anything, "dict": a_dict}
    for name, function in {**functions, "lone": lone, "bare": bare}.items():
        assert handlers.register("orders", name, function).function is function, "it is called directly"
        bus.send("orders", name, {"n": 1})
    start_worker(handlers)
    until_settled(db)
    assert {type(each) for each in got.values()} == {Command}
    assert len(got) == 6


@dataclass
class Later:
    """Its handler is registered before the class that it contains."""

    inner: Inner


registry = HandlerRegistry()


@registry.handler("orders", "later")
def takes_later(order: Later, ctx: Any) -> int:
    return order.inner.n


@registry.handler("orders", "unknown_yet")
def takes_unknown(order: NotYet, ctx: Any) -> int:
    return order.n


def takes_more(more: int, order: Inner, ctx: Any) -> int:
    return order.n + more


@dataclass
class Inner:
    n: int


NotYet = Inner
registry.register("orders", "partial", functools.partial(takes_more, 1))


def test_annotations_are_resolved_when_their_names_exist() -> None:
    registry.resolve()
    for name, data, result in (
        ("later", {"inner": {"n": 3}}, 3),
        ("unknown_yet", {"n": 4}, 4),
        ("partial", {"n": 5}, 6),
    ):
        command = Command("orders", name, "c", data)
        assert registry.dispatch(command, None) == result
        with pytest.raises(InvalidPayloadError, match=r"data\.m: is not a field"):
            registry.dispatch(Command("orders", name, "c", data | {"m": 1}), None)


def test_an_annotation_that_nobody_can_resolve_is_named_when_the_worker_starts(
    database: str, bus: CommandBus
) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("orders", "x")
    def ship(order: Missing, ctx: Any) -> None:
        raise AssertionError

    with pytest.raises(ConfigurationError, match=r"annotation 'Missing' of handler '.*ship' cannot be resolved"):
        Worker(handlers, database_url=database).start()

    @dataclass
    class Photo:
        pixels: bytes

    handlers = HandlerRegistry()
    handlers.register("orders", "y", _with_annotation(Photo))
    with pytest.raises(ConfigurationError, match=r"annotation 'Photo' of handler .*field 'pixels' of .*bytes"):
        Worker(handlers, database_url=database).start()


def _with_annotation(kind: type) -> Any:
    def show(photo, ctx):  # type: ignore[no-untyped-def]
        raise AssertionError

    show.__annotations__ = {"photo": kind}
    return show


def test_handlers_by_class_are_checked() -> None:
    with pytest.raises(TypeError, match=r"Item is not marked with @commandbus\.command"):
        HandlerRegistry().handler(Item)
    handlers = HandlerRegistry()
    handlers.handler(DataclassOrder)(lambda order, ctx: order)
    with pytest.raises(commandbus.DuplicateHandlerError, match="ship_dataclass"):
        handlers.handler("orders", "ship_dataclass")(lambda order, ctx: order)
    with pytest.raises(TypeError, match="json_default must be a function"):
        HandlerRegistry(json_default=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [DataclassOrder, list[ModelOrder]])
def test_a_chunk_handler_gets_commands(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"gets a list of commands, .*: annotate it with list\[Command\]"):
        HandlerRegistry().register("orders", "many", _with_annotation(kind), chunk=10)
    HandlerRegistry().register("orders", "many", _with_annotation(list[Command]), chunk=10)


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents


def test_the_applications_own_types(database: str, bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    def to_cents(value: Any) -> Any:
        if isinstance(value, Money):
            return {"cents": value.cents}
        raise TypeError(f"{type(value).__name__} is not known here")

    handlers = HandlerRegistry(json_default=to_cents)

    @handlers.handler("orders", "pay")
    def pay(command: Any, ctx: Any) -> Any:
        return Money(command.data["cents"] + 1)

    @handlers.handler("orders", "pay_tx")
    def pay_tx(command: Any, ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.complete([Money(5)])

    with CommandBus(database, json_default=to_cents) as own:
        own.send("orders", "pay", Money(4), command_id="one")
        own.send_many("orders", [{"command_type": "pay", "data": Money(5), "command_id": "two"}])
        own.create_batch("orders", [NewCommand("pay", Money(6), command_id="three")])
        own.send("orders", "pay_tx", command_id="four")
        with pytest.raises(InvalidCommandError, match="data is not JSON: object is not known here"):
            own.send("orders", "pay", object())  # type: ignore[call-overload]
        schedule = own.schedules.create("orders", "yearly", every="365d", data={"m": Money(1)})  # type: ignore[dict-item]
        assert schedule.data == {"m": {"cents": 1}}
        own.schedules.delete("orders", "yearly")
    with pytest.raises(InvalidCommandError, match=r"at \$: Money\); send what JSON knows .*json_default"):
        bus.send("orders", "pay", Money(4))  # type: ignore[call-overload]
    start_worker(handlers)
    until_settled(db)
    results = [record(bus, name).result for name in ("one", "two", "three", "four")]
    assert results == [{"cents": 5}, {"cents": 6}, {"cents": 7}, [{"cents": 5}]]


def test_sagas_and_schedules_take_objects(bus: CommandBus, database: str) -> None:
    handlers = HandlerRegistry()
    seen: list[Any] = []

    @handlers.handler("orders", "pack")
    def pack(order: DataclassOrder, ctx: Any) -> Color:
        seen.append(order)
        return order.color

    saga = Saga("packing", step("pack", "orders", data=lambda state: DataclassOrder(state["count"], [])))
    handlers.register_process(saga)
    handlers.schedule("orders", "nightly", every="365d", command_type="pack", data=ORDERS[0])(pack)
    bus.create_domain("processes")
    bus.start_process(saga, Item("nut", Decimal(3), count=4), process_id="p")
    with Worker(handlers, database_url=database):
        until(lambda: bus.schedules.get("orders", "nightly") is not None)
        bus.schedules.run_now("orders", "nightly")
        until(lambda: len(seen) >= 2)
    assert DataclassOrder(4, []) in seen
    assert ORDERS[0] in seen
