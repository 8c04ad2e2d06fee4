"""A worker from end to end: what a handler returns or raises, and what becomes of its command."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import (
    AuditEvent,
    BusinessRuleException,
    CommandBus,
    CommandRecord,
    CommandStatus,
    HandlerRegistry,
    PermanentCommandError,
    RetryPolicy,
    TransientCommandError,
    TroubleshootingQueue,
    Worker,
)
from commandbus.flow.commands.history import AttemptRecord, list_attempts
from support.waiting import one, until, until_settled, verdicts
from support.workers import AT_ONCE, BUSY, add

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]


def record(bus: CommandBus, command_id: str, domain: str = "orders") -> CommandRecord:
    found = bus.get_command(domain, command_id)
    assert found is not None
    return found


def attempts(bus: CommandBus, command_id: str) -> list[AttemptRecord]:
    return bus.run(list_attempts("orders", command_id))


# --- results --------------------------------------------------------------------------------------------------


def test_results_of_sync_and_async_handlers_in_one_worker(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "double")
    def double(command: Any, ctx: Any) -> Any:
        return {"twice": command.data["n"] * 2, "number": ctx.attempt}

    @handlers.handler("orders", "triple")
    async def triple(ctx: Any) -> Any:
        await asyncio.sleep(0)
        return [ctx.command.data["n"] * 3, None, "ü", 1.5]

    @handlers.handler("orders", "nothing")
    def nothing(ctx: Any) -> None: ...

    for n in range(20):
        bus.send("orders", "double", {"n": n}, command_id=f"d{n}")
        bus.send("orders", "triple", {"n": n}, command_id=f"t{n}")
    bus.send("orders", "nothing", command_id="none")
    worker = start_worker(handlers)
    until_settled(db)
    for n in range(20):
        assert record(bus, f"d{n}").result == {"twice": n * 2, "number": 1}
        assert record(bus, f"t{n}").result == [n * 3, None, "ü", 1.5]
    done_ = record(bus, "none")
    assert (done_.status, done_.result, done_.attempts) == (CommandStatus.COMPLETED, None, 1)
    assert done_.worker == worker.id
    assert done_.started_at is not None
    assert done_.finished_at is not None
    assert done_.created_at <= done_.finished_at
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands") == 0
    assert worker.stop().settled == 41


def test_a_handler_sees_the_whole_command(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    seen: list[Any] = []

    async def look(command: Any, ctx: Any) -> None:
        seen.append((command, ctx.command, ctx.attempt, ctx.max_attempts, ctx.worker))

    add(handlers, lane, "look", look)
    bus.create_queue("answers")
    bus.send("orders", "look", {"a": [1, {"b": None}]}, command_id="c", correlation_id="corr", reply_to="answers",
             max_attempts=9, headers={"trace": "x"})  # fmt: skip
    worker = start_worker(handlers)
    until_settled(db)
    command, same, attempt, max_attempts, name = seen[0]
    assert command is same
    assert (command.domain, command.command_type, command.command_id) == ("orders", "look", "c")
    assert command.data == {"a": [1, {"b": None}]}
    assert (command.correlation_id, command.reply_to, command.headers) == ("corr", "answers", {"trace": "x"})
    assert command.created_at is not None
    assert (attempt, max_attempts, name) == (1, 9, worker.id)
    reply = one(db, "SELECT message FROM pgmq.q_answers")
    assert (reply["outcome"], reply["command_id"], reply["correlation_id"]) == ("SUCCESS", "c", "corr")


# --- errors ---------------------------------------------------------------------------------------------------


def test_each_kind_of_error_has_its_fate(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    errors: dict[str, Callable[[], BaseException]] = {
        "business": lambda: BusinessRuleException("no credit", code="NO_CREDIT", details={"limit": 5}),
        "permanent": lambda: PermanentCommandError("unreadable", code="BAD_FILE"),
        "transient": lambda: TransientCommandError("busy", code="BUSY"),
        "other": lambda: KeyError("missing"),
    }

    async def fail(command: Any, ctx: Any) -> None:
        raise errors[command.data]()

    add(handlers, lane, "fail", fail)
    for name in errors:
        bus.send("orders", "fail", name, command_id=name)
    start_worker(handlers, retry_policy=AT_ONCE)
    until_settled(db)

    assert record(bus, "business").status is CommandStatus.FAILED
    assert verdicts(db, "business") == [(1, "BUSINESS_RULE")]
    assert record(bus, "business").error_code == "NO_CREDIT"
    assert record(bus, "permanent").status is CommandStatus.IN_TROUBLESHOOTING_QUEUE
    assert verdicts(db, "permanent") == [(1, "PERMANENT")]
    for name in ("transient", "other"):
        assert record(bus, name).status is CommandStatus.IN_TROUBLESHOOTING_QUEUE
        assert verdicts(db, name) == [(1, "RETRY"), (2, "RETRY"), (3, "EXHAUSTED")]

    entries = {entry.command_id: entry for entry in TroubleshootingQueue(bus).list("orders")}
    assert set(entries) == {"permanent", "transient", "other"}
    assert (entries["permanent"].error_type, entries["permanent"].error_code) == (
        "PermanentCommandError",
        "BAD_FILE",
    )
    assert (entries["other"].error_type, entries["other"].error_code, entries["other"].error) == (
        "KeyError",
        "ERROR",
        "'missing'",
    )
    first = attempts(bus, "business")[0]
    assert (first.error, first.details) == ("no credit", {"limit": 5})
    assert first.traceback is not None
    assert "raise errors[command.data]()" in first.traceback
    assert first.traceback.rstrip().endswith("no credit")
    assert "worker/execution/execute.py" not in first.traceback


def test_a_transient_failure_then_success(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def flaky(command: Any, ctx: Any) -> int:
        if ctx.attempt < 3:
            raise TransientCommandError("not yet")
        return int(ctx.attempt)

    add(handlers, lane, "flaky", flaky)
    bus.send("orders", "flaky", command_id="c")
    start_worker(handlers, retry_policy=AT_ONCE)
    until_settled(db)
    found = record(bus, "c")
    assert (found.status, found.result, found.attempts) == (CommandStatus.COMPLETED, 3, 3)
    events = [entry.event for entry in bus.get_audit_trail("orders", "c")]
    retry = [AuditEvent.RECEIVED, AuditEvent.FAILED, AuditEvent.RETRY_SCHEDULED]
    assert events == [AuditEvent.SENT, *retry, *retry, AuditEvent.RECEIVED, AuditEvent.COMPLETED]


def test_an_unknown_type_goes_to_the_troubleshooting_queue_at_once_if_it_may_not_wait(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "known", lambda ctx: None)
    bus.send("orders", "unheard_of", command_id="u")
    bus.send("orders", "known", command_id="k")
    start_worker(handlers, unknown_type_timeout=0.0)
    until_settled(db)
    (entry,) = TroubleshootingQueue(bus).list("orders")
    assert (entry.command_id, entry.error_type, entry.error_code) == (
        "u",
        "UnknownCommandTypeError",
        "UNKNOWN_COMMAND_TYPE",
    )
    assert "'unheard_of'" in (entry.error or "")
    assert verdicts(db, "u") == [(1, "UNKNOWN_TYPE")]
    assert record(bus, "k").status is CommandStatus.COMPLETED


# --- retry policies -------------------------------------------------------------------------------------------


def test_the_commands_own_limit_beats_the_handlers_and_that_the_workers(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    seen: dict[str, int] = {}

    async def fail(command: Any, ctx: Any) -> None:
        seen[command.command_id] = ctx.max_attempts
        raise RuntimeError("always")

    add(handlers, lane, "plain", fail)
    add(handlers, lane, "stubborn", fail, retry_policy=RetryPolicy(max_attempts=4, backoff_schedule=[0]))
    bus.send("orders", "plain", command_id="by_worker")
    bus.send("orders", "stubborn", command_id="by_handler")
    bus.send("orders", "stubborn", command_id="by_command", max_attempts=1)
    bus.send("orders", "plain", command_id="by_command_more", max_attempts=5)
    start_worker(handlers, retry_policy=RetryPolicy(max_attempts=2, backoff_schedule=[0]))
    until_settled(db)
    expected = {"by_worker": 2, "by_handler": 4, "by_command": 1, "by_command_more": 5}
    assert seen == expected
    assert {name: len(verdicts(db, name)) for name in expected} == expected


def test_the_settings_policy_is_the_workers_default(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "fail", lambda ctx: 1 / 0)
    bus.send("orders", "fail", command_id="c")
    start_worker(handlers, max_attempts=2, backoff_schedule=(0.0,))
    until_settled(db)
    assert verdicts(db, "c") == [(1, "RETRY"), (2, "EXHAUSTED")]


def test_the_last_back_off_repeats(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "fail", lambda ctx: 1 / 0)
    bus.send("orders", "fail", command_id="c")
    policy = RetryPolicy(max_attempts=5, backoff_schedule=[0.05, 0.2], jitter=0)
    start_worker(handlers, retry_policy=policy, poll_interval=30.0)
    until_settled(db)
    waits = [
        (each.retry_at - each.finished_at).total_seconds()
        for each in attempts(bus, "c")
        if each.retry_at is not None
    ]
    assert waits == pytest.approx([0.05, 0.2, 0.2, 0.2], abs=0.001)


def test_a_retry_is_not_run_before_its_time(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "fail", lambda ctx: 1 / 0)
    bus.send("orders", "fail", command_id="c")
    start_worker(handlers, retry_policy=RetryPolicy(max_attempts=3, backoff_schedule=[0.3], jitter=0))
    until_settled(db)
    made = attempts(bus, "c")
    for earlier, later in itertools.pairwise(made):
        assert earlier.retry_at is not None
        assert later.started_at is not None
        assert later.started_at >= earlier.retry_at


def test_attempts_start_again_after_an_operators_retry_but_numbers_go_on(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    seen: list[tuple[int, int, int]] = []

    @handlers.handler("orders", "fail")
    def fail(ctx: Any) -> None:
        seen.append((ctx.attempt, ctx.max_attempts, ctx.attempt_number))
        raise RuntimeError("always")

    bus.send("orders", "fail", command_id="c")
    start_worker(handlers, retry_policy=RetryPolicy(max_attempts=2, backoff_schedule=[0]))
    until_settled(db)
    TroubleshootingQueue(bus).operator_retry("orders", "c", operator="ann")
    until_settled(db)
    assert seen == [(1, 2, 1), (2, 2, 2), (1, 2, 3), (2, 2, 4)]
    found = record(bus, "c")
    assert (found.charged_attempts, found.attempts) == (2, 4)
    assert [verdict for _, verdict in verdicts(db, "c")] == ["RETRY", "EXHAUSTED", "RETRY", "EXHAUSTED"]


# --- results that cannot be kept ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "result", "said"),
    [
        ("not_json", object(), r"\$: object"),
        ("nested", {"a": [1, {2, 3}]}, r"\$\.a\[1\]: set"),
        ("nan", float("nan"), "NaN|nan|JSON"),
        ("nul", {"a": "x\x00y"}, "NUL"),
        ("surrogate", "\ud800", "surrogate"),
        ("too_big", "x" * 5000, "over the limit of 4096"),
    ],
)
def test_a_result_that_is_not_storable_json_needs_a_person(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    name: str,
    result: Any,
    said: str,
) -> None:
    handlers.register("orders", "odd", lambda ctx: result)
    handlers.register("orders", "fine", lambda ctx: "fine")
    bus.send("orders", "odd", command_id="odd")
    bus.send("orders", "fine", command_id="fine")
    start_worker(handlers, max_payload_bytes=4096)
    until_settled(db)
    (entry,) = TroubleshootingQueue(bus).list("orders")
    assert (entry.command_id, entry.error_code) == ("odd", "INVALID_RESULT")
    assert entry.error is not None
    assert re.search(said, entry.error), entry.error
    assert record(bus, "fine").result == "fine"


# --- exceptions that would end a thread or a process ----------------------------------------------------------


class Strange(BaseException):
    """Not an Exception."""


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        GeneratorExit(),
        Strange("odd"),
        StopIteration(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_exception_ends_the_worker(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str, error: BaseException
) -> None:
    if lane == "async":

        async def fail(ctx: Any) -> None:
            raise error
    else:

        def fail(ctx: Any) -> None:
            raise error

    async def fine(command: Any, ctx: Any) -> str:
        return "fine"

    handlers.register("orders", "fail", fail)
    add(handlers, lane, "fine", fine)
    bus.send("orders", "fail", command_id="bad")
    worker = start_worker(handlers, concurrency=1, retry_policy=AT_ONCE)
    until_settled(db)
    bus.send("orders", "fine", command_id="after")
    until_settled(db)
    assert verdicts(db, "bad") == [(1, "RETRY"), (2, "RETRY"), (3, "EXHAUSTED")]
    expected = "RuntimeError" if lane == "async" and isinstance(error, StopIteration) else type(error).__name__
    assert {each.error_type for each in attempts(bus, "bad")} == {expected}
    assert record(bus, "after").result == "fine"
    assert worker.stop().is_clean


# --- hostile exceptions ---------------------------------------------------------------------------------------


class BrokenStrError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("broken")

    __repr__ = __str__


class LeavingStrError(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)

    __repr__ = __str__


class BrokenTracebackError(Exception):
    @property
    def __cause__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("broken")


class BrokenDetails(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("broken")


def _recursive() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


HOSTILE: dict[str, Callable[[], BaseException]] = {
    "broken_str": BrokenStrError,
    "leaving_str": LeavingStrError,
    "broken_traceback": BrokenTracebackError,
    "nul": lambda: ValueError("a\x00b"),
    "surrogate": lambda: ValueError("a\udcffb"),
    "giant": lambda: ValueError("x" * 3_000_000 + "THE END"),
    "nul_code": lambda: PermanentCommandError("x", code="A\x00B"),
    "code_no_text": lambda: PermanentCommandError("x", code=object()),  # type: ignore[arg-type]
    "details_set": lambda: PermanentCommandError("x", details={1, 2}),
    "details_nul": lambda: PermanentCommandError("x", details={"a": "\x00"}),
    "details_broken": lambda: PermanentCommandError("x", details=BrokenDetails(a=1)),
    "details_recursive": lambda: PermanentCommandError("x", details=_recursive()),
    "details_giant": lambda: PermanentCommandError("x", details="x" * 1_000_000),
    "odd_name": lambda: type("Odd\x00Name\ud800", (Exception,), {})("x"),
    "quotes": lambda: ValueError("""'";--\\ $1 %(domain)s {queue}"""),
}


