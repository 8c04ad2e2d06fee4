"""Breakers in a running worker: five stuck attempts open one, one probe is tried, others go on."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import (
    BusinessRuleException,
    CommandBus,
    CommandStatus,
    HandlerRegistry,
    NewCommand,
    PermanentCommandError,
    Worker,
)
from commandbus.model.breaker import Breaker
from commandbus.model.outcome import Failure, Judgement, Verdict
from commandbus.settings import Settings
from commandbus.worker.breakers import BreakerReport, report_of
from support.waiting import one, until, verdicts
from support.workers import add, done, either

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
ON = {"breakers_enabled": True, "max_attempts": 1, "task_timeout": 0.3, "cancel_grace": 0.2}
QUICK_RESET = Breaker(stuck=2, reset=0.5)
FAR = Breaker(stuck=2, reset="1h")


def state(db: Db, kind: str = "hang") -> str | None:
    row = db.execute("SELECT state FROM commandbus.breaker WHERE command_type = %s", (kind,)).fetchone()
    return None if row is None else row[0]


def moves(db: Db) -> list[str]:
    rows = db.execute("SELECT action FROM commandbus.control_action WHERE operator = 'commandbus' ORDER BY id")
    return [action for (action,) in rows]


def is_parked(bus: CommandBus, command_id: str) -> bool:
    record = bus.get_command("orders", command_id)
    return record is not None and record.waiting_for == "breaker"


def status(bus: CommandBus, command_id: str) -> CommandStatus:
    record = bus.get_command("orders", command_id)
    assert record is not None
    return record.status


def test_five_stuck_attempts_open_it_the_sixth_command_is_parked_and_others_go_on(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Seed 001 (circuit breaker), with the figures that hold by default."""
    caplog.set_level(logging.INFO, "commandbus")

    @handlers.handler("orders", "hang")
    def hang(ctx: Any) -> None:
        go_on.wait(60)

    @handlers.handler("orders", "quick")
    def quick(ctx: Any) -> str:
        return "done"

    start_worker(handlers, **ON)
    for n in range(5):
        assert state(db) in (None, "CLOSED")
        bus.send("orders", "hang", command_id=f"h{n}")
        until(lambda n=n: status(bus, f"h{n}") is CommandStatus.IN_TROUBLESHOOTING_QUEUE)  # type: ignore[misc]
    until(lambda: state(db) == "OPEN")
    db.execute("UPDATE commandbus.breaker SET until = until + interval '1 hour'")  # for a slow machine
    bus.send("orders", "hang", command_id="sixth")
    until(lambda: is_parked(bus, "sixth"))
    record = bus.get_command("orders", "sixth")
    assert record is not None
    assert record.waiting_note is not None
    assert record.waiting_note.startswith("breaker open: 5 of 5 attempts stuck since ")
    assert "(5 commands), the last: ExecutionStuck: did not respond" in record.waiting_note
    assert verdicts(db, "sixth") == [(1, "PARKED")]
    assert bus.call("orders", "quick", wait=20) == "done"
    (info,) = bus.breakers()
    assert (info.name, info.state, info.stuck, info.parked) == ("orders/hang", "OPEN", 5, 1)
    assert any("the breaker of orders/hang is open: 5 of 5 attempts stuck" in line for line in caplog.messages)
    assert moves(db) == ["OPEN"]


