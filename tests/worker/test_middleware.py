"""Middleware around attempts: order, forms, outcomes, and that it is inside the attempt."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from commandbus import (
    AttemptOutcome,
    BusinessRuleException,
    Command,
    CommandBus,
    CommandStatus,
    ConfigurationError,
    DeadlineExceededError,
    HandlerContext,
    HandlerRegistry,
    MiddlewareError,
    PermanentCommandError,
    RetryPolicy,
    Snooze,
    Worker,
)
from support.waiting import until, until_settled
from support.workers import AT_ONCE, quick_settings

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
trace: ContextVar[str] = ContextVar("trace", default="none")


def plain(lane: str, name: str, did: list[Any]) -> Callable[..., Any]:
    """A middleware of this kind that notes when it is entered and left."""

    def sync(command: Any, ctx: Any, call_next: Any) -> Any:
        did.append(name)
        result = call_next()
        did.append((name, result))
        return result

    async def asynchronous(command: Any, ctx: Any, call_next: Any) -> Any:
        did.append(name)
        result = await call_next()
        did.append((name, result))
        return result

    return sync if lane == "sync" else asynchronous


def handler_of(lane: str, body: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    async def asynchronous(command: Any, ctx: Any) -> Any:
        await asyncio.sleep(0)
        return body(command, ctx)

    return body if lane == "sync" else asynchronous


def test_the_first_is_outermost_and_all_forms_see_headers_result_and_error(
    bus: CommandBus, db: Db, lane: str, start_worker: StartWorker
) -> None:
    handlers, did = HandlerRegistry(), []

    def traced(command: Command, ctx: Any) -> Any:
        token = trace.set((command.headers or {})["trace"])
        assert 0 < ctx.remaining() <= 9
        try:
            result = yield
            did.append(("steps", result))
        except LookupError as error:
            did.append(("steps", type(error), ctx.attempt))
            raise
        finally:
            trace.reset(token)

    handlers.middleware(plain(lane, "a", did))
    handlers.middleware(traced)
    handlers.middleware(only=lane)(plain(lane, "b", did))  # type: ignore[call-overload]
    other = "async" if lane == "sync" else "sync"
    handlers.middleware(only=other)(plain(other, "never", did))  # type: ignore[call-overload]

    def body(command: Any, ctx: Any) -> Any:
        did.append(("handler", trace.get()))
        if ctx.attempt == 1:
            raise LookupError("once")
        return command.data

    handlers.register("orders", "ship", handler_of(lane, body), retry_policy=AT_ONCE, timeout=9)
    bus.send("orders", "ship", 7, command_id="o", headers={"trace": "t-1"})
    start_worker(handlers)
    until_settled(db)
    failed = ["a", "b", ("handler", "t-1"), ("steps", LookupError, 1)]
    assert did == [*failed, "a", "b", ("handler", "t-1"), ("b", 7), ("steps", 7), ("a", 7)]
    assert bus.get_command("orders", "o").result == 7  # type: ignore[union-attr]
    assert bus.get_attempts("orders", "o")[0].error_type == "LookupError"
    assert "in body" in bus.get_attempts("orders", "o")[0].traceback  # type: ignore[operator]


def test_it_may_replace_the_result_the_error_and_the_whole_attempt(
    bus: CommandBus, db: Db, lane: str, start_worker: StartWorker
) -> None:
    handlers = HandlerRegistry()

    def sync(command: Any, ctx: Any, call_next: Any) -> Any:
        if command.data == "skip":
            return "skipped"
        try:
            return {"wrapped": call_next()}
        except KeyError as error:
            raise BusinessRuleException("no such order", code="NO_ORDER") from error

    async def asynchronous(command: Any, ctx: Any, call_next: Any) -> Any:
        if command.data == "skip":
            return "skipped"
        try:
            return {"wrapped": await call_next()}
        except KeyError as error:
            raise BusinessRuleException("no such order", code="NO_ORDER") from error

    def quiet(command: Any, ctx: Any) -> Any:
        if command.data == "replaced":
            yield
            return "by steps"
        if command.data == "never":
            return "without a yield"
        with suppress(ArithmeticError):
            yield
        return None

    handlers.middleware(sync if lane == "sync" else asynchronous)
    handlers.middleware(quiet)

    def body(command: Any, ctx: Any) -> Any:
        assert command.data not in ("skip", "never")
        if command.data == "missing":
            raise KeyError("x")
        if command.data == "divided":
            raise ZeroDivisionError
        return command.data

    handlers.register("orders", "ship", handler_of(lane, body))
    for data in ("skip", "never", "missing", "divided", "replaced", "kept"):
        bus.send("orders", "ship", data, command_id=data)
    start_worker(handlers)
    until_settled(db)
    found = {name: bus.get_outcome("orders", name) for name in ("skip", "never", "divided", "replaced", "kept")}
    assert {name: each and each.result for name, each in found.items()} == {
        "skip": "skipped", "never": {"wrapped": "without a yield"}, "divided": {"wrapped": None},
        "replaced": {"wrapped": "by steps"}, "kept": {"wrapped": "kept"},
    }  # fmt: skip
    missing = bus.get_outcome("orders", "missing")
    assert missing is not None
    assert (missing.status, missing.error_code) == ("FAILED", "NO_ORDER")


def test_broken_rules_need_a_person(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    handlers, ran = HandlerRegistry(), []

    def twice(command: Any, ctx: Any, call_next: Any) -> Any:
        call_next()
        return call_next()

    async def twice_async(command: Any, ctx: Any, call_next: Any) -> Any:
        await call_next()
        return await call_next()

    async def forgets(command: Any, ctx: Any, call_next: Any) -> Any:
        if command.data == "forget":
            call_next()
            return 1
        return await call_next()

    def two(command: Any, ctx: Any) -> Any:
        yield
        yield

    async def two_async(command: Any, ctx: Any) -> Any:
        yield
        yield

    async def note(command: Any, ctx: Any) -> None:
        ran.append(command.command_id)

    for name, middleware, function in (
        ("twice", twice, lambda ctx: ran.append(ctx.command.command_id)),
        ("twice_async", twice_async, note),
        ("forgets", forgets, note),
        ("two", two, lambda ctx: None),
        ("two_async", two_async, note),
    ):
        part = HandlerRegistry()
        part.middleware(middleware)
        part.register("orders", name, function)
        handlers.include(part)
        bus.send("orders", name, "forget", command_id=name)
    start_worker(handlers)
    until_settled(db)
    errors = {
        name: bus.get_outcome("orders", name) for name in ("twice", "twice_async", "forgets", "two", "two_async")
    }
    assert {each.error_code for each in errors.values() if each} == {"MIDDLEWARE"}
    assert "twice has called call_next() twice" in str(errors["twice"])
    assert "without `await`, so nothing was called" in str(errors["forgets"])
    assert "second `yield`" in str(errors["two_async"])
    assert sorted(ran) == ["twice", "twice_async", "two_async"]


def test_an_included_registry_brings_its_own_inside(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    did: list[Any] = []
    outer, middle, inner = (HandlerRegistry() for _ in range(3))

    def shared(command: Any, ctx: Any) -> Any:
        did.append("shared")
        yield

    for name, registry in (("inner", inner), ("middle", middle), ("outer", outer)):
        registry.register("orders", name, lambda ctx: did.append(ctx.command.command_type))
        registry.middleware(plain("sync", f"{name}-mw", did))
        registry.middleware(shared)
    middle.include(inner)
    outer.include(middle)
    for name in ("inner", "middle", "outer"):
        did.clear()
        bus.send("orders", name)
        Worker(outer, settings=quick_settings(bus.settings.database_url or "")).run(until_idle=True)
        entered = [each for each in did if isinstance(each, str)]
        order = {"inner": ["middle-mw", "inner-mw"], "middle": ["middle-mw"], "outer": []}[name]
        assert entered == ["outer-mw", "shared", *order, name]
    did.clear()
    command = Command("orders", "inner", "x", None)
    inner.dispatch(command, SimpleNamespace(command=command))
    assert did[:2] == ["inner-mw", "shared"]


def test_the_deadline_holds_for_it_and_a_transaction_is_one(
    bus: CommandBus, db: Db, lane: str, start_worker: StartWorker, go_on: threading.Event
) -> None:
    """What hangs in a middleware is stuck; what raises after the commit is only noted."""
    handlers = HandlerRegistry()
    db.execute("CREATE TABLE shipped (n int)")

    def sync(command: Any, ctx: Any, call_next: Any) -> Any:
        if command.data == "hang":
            go_on.wait(30)
        result = call_next()
        if command.data == "late":
            raise LookupError("after the commit")
        return result

    async def asynchronous(command: Any, ctx: Any, call_next: Any) -> Any:
        if command.data == "hang":
            await asyncio.sleep(60)
        result = await call_next()
        if command.data == "late":
            raise LookupError("after the commit")
        return result

    def body(command: Any, ctx: HandlerContext) -> None:
        with ctx.transaction() as tx:
            tx.execute("INSERT INTO shipped VALUES (1)")
            tx.complete("done")

    async def body_async(command: Any, ctx: Any) -> None:
        async with ctx.transaction() as tx:
            await tx.execute("INSERT INTO shipped VALUES (1)")
            tx.complete("done")

    def by_option(command: Any, ctx: Any, tx: Any) -> Any:
        tx.execute("INSERT INTO shipped VALUES (2)")
        return "by option"

    handlers.middleware(sync if lane == "sync" else asynchronous)
    handlers.register("orders", "ship", body if lane == "sync" else body_async)
    if lane == "sync":
        handlers.register("orders", "option", by_option, transaction=True)
        bus.send("orders", "option", "late", command_id="option")
    for data in ("late", "hang"):
        bus.send("orders", "ship", data, command_id=data, max_attempts=1, timeout=0.5 if data == "hang" else 20)
    start_worker(handlers, cancel_grace=0.3)
    until_settled(db)
    late, hang = bus.get_command("orders", "late"), bus.get_command("orders", "hang")
    assert late is not None
    assert hang is not None
    assert (late.status, late.result) == (CommandStatus.COMPLETED, "done")
    assert [each.verdict for each in bus.get_attempts("orders", "late")] == ["NOTE"]
    assert hang.status is CommandStatus.IN_TROUBLESHOOTING_QUEUE
    code = bus.get_attempts("orders", "hang")[-1].error_code
    assert code == ("EXECUTION_STUCK" if lane == "sync" else "TIMEOUT")
    assert db.execute("SELECT count(*) FROM shipped WHERE n = 1").fetchone() == (1,)
    if lane == "sync":
        option = bus.get_command("orders", "option")
        assert option is not None
        assert option.result == "by option"
        assert db.execute("SELECT count(*) FROM shipped WHERE n = 2").fetchone() == (1,)


def test_a_sync_middleware_sees_the_result_of_a_returned_awaitable(
    bus: CommandBus, db: Db, start_worker: StartWorker
) -> None:
    handlers, did = HandlerRegistry(), []

    async def ship(command: Any, ctx: Any) -> Any:
        await ctx.sleep(0.01)
        did.append(trace.get())
        if command.data is None:
            raise LookupError("nothing")
        return command.data

    @handlers.middleware
    def traced(command: Any, ctx: Any, call_next: Any) -> Any:
        trace.set("t-2")
        try:
            result = call_next()
        except LookupError:
            result = "nothing"
        did.append((result, type(ctx)))
        ctx.raise_if_canceled()
        return result

    handlers.register("orders", "ship", functools.partial(lambda f, command, ctx: f(command, ctx), ship))
    sent = bus.send_many("orders", [{"command_type": "ship", "data": data} for data in (3, None)])
    start_worker(handlers, concurrency=1)
    assert [bus.wait(each) for each in sent] == [3, "nothing"]
    assert did == ["t-2", (3, HandlerContext), "t-2", ("nothing", HandlerContext)]


class TooEarly(Exception):  # noqa: N818
    """For a policy with a delay of its own."""


CASES: dict[str, tuple[BaseException | None, str]] = {
    "returned": (None, "COMPLETED"),
    "transient": (LookupError("x"), "RETRY"),
    "too_early": (TooEarly("x"), "RETRY"),
    "given_up": (ArithmeticError("x"), "EXHAUSTED"),
    "business": (BusinessRuleException("x"), "BUSINESS_RULE"),
    "permanent": (PermanentCommandError("x", code="TORN"), "PERMANENT"),
    "snoozed": (Snooze("1h"), "SNOOZED"),
    "snoozed_long": (Snooze("9h"), "EXHAUSTED"),
    "last": (LookupError("x"), "EXHAUSTED"),
    "failing": (LookupError("x"), "FAILED"),
    "exit": (SystemExit(3), "RETRY"),
    "lock": (psycopg.errors.LockNotAvailable("canceling statement due to lock timeout"), "TIMED_OUT"),
    "nowait": (psycopg.errors.LockNotAvailable("could not obtain lock on row"), "RETRY"),
    "late": (DeadlineExceededError("x"), "TIMED_OUT"),
    "shut": (psycopg.errors.AdminShutdown("terminating"), "RETRY"),
}


def test_it_can_ask_what_the_outcome_will_be(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    """What `ctx.outcome_of` says is what the history says afterwards."""
    handlers = HandlerRegistry()
    said: dict[str, AttemptOutcome] = {}

    @handlers.middleware
    def ask(command: Any, ctx: Any, call_next: Any) -> Any:
        try:
            result = call_next()
        except BaseException as error:
            said.setdefault(command.command_id, ctx.outcome_of(error))
            raise
        said[command.command_id] = ctx.outcome_of(None)
        return result

    policy = RetryPolicy(
        max_attempts=3, backoff_schedule=["1h"], jitter=0, give_up_on=ArithmeticError, max_snooze_time="2h",
        delay_from=lambda error: "2h" if isinstance(error, TooEarly) else None,
    )  # fmt: skip

    @handlers.handler("orders", "ship", retry_policy=policy, on_timeout="fail")
    def ship(command: Any, ctx: Any) -> None:
        if (error := CASES[command.data][0]) is not None:
            raise error

    for name in CASES:
        most = {"last": 1, "failing": 1}.get(name)
        ending: Any = "fail" if name == "failing" else None
        bus.send("orders", "ship", name, command_id=name, max_attempts=most, on_exhausted=ending)
    start_worker(handlers)
    until(lambda: len(said) == len(CASES))
    until(lambda: all(bus.get_attempts("orders", name) for name in CASES if name != "returned"))
    assert {name: outcome.verdict for name, outcome in said.items()} == {name: v for name, (_, v) in CASES.items()}
    for name, outcome in said.items():
        record = bus.get_command("orders", name)
        assert record is not None
        assert record.status is outcome.status, name
        assert outcome.is_retried is (record.status is CommandStatus.PENDING)
        if name != "returned":
            (attempt,) = bus.get_attempts("orders", name)
            assert attempt.verdict == outcome.verdict
            assert attempt.error_code == outcome.error_code
    delays = {name: outcome.delay_seconds for name, outcome in said.items() if outcome.is_retried}
    assert delays == {"transient": 3600, "too_early": 7200, "snoozed": 3600, "exit": 3600, "nowait": 3600,
                      "shut": 3600}  # fmt: skip


def test_a_middleware_of_the_wrong_kind_stops_the_start(bus: CommandBus, start_worker: StartWorker) -> None:
    handlers = HandlerRegistry()

    @handlers.middleware
    def timed(command: Any, ctx: Any, call_next: Any) -> Any:
        return call_next()

    @handlers.handler("orders", "bill")
    async def bill(command: Any, ctx: Any) -> None: ...

    with pytest.raises(
        ConfigurationError, match=r"middleware .*timed is written with `def`, but handler .*bill is"
    ):
        start_worker(handlers)
    fine = HandlerRegistry()
    fine.middleware(only="sync")(timed)
    fine.register("orders", "bill", bill)
    start_worker(fine)
    sent = bus.send("orders", "bill")
    assert sent.wait() is None


def test_chunks(bus: CommandBus, db: Db, lane: str, start_worker: StartWorker) -> None:
    """With chunks=True it is around a chunk and a command that runs by itself; with False around neither."""
    handlers, did = HandlerRegistry(), []

    def sizes(commands: Any, ctx: Any) -> Any:
        did.append(len(commands) if isinstance(commands, list) else commands.command_id)
        assert ctx.state.tag == "shared"
        assert 0 < ctx.remaining() <= 7
        yield

    def never(command: Any, ctx: Any) -> Any:
        did.append("never")
        yield

    handlers.on_start(lambda state: setattr(state, "tag", "shared"))
    handlers.middleware(chunks=True)(sizes)
    handlers.middleware(chunks=False)(never)

    def index(commands: Any, ctx: Any) -> Any:
        if len(commands) == 3:
            raise LookupError("a chunk that fails runs one by one")
        return [command.data for command in commands]

    async def index_async(commands: Any, ctx: Any) -> Any:
        return index(commands, ctx)

    handlers.register(
        "orders", "index", index if lane == "sync" else index_async, chunk=3, chunk_wait="2s", timeout=7
    )
    sent = bus.send_many("orders", [{"command_type": "index", "data": n, "command_id": f"c{n}"} for n in range(3)])
    start_worker(handlers)
    assert [each.wait() for each in sent] == [0, 1, 2]
    assert (did[0], sorted(did[1:])) == (3, ["c0", "c1", "c2"])
    handlers.middleware(plain(lane, "unsaid", did))
    with pytest.raises(ConfigurationError, match=r"is around one command, but handler .*index.* takes chunks"):
        start_worker(handlers)
    with pytest.raises(TypeError, match="chunks must be True or False, not 'yes'"):
        handlers.middleware(chunks="yes")(sizes)  # type: ignore[call-overload]


def test_bad_middleware_is_refused_by_name() -> None:
    handlers = HandlerRegistry()

    def fine(command: Any, ctx: Any, call_next: Any) -> Any: ...

    with pytest.raises(TypeError, match="a middleware must be a function, not 7"):
        handlers.middleware(7)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"takes \(command, ctx\); it must take \(command, ctx, call_next\), or"):
        handlers.middleware(lambda command, ctx: None)
    with pytest.raises(ValueError, match='only must be "sync" or "async", not \'both\''):
        handlers.middleware(only="both")(fine)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match='so it cannot be only="async"'):
        handlers.middleware(only="async")(fine)
    assert handlers.middleware(fine) is fine
    with pytest.raises(ConfigurationError, match=r"fine is registered twice"):
        handlers.middleware(fine)
    assert issubclass(MiddlewareError, PermanentCommandError)


def test_without_middleware_a_worker_calls_the_function_itself(bus: CommandBus, start_worker: StartWorker) -> None:
    handlers = HandlerRegistry()
    handlers.register("orders", "ship", lambda ctx: None)
    worker = start_worker(handlers)
    runtime = worker._runtime
    assert runtime is not None
    assert runtime._handlers.get("orders", "ship") is handlers.get("orders", "ship")
    assert runtime._handlers.get.__self__ is handlers  # type: ignore[attr-defined]
