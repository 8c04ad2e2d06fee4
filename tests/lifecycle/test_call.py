"""bus.call: send and wait. Every outcome reaches the caller, in either bus, with a real worker behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from commandbus import (
    BusinessRuleException,
    CallError,
    CallTimeoutError,
    CommandBus,
    CommandCanceledError,
    CommandFailedError,
    CommandInTroubleshootingError,
    DuplicateCommandError,
    HandlerRegistry,
    InvalidCommandError,
    InvalidOperationError,
    PermanentCommandError,
    TransientCommandError,
    TroubleshootingQueue,
    UnknownDomainError,
    Worker,
)
from support.calling import Caller, caller_of, listeners
from support.waiting import one, statuses, until
from support.workers import AT_ONCE, quick_settings

MUCH_SOONER = 10.0  # seconds; the calls below would wait for 30


@pytest.fixture
def bus(database: str) -> Iterator[CommandBus]:
    with CommandBus(database) as bus:
        yield bus


@pytest.fixture(params=["sync", "async"])
def caller(request: pytest.FixtureRequest, database: str, bus: CommandBus) -> Iterator[Caller]:
    with caller_of(request.param, database) as caller:
        yield caller


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    go_on = threading.Event()
    yield go_on
    go_on.set()


@pytest.fixture
def ran() -> list[str]:
    return []


@pytest.fixture
def handlers(go_on: threading.Event, ran: list[str]) -> HandlerRegistry:
    handlers = HandlerRegistry()

    @handlers.handler("orders", "echo")
    def echo(command: Any, ctx: Any) -> Any:
        ran.append(command.command_id)
        return command.data

    @handlers.handler("orders", "refuse")
    def refuse(command: Any, ctx: Any) -> Any:
        raise BusinessRuleException("no such order", code="NO_ORDER")

    @handlers.handler("orders", "give_up")
    def give_up(command: Any, ctx: Any) -> Any:
        if not go_on.is_set():
            raise PermanentCommandError("the label is torn", code="TORN")
        return "mended"

    @handlers.handler("orders", "stumble", retry_policy=AT_ONCE)
    def stumble(command: Any, ctx: Any) -> Any:
        ran.append(command.command_id)
        raise TransientCommandError("try again")

    @handlers.handler("orders", "wait")
    def wait(command: Any, ctx: Any) -> Any:
        ran.append(command.command_id)
        while not go_on.is_set():
            ctx.sleep(0.01)
        return command.data

    @handlers.handler("orders", "transact")
    def transact(command: Any, ctx: Any) -> Any:
        with ctx.transaction() as tx:
            tx.complete({"in": "transaction"})

    return handlers


@pytest.fixture
def start(database: str, bus: CommandBus, handlers: HandlerRegistry) -> Iterator[Callable[[], Worker]]:
    started: list[Worker] = []

    def start() -> Worker:
        worker = Worker(handlers, settings=quick_settings(database, unknown_type_timeout=0.0), name="test")
        worker.start()
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.stop(wait=4)


@pytest.mark.parametrize("data", [{"order_no": 18, "ü": [1, 2.5, None]}, "text", 0, None])
def test_the_result_is_answered(caller: Caller, start: Any, data: Any) -> None:
    start()
    assert caller.call("orders", "echo", data).result() == data


def test_so_is_that_of_a_transaction(caller: Caller, start: Any) -> None:
    start()
    assert caller.call("orders", "transact").result() == {"in": "transaction"}


def test_a_refusal_is_an_error_that_carries_it(caller: Caller, start: Any) -> None:
    start()
    with pytest.raises(
        CommandFailedError, match=r"'o-1' of domain 'orders' failed \[NO_ORDER\].*no such order"
    ) as it:
        caller.call("orders", "refuse", command_id="o-1").result()
    assert isinstance(it.value, CallError)
    assert (it.value.domain, it.value.command_id) == ("orders", "o-1")
    assert (it.value.error_type, it.value.error_code) == ("BusinessRuleException", "NO_ORDER")
    assert it.value.error == "no such order"


def test_the_troubleshooting_queue_is_told_at_once(caller: Caller, start: Any) -> None:
    start()
    began = time.monotonic()
    with pytest.raises(CommandInTroubleshootingError, match=r"troubleshooting queue \[TORN\].*torn") as it:
        caller.call("orders", "give_up", command_id="o-1").result()
    assert time.monotonic() - began < MUCH_SOONER
    assert (it.value.domain, it.value.command_id, it.value.error_code) == ("orders", "o-1", "TORN")
    with pytest.raises(CommandInTroubleshootingError):  # asking again does not wait either
        caller.call("orders", "give_up", command_id="o-1").result()
    with pytest.raises(CommandInTroubleshootingError, match="UNKNOWN_COMMAND_TYPE"):
        caller.call("orders", "unheard_of").result()
    assert time.monotonic() - began < MUCH_SOONER


def test_attempts_that_are_tried_again_are_not_outcomes(caller: Caller, start: Any, ran: list[str]) -> None:
    start()
    with pytest.raises(CommandInTroubleshootingError, match="try again"):
        caller.call("orders", "stumble", command_id="o-1").result()
    assert ran == ["o-1"] * 3
    with pytest.raises(CommandInTroubleshootingError):
        caller.call("orders", "stumble", command_id="o-2", max_attempts=2).result()
    assert ran[3:] == ["o-2"] * 2


def test_after_the_operator_the_same_call_waits_for_the_outcome(
    caller: Caller, bus: CommandBus, start: Any, go_on: threading.Event
) -> None:
    start()
    for command_id in ("retried", "completed", "canceled"):
        with pytest.raises(CommandInTroubleshootingError):
            caller.call("orders", "give_up", command_id=command_id).result()
    go_on.set()
    tsq = TroubleshootingQueue(bus)
    tsq.operator_retry("orders", "retried", operator="kim")
    tsq.operator_complete("orders", "completed", {"by": "hand"}, operator="kim")
    tsq.operator_cancel("orders", "canceled", operator="kim", reason="sold out")
    assert caller.call("orders", "give_up", command_id="retried").result() == "mended"
    assert caller.call("orders", "give_up", command_id="completed").result() == {"by": "hand"}
    with pytest.raises(CommandCanceledError, match="canceled by kim: sold out"):
        caller.call("orders", "give_up", command_id="canceled").result()


def test_a_cancel_before_anybody_ran_it(caller: Caller, bus: CommandBus) -> None:
    waiting = caller.call("orders", "echo", command_id="o-1")
    until(lambda: bus.get_command("orders", "o-1"))
    bus.cancel("orders", "o-1", operator="kim", reason="changed their mind")
    with pytest.raises(CommandCanceledError, match=r"'o-1'.*canceled by kim: changed their mind") as it:
        waiting.result(MUCH_SOONER)
    assert (it.value.domain, it.value.command_id) == ("orders", "o-1")
    assert it.value.reason == "canceled by kim: changed their mind"


def test_a_cancel_of_what_runs(caller: Caller, bus: CommandBus, start: Any, ran: list[str]) -> None:
    start()
    waiting = caller.call("orders", "wait", command_id="o-1")
    until(lambda: ran)
    bus.cancel("orders", "o-1", operator="kim")
    with pytest.raises(CommandCanceledError, match="canceled by kim"):
        waiting.result(MUCH_SOONER)


def test_a_timeout_leaves_the_command_and_can_be_followed_by_the_same_call(
    caller: Caller, bus: CommandBus, start: Any
) -> None:
    with pytest.raises(CallTimeoutError, match=r"'o-1'.*after 0.05 s.*still there.*get_command") as it:
        caller.call("orders", "echo", 7, command_id="o-1", wait="50ms").result()
    assert isinstance(it.value, TimeoutError)
    assert (it.value.domain, it.value.command_id, it.value.seconds) == ("orders", "o-1", 0.05)
    with pytest.raises(CallTimeoutError):
        caller.call("orders", "echo", 7, command_id="o-1", wait=0).result()
    start()
    assert caller.call("orders", "echo", 7, command_id="o-1").result() == 7
    assert caller.call("orders", "echo", 7, command_id="o-1", wait=0).result() == 7  # the look at the end


def test_calls_with_one_command_id_share_its_outcome(
    caller: Caller, database: str, start: Any, go_on: threading.Event, ran: list[str]
) -> None:
    start()
    with caller_of("sync", database) as other:
        waiting = [it.call("orders", "wait", {"n": 1}, command_id="o-1") for it in (caller, caller, other)]
        until(lambda: ran)
        go_on.set()
        assert [each.result() for each in waiting] == [{"n": 1}] * 3
    assert caller.call("orders", "wait", {"n": 1}, command_id="o-1").result() == {"n": 1}
    assert ran == ["o-1"]


def test_other_content_under_the_same_id_is_refused(
    caller: Caller, db: psycopg.Connection[Any], start: Any
) -> None:
    start()
    caller.call("orders", "echo", 1, command_id="called").result()
    with pytest.raises(DuplicateCommandError, match="reply_to"):
        caller.send("orders", "echo", 1, command_id="called", reply_to="answers")
    with pytest.raises(DuplicateCommandError, match="data"):
        caller.call("orders", "echo", 2, command_id="called").result()


def test_a_call_with_the_id_of_an_earlier_send_waits_for_it(caller: Caller, ran: list[str], start: Any) -> None:
    caller.send("orders", "echo", 1, command_id="sent")
    waiting = caller.call("orders", "echo", 1, command_id="sent")
    start()
    assert waiting.result(MUCH_SOONER) == 1
    assert caller.call("orders", "echo", 2, command_id="called").result(MUCH_SOONER) == 2
    assert not caller.send("orders", "echo", 2, command_id="called").created
    assert ran == ["sent", "called"]


def test_a_transaction_of_the_caller_is_refused(
    caller: Caller, db: psycopg.Connection[Any], database: str
) -> None:
    with (
        psycopg.connect(database) as conn,
        pytest.raises(
            InvalidOperationError,
            match="takes no conn: a command does not run before its transaction is committed",
        ),
    ):
        caller.call("orders", "echo", conn=conn).result()
    assert statuses(db) == {}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"wait": None}, "wait: None"),
        ({"wait": "soon"}, "wait: 'soon'"),
        ({"wait": -1}, "wait: -1"),
        ({"timeout": "late"}, "timeout: 'late'"),
        ({"timeout": -1}, "timeout: -1"),
        ({"data": object()}, "data"),
        ({"command_type": ""}, "command_type"),
        ({"domain": "No Domain"}, "domain"),
    ],
)
def test_what_cannot_be_sent_is_refused(
    caller: Caller, db: psycopg.Connection[Any], wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidCommandError, match=said):
        caller.call(**{"domain": "orders", "command_type": "echo"} | wrong).result()
    assert statuses(db) == {}
    assert listeners(db) == 0


def test_an_unknown_domain(caller: Caller) -> None:
    with pytest.raises(UnknownDomainError):
        caller.call("nowhere", "echo").result()


def test_the_timeout_is_how_long_one_attempt_of_the_command_may_take(
    caller: Caller, bus: CommandBus, handlers: HandlerRegistry, start: Any
) -> None:
    @handlers.handler("orders", "dawdle", on_timeout="fail")
    def dawdle(command: Any, ctx: Any) -> Any:
        assert ctx.canceled.wait(20)
        ctx.raise_if_canceled()

    start()
    with pytest.raises(CommandFailedError, match="TIMEOUT"):
        caller.call("orders", "dawdle", command_id="o-1", timeout="100ms", headers={"a": 1}).result()
    record = bus.get_command("orders", "o-1")
    assert record is not None
    assert (record.timeout, record.headers) == (0.1, {"a": 1})


def test_nobody_else_can_send_what_only_a_call_sends(
    caller: Caller, bus: CommandBus, db: psycopg.Connection[Any], start: Any
) -> None:
    for send in (
        lambda: caller.send("orders", "echo", reply_to="!call"),
        lambda: bus.send_many("orders", [{"command_type": "echo", "reply_to": "!call"}]),
    ):
        with pytest.raises(InvalidCommandError, match="!call"):
            send()
    db.execute('SELECT pgmq.send(\'orders__commands\', \'{"command_type": "echo", "reply_to": "!call"}\')')
    start()
    until(lambda: one(db, "SELECT count(*) FROM commandbus.rejected_message"))
    assert "'!call' is not a queue name" in bus.rejected("orders")[0].reason
    assert statuses(db) == {}


def test_two_hundred_calls_at_once_on_one_bus(caller: Caller, db: psycopg.Connection[Any], start: Any) -> None:
    start()
    waiting = [caller.call("orders", "echo", n) for n in range(200)]
    assert [each.result() for each in waiting] == list(range(200))
    assert listeners(db) == 1