def test_it_closes_when_the_probe_completes(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    """Two workers, in either lane; what a handler completes in its own transaction counts as well."""
    begun: Counter[str] = Counter()
    is_well = threading.Event()

    async def work(command: Any, ctx: Any) -> Any:
        begun[command.command_id] += 1
        if is_well.is_set():
            return "done"
        if lane == "sync":
            go_on.wait(60)
        while not go_on.is_set():  # the async lane: it swallows its cancellation, as the worst do
            try:
                await asyncio.sleep(0.05)
            except BaseException:
                continue
        return None

    add(handlers, lane, "hang", work)
    more = ON | {"breakers": {"orders/hang": QUICK_RESET}}
    for _ in range(2):
        start_worker(handlers, **more)
    bus.send_many("orders", [NewCommand("hang", command_id=f"h{n}") for n in range(2)])
    until(lambda: state(db) == "OPEN")
    is_well.set()
    bus.send_many("orders", [NewCommand("hang", command_id=f"s{n}") for n in range(30)])
    until(lambda: all(status(bus, f"s{n}") is CommandStatus.COMPLETED for n in range(30)))
    assert state(db) == "CLOSED"
    assert {begun[f"s{n}"] for n in range(30)} == {1}
    assert moves(db)[0] == "OPEN"
    assert moves(db)[-1] == "CLOSE"
    assert moves(db).count("CLOSE") == 1
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 0


def test_a_stuck_probe_opens_it_again_and_only_one_runs_at_a_time(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """Three workers and many parked commands: no two of them are ever tried at once."""
    inside = 0
    most = 0
    lock = threading.Lock()
    is_counting = threading.Event()

    @handlers.handler("orders", "hang")
    def hang(ctx: Any) -> None:
        nonlocal inside, most
        if not is_counting.is_set():
            go_on.wait(60)
            return
        with lock:
            inside += 1
            most = max(most, inside)
        ctx.canceled.wait(20)
        with lock:
            inside -= 1  # before it is given up: from then on another one may begin
        go_on.wait(60)

    more = ON | {"breakers": {"orders/hang": QUICK_RESET}}
    for _ in range(3):
        start_worker(handlers, **more)
    bus.send_many("orders", [NewCommand("hang") for _ in range(2)])
    until(lambda: state(db) == "OPEN")
    is_counting.set()
    bus.send_many("orders", [NewCommand("hang") for _ in range(30)])
    until(lambda: moves(db).count("OPEN") >= 4, 40, what=lambda: moves(db))
    assert most == 1
    found = moves(db)
    assert found[:6] == ["OPEN", "HALF_OPEN", "OPEN", "HALF_OPEN", "OPEN", "HALF_OPEN"], found
    assert (bus.breakers()[0].reason or "").startswith("its probe got stuck: ExecutionStuck")


@pytest.mark.parametrize(
    "ending", ["completes", "in_transaction", "business_rule", "permanent", "fails", "notes"], ids=str
)
def test_how_a_probe_may_end_well(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str, ending: str
) -> None:
    """Whatever does not count against the type: it has ended, and did not hang."""

    async def work(command: Any, ctx: Any) -> Any:
        if ending == "business_rule":
            raise BusinessRuleException("no")
        if ending == "permanent":
            raise PermanentCommandError("no")
        if ending == "fails":
            raise ValueError("no")
        if ending in ("in_transaction", "notes"):
            async with either(ctx.transaction()) as tx:
                await done(tx.execute("SELECT 1"))
            if ending == "notes":
                raise ValueError("too late")
            return None
        return "done"

    add(handlers, lane, "hang", work)
    bus.send("orders", "hang", command_id="probe")
    bus.open_breaker("orders", "hang", operator="ann")
    start_worker(handlers, **ON)
    until(lambda: is_parked(bus, "probe"))
    db.execute("UPDATE commandbus.breaker SET is_forced = false, until = now()")
    until(lambda: state(db) == "CLOSED")
    assert moves(db) == ["HALF_OPEN", "CLOSE"]
    until(lambda: status(bus, "probe").is_final or status(bus, "probe") is CommandStatus.IN_TROUBLESHOOTING_QUEUE)


def test_failures_open_it_where_they_are_counted(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    errors: dict[str, Exception] = {
        "rule": BusinessRuleException("no"),
        "permanent": PermanentCommandError("no"),
        "error": ValueError("the carrier's answer made no sense"),
    }

    async def work(command: Any, ctx: Any) -> None:
        raise errors[command.data]

    add(handlers, lane, "fail", work)
    start_worker(handlers, **ON, breakers={"*": Breaker(stuck=0, failures=4, reset="1h")})
    for kind in ("rule", "permanent"):
        bus.send_many("orders", [NewCommand("fail", kind) for _ in range(5)])
    until(lambda: one(db, "SELECT count(*) FROM commandbus.attempt") == 10)
    assert state(db, "fail") is None
    bus.send_many("orders", [NewCommand("fail", "error") for _ in range(4)])
    until(lambda: state(db, "fail") == "OPEN")
    reason = bus.breakers()[0].reason or ""
    assert re.match(
        r"4 of \d+ attempts failed since .* UTC \(4 commands\), the last: ValueError: the carrier", reason
    )


@pytest.mark.parametrize("how", ["off", "disabled"])
def test_one_that_is_off_counts_nothing(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: threading.Event,
    how: str,
) -> None:
    @handlers.handler("orders", "hang")
    def hang(ctx: Any) -> None:
        go_on.wait(60)

    more: dict[str, Any] = {"breakers": {"*": Breaker.off()}} if how == "off" else {"breakers_enabled": False}
    start_worker(handlers, **ON | more)
    bus.send_many("orders", [NewCommand("hang", command_id=f"h{n}") for n in range(6)])
    until(lambda: all(status(bus, f"h{n}") is CommandStatus.IN_TROUBLESHOOTING_QUEUE for n in range(6)))
    assert state(db) is None


def test_a_worker_without_breakers_looks_after_one_that_is_open(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    """Somebody else had them on. Else its commands would wait for ever."""
    handlers.register("orders", "hang", lambda ctx: "done")
    bus.send("orders", "hang", command_id="c")
    bus.open_breaker("orders", "hang", operator="ann")
    start_worker(handlers)
    until(lambda: is_parked(bus, "c"))
    db.execute("UPDATE commandbus.breaker SET is_forced = false, until = now()")
    until(lambda: state(db) == "CLOSED")
    until(lambda: status(bus, "c") is CommandStatus.COMPLETED)
    assert moves(db) == ["HALF_OPEN", "CLOSE"]
    assert verdicts(db, "c") == [(1, "PARKED")]


def test_what_was_cancelled_or_stopped_with_its_worker_does_not_count(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    begun = threading.Semaphore(0)

    @handlers.handler("orders", "hang", timeout=60)
    def hang(ctx: Any) -> None:
        begun.release()
        go_on.wait(60)

    worker = start_worker(handlers, **ON | {"breakers": {"*": Breaker(stuck=1, failures=1)}})
    for n in range(2):
        bus.send("orders", "hang", command_id=f"h{n}")
        assert begun.acquire(timeout=20)
    bus.cancel("orders", "h0")
    until(lambda: status(bus, "h0") is CommandStatus.CANCELED)
    worker.stop(wait=4)
    assert verdicts(db, "h1") == [(1, "WAIVED")]
    assert state(db) is None


def test_word_waits_while_the_database_refuses_it(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    go_on: threading.Event,
    database: str,
) -> None:
    """The keeper is thrown off the server before it can tell of the stuck attempt: it is told afterwards."""

    @handlers.handler("orders", "hang")
    def hang(ctx: Any) -> None:
        go_on.wait(60)

    worker = start_worker(handlers, **ON, breakers={"*": Breaker(stuck=1)})
    with psycopg.connect(database) as blocker:
        blocker.execute("LOCK TABLE commandbus.breaker IN EXCLUSIVE MODE")  # claims read it still
        bus.send("orders", "hang", command_id="h")
        until(lambda: status(bus, "h") is CommandStatus.IN_TROUBLESHOOTING_QUEUE)
        waits = (
            "SELECT pid FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'commandbus %% maintenance' "
            "AND datname = current_database() AND wait_event_type = 'Lock'"
        )
        until(lambda: db.execute(waits).fetchone())
        assert one(db, f"SELECT pg_terminate_backend(({waits}))".replace("%%", "%"))
    until(lambda: state(db) == "OPEN")
    assert worker.is_running


def test_one_whose_queue_is_gone_does_not_disturb_the_leases(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    begun = threading.Event()

    @handlers.handler("orders", "slow", timeout=60)
    def slow(ctx: Any) -> str:
        begun.set()
        go_on.wait(60)
        return "done"

    bus.create_domain("gone")
    bus.open_breaker("gone", "hang", operator="ann")
    handlers.register("gone", "hang", lambda ctx: None)
    start_worker(handlers, domains=["orders"], visibility_timeout=1.5, statement_timeout=1.0)
    bus.send("orders", "slow", command_id="c")
    assert begun.wait(60)
    db.execute("UPDATE commandbus.breaker SET is_forced = false, until = now(), domain = 'orders'")
    db.execute("ALTER TABLE commandbus.parked RENAME TO parked_away")
    until(lambda: any("breakers cannot be checked now" in line for line in caplog.messages))
    db.execute("ALTER TABLE commandbus.parked_away RENAME TO parked")
    renewed = one(db, "SELECT vt FROM pgmq.q_orders__commands")
    until(lambda: one(db, "SELECT vt FROM pgmq.q_orders__commands") > renewed)
    go_on.set()
    until(lambda: status(bus, "c") is CommandStatus.COMPLETED)


@pytest.mark.parametrize(
    ("verdict", "failure", "is_probe", "expected"),
    [
        (Verdict.EXHAUSTED, Failure("ExecutionStuck", "EXECUTION_STUCK", "x", rung="stuck"), False, "stuck"),
        (Verdict.TIMED_OUT, Failure("ExecutionStuck", "EXECUTION_STUCK", "x", rung="kill"), False, "stuck"),
        (Verdict.RETRY, Failure("WorkerLost", "WORKER_LOST", "x", rung="crash"), False, "stuck"),
        (Verdict.RETRY, Failure("DeadlineExceededError", "TIMEOUT", "x", rung="deadline"), False, None),
        (Verdict.RETRY, Failure("ValueError", "ERROR", "x"), False, None),
        (Verdict.RETRY, Failure("ValueError", "ERROR", "x"), True, "good"),
        (Verdict.RETRY, Failure("IsolationFailed", "ISOLATION_FAILED", "x"), True, None),
        (Verdict.CANCELED, Failure("OperatorCancel", "CANCELED", "x", rung="stuck"), True, None),
        (Verdict.UNKNOWN_TYPE, Failure("UnknownCommandTypeError", "UNKNOWN_COMMAND_TYPE", "x"), True, None),
        (Verdict.BUSINESS_RULE, Failure("BusinessRuleException", "NO", "x"), True, "good"),
        (Verdict.PERMANENT, Failure("PermanentCommandError", "NO", "x"), False, None),
    ],
)
def test_what_an_end_says_to_the_breaker(
    verdict: Verdict, failure: Failure, is_probe: bool, expected: str | None
) -> None:
    one = report_of(Settings(), "orders", "hang", 7, Judgement(verdict, failure), is_probe=is_probe)
    assert _said(one) == expected
    counting = Settings(breakers={"*": Breaker(stuck=0, failures=1)})
    one = report_of(counting, "orders", "hang", 7, Judgement(verdict, failure), is_probe=is_probe)
    if (
        verdict in (Verdict.RETRY, Verdict.EXHAUSTED, Verdict.TIMED_OUT)
        and failure.error_code != "ISOLATION_FAILED"
    ):
        assert _said(one) in ("stuck", "failed")
    else:
        assert _said(one) == expected


def _said(one: BreakerReport | None) -> str | None:
    if one is None:
        return None
    return "good" if one.bad is None else "stuck" if one.bad.is_stuck else "failed"