def test_hostile_exceptions_become_readable_records(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def fail(command: Any, ctx: Any) -> None:
        raise HOSTILE[command.data]()

    add(handlers, lane, "fail", fail)
    for name in HOSTILE:
        bus.send("orders", "fail", name, command_id=name, max_attempts=1)
    worker = start_worker(handlers)
    until_settled(db)
    made = {}
    for name in HOSTILE:
        *before, made[name] = attempts(bus, name)
        assert {each.error for each in before} <= {BUSY}, "what waits behind a long traceback is another's to take"
    assert {each.verdict for each in made.values()} <= {"EXHAUSTED", "PERMANENT"}
    assert all(each.error_type and each.error is not None for each in made.values())
    assert made["broken_str"].error == "<BrokenStrError.__str__ raised RuntimeError>"
    assert made["leaving_str"].error == "<LeavingStrError.__str__ raised SystemExit>"
    assert made["nul"].error == "a\\x00b"
    assert made["surrogate"].error == "a\\udcffb"
    assert (made["giant"].error or "").endswith("THE END")
    assert len(made["giant"].error or "") < 10_000
    assert len(made["giant"].traceback or "") < 100_000
    assert made["nul_code"].error_code == "A\\x00B"
    assert "set" in str(made["details_set"].details)
    assert "left out" in made["details_giant"].details
    assert made["quotes"].error == """'";--\\ $1 %(domain)s {queue}"""
    assert worker.stop().is_clean


# --- the log --------------------------------------------------------------------------------------------------


def test_the_contexts_log_carries_the_command(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def speak(command: Any, ctx: Any) -> None:
        ctx.log.warning("hello %s", "world")

    add(handlers, lane, "speak", speak)
    bus.send("orders", "speak", command_id="c")
    with caplog.at_level(logging.INFO, "commandbus.handler"):
        start_worker(handlers)
        until_settled(db)
    (spoken,) = [each for each in caplog.records if each.name == "commandbus.handler"]
    assert spoken.getMessage() == "hello world"
    names = ("domain", "command_type", "command_id", "attempt", "attempt_number")
    assert {name: getattr(spoken, name) for name in names} == {
        "domain": "orders",
        "command_type": "speak",
        "command_id": "c",
        "attempt": 1,
        "attempt_number": 1,
    }


# --- domains, foreign messages, pauses ------------------------------------------------------------------------


def test_two_domains_in_one_worker(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    for domain in ("orders", "mail"):
        handlers.register(domain, "work", lambda command, ctx: command.domain)
    bus.create_domain("mail")
    for n in range(300):
        bus.send("orders", "work", n)
    bus.send("mail", "work", command_id="m")
    start_worker(handlers, concurrency=2)
    until_settled(db)
    assert record(bus, "m", "mail").result == "mail"
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE result::text = '\"orders\"'") == 300


def test_a_worker_creates_its_domains_queue(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("brand_new", "work", lambda ctx: "made")
    start_worker(handlers)
    bus.send("brand_new", "work", command_id="c")
    until_settled(db)
    assert record(bus, "c", "brand_new").result == "made"


def test_a_raw_message_of_another_client_is_run_and_a_bad_one_moved_aside(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def work(command: Any, ctx: Any) -> Any:
        return [command.data, ctx.attempt]

    add(handlers, lane, "work", work)
    for message in (
        '{"command_type": "work", "data": {"n": 1}, "command_id": "raw"}',
        '{"nonsense": true}',
        '["no object"]',
        '{"command": 99999999}',
        '{"command_type": "work", "data": 2}',
    ):
        db.execute("SELECT pgmq.send('orders__commands', %s::jsonb)", (message,))
    start_worker(handlers)
    until(lambda: one(db, "SELECT count(*) FROM pgmq.q_orders__commands") == 0)
    assert record(bus, "raw").result == [{"n": 1}, 1]
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 2
    assert one(db, "SELECT count(*) FROM commandbus.rejected_message") == 3


def test_pause_and_resume_under_a_running_worker(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    ran: list[str] = []

    async def work(command: Any, ctx: Any) -> None:
        ran.append(command.command_id)

    add(handlers, lane, "work", work)
    add(handlers, lane, "other", work)
    start_worker(handlers)
    bus.pause("orders", "work", operator="ann")
    bus.send("orders", "work", command_id="paused")
    bus.send("orders", "other", command_id="free")
    until(lambda: record(bus, "paused").waiting_for == "pause")
    until(lambda: record(bus, "free").status is CommandStatus.COMPLETED)
    assert ran == ["free"]
    assert bus.resume("orders", "work") == 1
    until_settled(db)
    assert ran == ["free", "paused"]
    assert record(bus, "paused").attempts == 2  # numbers grow; what was parked is not charged
    assert one(db, "SELECT waived FROM commandbus.command WHERE command_id = 'paused'") == 1

    bus.pause("orders", operator="ann")
    bus.send("orders", "other", command_id="later")
    # A marker in another domain shows that the worker has looked since.
    assert bus.status("orders")[0].is_paused
    bus.resume("orders")
    until_settled(db)
    assert ran[-1] == "later"
