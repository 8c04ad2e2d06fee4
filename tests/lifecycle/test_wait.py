"""bus.wait and bus.wait_all: every outcome of a command that was sent plainly, in either bus."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import psycopg
import pytest

from commandbus import (
    BusClosedError,
    BusinessRuleException,
    CallTimeoutError,
    CommandBus,
    CommandCanceledError,
    CommandFailedError,
    CommandInTroubleshootingError,
    CommandNotFoundError,
    CommandStatus,
    HandlerRegistry,
    InvalidCommandError,
    InvalidOperationError,
    NewCommand,
    PermanentCommandError,
    Worker,
)
from commandbus.cli.exit_codes import ExitCode, code_for
from support.calling import LISTENERS, Caller, caller_of, listeners, until_listening
from support.waiting import one, until
from support.workers import quick_settings

SOON = 15.0
COMPLETED, PENDING = CommandStatus.COMPLETED, CommandStatus.PENDING


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
def held() -> threading.Event:
    return threading.Event()


@pytest.fixture
def start(
    database: str, bus: CommandBus, go_on: threading.Event, held: threading.Event
) -> Iterator[Callable[[], Worker]]:
    handlers = HandlerRegistry()
    handlers.register("orders", "echo", lambda command, ctx: command.data)

    @handlers.handler("orders", "refuse")
    def refuse(command: Any, ctx: Any) -> Any:
        raise BusinessRuleException("no such order", code="NO_ORDER")

    @handlers.handler("orders", "give_up")
    def give_up(command: Any, ctx: Any) -> Any:
        raise PermanentCommandError("the label is torn", code="TORN")

    @handlers.handler("orders", "hold")
    def hold(command: Any, ctx: Any) -> Any:
        held.set()
        assert go_on.wait(60)
        return command.data

    started: list[Worker] = []

    def start() -> Worker:
        started.append(Worker(handlers, settings=quick_settings(database), name="test"))
        started[-1].start()
        return started[-1]

    yield start
    go_on.set()
    for worker in started:
        worker.stop(wait=4)


def wait(caller: Caller, *args: Any, **kwargs: Any) -> Future[Any]:
    return caller._do(caller.bus.wait, *args, **kwargs)


def wait_all(caller: Caller, *args: Any, **kwargs: Any) -> Future[Any]:
    return caller._do(caller.bus.wait_all, *args, **kwargs)


def test_the_result_of_what_was_sent_before(
    caller: Caller, db: psycopg.Connection[Any], start: Any, go_on: threading.Event, held: threading.Event
) -> None:
    """It waits, it runs, it is done: each time the caller gets the result. The row is not changed."""
    sent = caller.send("orders", "hold", {"n": 1}, command_id="o-1")
    waiting = [
        wait(caller, "orders", "o-1"),
        wait(caller, sent),
        caller.call("orders", "hold", {"n": 1}, command_id="o-1"),
    ]
    until(lambda: listeners(db) == 1)
    start()
    assert held.wait(SOON)
    waiting.append(wait(caller, "orders", "o-1"))
    assert not any(each.done() for each in waiting)
    go_on.set()
    assert [each.result(SOON) for each in waiting] == [{"n": 1}] * 4
    assert wait(caller, sent, wait=0).result(SOON) == {"n": 1}
    assert one(db, "SELECT reply_to IS NULL FROM commandbus.command")
    assert not caller.send("orders", "hold", {"n": 1}, command_id="o-1").created


def test_a_receipt_waits_with_the_bus_that_gave_it(caller: Caller, bus: CommandBus, start: Any) -> None:
    """One, many, one with a key, one that was there before, one of a schedule, and a batch."""
    sent = [
        caller.send("orders", "echo", 1, command_id="o-1"),
        caller.send("orders", "echo", 1, command_id="o-1"),
        caller.send("orders", "echo", 2, unique="key"),
        *caller._do(
            caller.bus.send_many, "orders", [{"command_type": "echo", "data": n} for n in (3, 4)]
        ).result(),
    ]
    bus.schedules.create("orders", "nightly", cron="0 0 1 1 *", command_type="echo", data=5)
    sent.append(caller._do(caller.bus.schedules.run_now, "orders", "nightly").result())
    batch = caller._do(caller.bus.create_batch, "orders", [{"command_type": "echo"}] * 3).result()
    refused = caller.send("orders", "refuse")
    waiting = [caller._do(each.wait, wait="20s") for each in sent]
    whole = caller._do(batch.wait)
    start()
    assert [each.result(SOON) for each in waiting] == [1, 1, 2, 3, 4, 5]
    assert whole.result(SOON).completed == 3
    with pytest.raises(CommandFailedError, match="NO_ORDER"):
        caller._do(refused.wait).result(SOON)
    late = caller.send("orders", "echo", delay=600)
    with pytest.raises(CallTimeoutError):
        caller._do(late.wait, 0).result(SOON)


def test_a_receipt_is_a_value_without_its_bus(bus: CommandBus) -> None:
    sent, batch = bus.send("orders", "echo", command_id="o-1"), bus.create_batch("orders", [], batch_id="b")
    again = bus.send_many("orders", [NewCommand("echo", command_id="o-1")])[0]
    assert again == sent._replace(created=False) == ("orders", "o-1", sent.id, False, False)
    assert hash(sent) == hash(tuple(sent))
    assert (
        repr(sent) == f"SentCommand(domain='orders', command_id='o-1', id={sent.id}, created=True, replaced=False)"
    )
    for receipt in (sent, batch):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            copied = pickle.loads(pickle.dumps(receipt, protocol))
            assert (copied, type(copied), vars(copied)) == (receipt, type(receipt), {})
        assert copy.deepcopy(receipt) == receipt
        with pytest.raises(InvalidOperationError, match=r"does not know its bus.*bus\.wait\(sent\)"):
            copied.wait()
    assert isinstance(bus.wait_all([pickle.loads(pickle.dumps(sent))], wait=0)[0].id, int)


def test_a_bus_that_nobody_keeps_is_freed_with_its_receipts(database: str, bus: CommandBus) -> None:
    gc.collect()
    gc.disable()
    try:
        other = CommandBus(database)
        sent = [*other.send_many("orders", [NewCommand("echo")] * 2), other.send("orders", "echo")]
        freed = weakref.ref(other)
        other.close()
        del other
        assert freed() is not None
        del sent
        assert freed() is None
    finally:
        gc.enable()


def test_a_command_that_is_called_or_has_a_queue_of_its_own(caller: Caller, bus: CommandBus, start: Any) -> None:
    bus.create_queue("answers")
    caller.send("orders", "echo", 1, command_id="replied", reply_to="answers")
    called = caller.call("orders", "echo", 2, command_id="called")
    until(lambda: bus.get_command("orders", "called"))
    waiting = [wait(caller, "orders", name) for name in ("replied", "called")]
    start()
    assert [each.result(SOON) for each in (*waiting, called)] == [1, 2, 2]
    (reply,) = bus.queues.read("answers")
    assert reply.message["result"] == 1


def test_other_outcomes_raise(caller: Caller, bus: CommandBus, start: Any) -> None:
    sent = {name: caller.send("orders", name) for name in ("refuse", "give_up")}
    canceled = caller.send("orders", "echo", delay=600)
    waiting = wait(caller, canceled)
    bus.cancel("orders", canceled.command_id, operator="ann", reason="mistake")
    start()
    with pytest.raises(CommandCanceledError, match="mistake"):
        waiting.result(SOON)
    with pytest.raises(CommandFailedError, match="NO_ORDER") as raised:
        wait(caller, sent["refuse"]).result(SOON)
    assert raised.value.command_id == sent["refuse"].command_id
    assert code_for(raised.value) is ExitCode.NO
    with pytest.raises(CommandInTroubleshootingError, match="TORN"):
        wait(caller, sent["give_up"]).result(SOON)
    found = wait_all(caller, [*sent.values(), canceled]).result(SOON)
    assert [each.status for each in found] == ["FAILED", "IN_TROUBLESHOOTING_QUEUE", "CANCELED"]
    assert found[0].error_code == "NO_ORDER"


def test_many_come_in_order_within_one_wait(caller: Caller, bus: CommandBus, start: Any) -> None:
    sent = bus.send_many("orders", [{"command_type": "echo", "data": n} for n in range(450)])
    waiting = wait_all(caller, [*sent, sent[0][:2]], wait=30)
    start()
    found = waiting.result(60)
    assert [each.result for each in found] == [*range(450), 0]
    assert {each.status for each in found} == {COMPLETED}
    late = caller.send("orders", "echo", delay=600)
    began = time.monotonic()
    found = wait_all(caller, [sent[0], late, late], wait=0.3).result(SOON)
    assert [each.status for each in found] == [COMPLETED, PENDING, PENDING]
    assert time.monotonic() - began >= 0.3
    assert wait_all(caller, []).result(SOON) == []


def test_it_ends_in_its_own_time(caller: Caller) -> None:
    sent = caller.send("orders", "echo")
    began = time.monotonic()
    with pytest.raises(CallTimeoutError, match=r"bus\.wait\('orders', "):
        wait(caller, sent, wait="300ms").result(SOON)
    assert 0.3 <= time.monotonic() - began < 3


def test_what_does_not_exist_or_is_no_command_is_refused_at_once(
    caller: Caller, bus: CommandBus, database: str
) -> None:
    sent = caller.send("orders", "echo")
    with pytest.raises(CommandNotFoundError, match="'nobody' of domain 'orders' does not exist"):
        wait(caller, "orders", "nobody").result(SOON)
    with pytest.raises(CommandNotFoundError, match="'nobody'"):
        wait_all(caller, [sent, ("orders", "nobody")]).result(SOON)
    with psycopg.connect(database) as conn:
        uncommitted = bus.send("orders", "echo", command_id="uncommitted", conn=conn)
        with pytest.raises(CommandNotFoundError, match="not committed"):
            wait(caller, "orders", "uncommitted").result(SOON)
        with pytest.raises(CommandNotFoundError, match=r"was sent, but .* \(conn=\) is not committed yet"):
            uncommitted.wait()
    for wrong in (("orders",), (sent, "x"), (7, "x")):
        with pytest.raises(TypeError):
            wait(caller, *wrong).result(SOON)
    with pytest.raises(TypeError, match="names no command"):
        wait_all(caller, [7]).result(SOON)
    with pytest.raises(InvalidCommandError, match="wait"):
        wait(caller, sent, wait="soon").result(SOON)


def test_a_command_that_is_removed_meanwhile(caller: Caller, db: psycopg.Connection[Any]) -> None:
    waiting = wait(caller, caller.send("orders", "echo", delay=600))
    until_listening(db)
    db.execute("DELETE FROM commandbus.command")
    with pytest.raises(CommandNotFoundError, match="is gone"):
        waiting.result(SOON)


def test_it_goes_on_after_its_connection_was_ended(
    caller: Caller, db: psycopg.Connection[Any], start: Any, go_on: threading.Event
) -> None:
    start()
    waiting = wait_all(caller, [caller.send("orders", "hold", n) for n in range(3)])
    first = until_listening(db)
    assert one(db, "SELECT pg_terminate_backend(%s, 10000)", first)
    until_listening(db, not_pid=first)
    go_on.set()
    assert [each.result for each in waiting.result(SOON)] == [0, 1, 2]


def test_a_bus_that_is_closed_tells_those_who_wait(caller: Caller, db: psycopg.Connection[Any]) -> None:
    waiting = [wait(caller, caller.send("orders", "echo")), wait_all(caller, [caller.send("orders", "echo")])]
    until_listening(db)
    until(lambda: len(caller.bus._listening._listener._waiting) == len(waiting))  # the bus could be used again
    caller.close()
    for each in waiting:
        with pytest.raises(BusClosedError):
            each.result(SOON)


def test_many_waiters_share_few_statements(caller: Caller, db: psycopg.Connection[Any]) -> None:
    """Forty wait for one second and more: the listener looks for all of them at once, with growing pauses."""
    sent = [caller.send("orders", "echo", delay=600) for _ in range(40)]
    waiting = [wait(caller, each, wait=2) for each in sent]
    until_listening(db)
    queries: set[Any] = set()

    def looked() -> bool:
        query = f"SELECT query_start FROM pg_stat_activity WHERE {LISTENERS} AND query LIKE '%%outcomes%%'"
        queries.update(db.execute(query.encode()).fetchall())
        return all(each.done() for each in waiting)

    until(looked)
    assert len(queries) < 60  # one by one, it would be hundreds
    for each in waiting:
        with pytest.raises(CallTimeoutError):
            each.result(SOON)
