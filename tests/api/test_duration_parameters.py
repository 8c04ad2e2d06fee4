"""Durations are accepted the same way everywhere: numbers, text with units, timedeltas; and refused with one text.

The parameters are found by walking the public API, so a new one that is not tried here fails this test.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import commandbus
from commandbus import (
    AsyncCommandBus,
    BaseProcessManager,
    Breaker,
    CommandBus,
    CreatedBatch,
    HandlerRegistry,
    HealthStatus,
    Limit,
    NewCommand,
    NewProcess,
    RateLimitError,
    RetryPolicy,
    Saga,
    Schedule,
    ScheduleTimes,
    SentCommand,
    Settings,
    Snooze,
    StepCommand,
    StepProcess,
    StepReply,
    StepSignal,
    StepSleep,
    TroubleshootingQueue,
    Worker,
    WorkerWatchdog,
    handler,
    load_settings,
    nested,
    rehearse,
    sleep,
    step,
    wait_for,
)
from commandbus.flow.commands import send
from commandbus.flow.processes import start
from commandbus.model import unique_key
from commandbus.model.api_errors import api_failure
from commandbus.model.durations import ACCEPTED
from commandbus.model.handle import given_by
from commandbus.processes import waiting_steps
from commandbus.settings import SETTINGS
from support.public_api import all_parameters
from support.workers import quick_settings

NOBODY = "postgresql://127.0.0.1:1/nobody?connect_timeout=1"
LOOKS_LIKE_A_DURATION = re.compile(
    r"(?:timeout|wait|max_wait|delay|deadline|age|keep|lease|window|reset|.*_reset|cooldown|.*interval|duration"
    r"|retry_after|backoff.*|grace|.*_seconds|seconds|until|ttl|every)\Z"
)
NOT_ONE = {
    "Rate(seconds)": "the parsed form; Limit(rate=…) and Rate.parse take text",
    "RateLimitError(retry_after)": "takes all forms, and headers; never refuses: a 429 must not get lost",
    "ScheduleTimes(every)": "the parsed form; ScheduleTimes.make takes all forms",
    "CallTimeoutError(seconds)": "made by bus.call, which has parsed it",
    "sleep(until)": "an instant",
    "StepSleep(until)": "an instant",
}
RECORDS = {
    *(
        "AttemptOutcome",
        "BatchRecord",
        "BreakerInfo",
        "CommandRecord",
        "DomainStatus",
        "Estimate",
        "Hold",
        "KeyLine",
        "Ledger",
        "LedgerInterval",
        "LimitInfo",
        *("InLimitLine", "LimitBackoff", "LimitDetail", "PermitHolder"),
    ),
    *(
        "LiveStack",
        "PlanRecord",
        "Rehearsal",
        "ScheduleRecord",
        "SlotInfo",
        "UnhandledType",
        "UniqueKey",
        "WhyWaiting",
        "WorkerInfo",
        "WorkerSlots",
    ),
    *("SlowStatement", "TransactionHolder"),
}
"""Made by us: what comes out is seconds, or an instant."""
BAD = [-1, "-5s", math.nan, math.inf, -math.inf, "5 parsecs", "soon", "", True, False, [], 10**12, "11y", 10**400]
BAD += [timedelta(days=-1), timedelta.max, b"5s"]
GOOD = [2, 2.0, "2", "2s", "2000ms", timedelta(seconds=2)]

Try = Callable[[Any], object]


def of_bus(call: Callable[[Any, Any], Any], url: str = NOBODY) -> Iterator[tuple[str, Try]]:
    """The same call on both buses. Unless one is named, nobody serves their database: nothing is asked of it."""

    def sync(value: Any) -> object:
        with CommandBus(url) as bus:
            found = call(bus, value)
            return found.__enter__() if hasattr(found, "__enter__") else found

    def asynchronous(value: Any) -> object:
        async def ask() -> object:
            async with AsyncCommandBus(url) as bus:
                found = call(bus, value)
                return await (found.__aenter__() if hasattr(found, "__aenter__") else found)

        return asyncio.run(ask())

    yield "CommandBus", sync
    yield "AsyncCommandBus", asynchronous


def made(label: str, call: Callable[[Any, Any], Any]) -> dict[str, Try]:
    return {f"{bus}.{label}": tried for bus, tried in of_bus(call)}


def receipt(given: SentCommand | CreatedBatch) -> Try:
    """A wait with the receipt, from a bus whose database nobody serves."""

    def wait(value: Any) -> object:
        with CommandBus(NOBODY) as bus:
            return given_by(bus, given).wait(value)

    return wait


def of_queues(label: str, call: Callable[[Any, Any], Any]) -> dict[str, Try]:
    tries = of_bus(lambda bus, value: call(bus.queues, value))
    return {f"{bus.replace('CommandBus', 'PgmqClient')}.{label}": tried for bus, tried in tries}


def of_schedules(label: str, call: Callable[[Any, Any], Any]) -> dict[str, Try]:
    tries = of_bus(lambda bus, value: call(bus.schedules, value))
    return {f"{bus.replace('CommandBus', 'ScheduleRepository')}.{label}": tried for bus, tried in tries}


def dump(new: NewCommand) -> object:
    return send.prepare(new)


TRIES: dict[str, Try] = {
    "wait_for(deadline)": lambda value: wait_for("ok", deadline=value),
    "sleep(duration)": sleep,
    "nested(deadline)": lambda value: nested("x", "other", deadline=value),
    "StepSignal(deadline)": lambda value: waiting_steps.check(StepSignal("ok", deadline=value)),
    "StepSleep(duration)": lambda value: waiting_steps.check(StepSleep(value)),
    "StepProcess(deadline)": lambda value: waiting_steps.check(StepProcess("other", deadline=value)),
    **made("watch_slots(watch)", lambda bus, value: bus.watch_slots(value)),
    **made("request_stack(wait)", lambda bus, value: bus.request_stack("orders", "x", wait=value)),
    **made("pause_worker(wait)", lambda bus, value: bus.pause_worker("w", wait=value)),
    **made("resume_worker(wait)", lambda bus, value: bus.resume_worker("w", wait=value)),
    **made("recycle_worker(wait)", lambda bus, value: bus.recycle_worker("w", wait=value)),
    **of_schedules("timeline(within)", lambda schedules, value: schedules.timeline(within=value)),
    **made("send(delay)", lambda bus, value: bus.send("orders", "x", delay=value)),
    **made("send(timeout)", lambda bus, value: bus.send("orders", "x", timeout=value)),
    **made("send(expires)", lambda bus, value: bus.send("orders", "x", expires=value)),
    **made("send(unique_while)", lambda bus, value: bus.send("orders", "x", unique="k", unique_while=value)),
    **made("send(debounce)", lambda bus, value: bus.send("orders", "x", unique="k", debounce=value)),
    **made(
        "send(max_delay)",
        lambda bus, value: bus.send("orders", "x", unique="k", debounce=0.001, max_delay=value),
    ),
    **made("call(expires)", lambda bus, value: bus.call("orders", "x", expires=value, wait=0.01)),
    **made("call(timeout)", lambda bus, value: bus.call("orders", "x", timeout=value, wait=0.01)),
    **made("send(within)", lambda bus, value: bus.send("orders", "x", within=value)),
    **made("wait(wait)", lambda bus, value: bus.wait("orders", "x", wait=value)),
    **made("wait_all(wait)", lambda bus, value: bus.wait_all([("orders", "x")], wait=value)),
    **made("call(wait)", lambda bus, value: bus.call("orders", "x", wait=value)),
    "SentCommand.wait(wait)": receipt(SentCommand("orders", "x", 1)),
    "CreatedBatch.wait(wait)": receipt(CreatedBatch("orders", "x", 1, 1)),
    **made("wait_for_batch(wait)", lambda bus, value: bus.wait_for_batch("orders", "b", wait=value)),
    **made("migrate(wait)", lambda bus, value: bus.migrate(wait=value)),
    **made("prune(age)", lambda bus, value: bus.prune(age=value)),
    **made("preview_prune(age)", lambda bus, value: bus.preview_prune(age=value)),
    **made("create_roles(keep)", lambda bus, value: bus.create_roles("somebody", keep=value)),
    **{
        f"{bus.replace('CommandBus', 'BatchRepository')}.wait_for(wait)": tried
        for bus, tried in of_bus(lambda bus, value: bus.batches.wait_for("orders", "b", wait=value))
    },
    **of_queues("send(delay)", lambda queues, value: queues.send("replies", {}, delay=value)),
    **of_queues("send_batch(delay)", lambda queues, value: queues.send_batch("replies", [{}], delay=value)),
    **of_queues("read(vt)", lambda queues, value: queues.read("replies", vt=value)),
    **of_queues("read_with_poll(vt)", lambda queues, value: queues.read_with_poll("replies", vt=value)),
    **of_queues("read_with_poll(wait)", lambda queues, value: queues.read_with_poll("replies", wait=value)),
    **of_queues(
        "read_with_poll(poll_interval)",
        lambda queues, value: queues.read_with_poll("replies", poll_interval=value),
    ),
    **of_queues("set_vt(vt)", lambda queues, value: queues.set_vt("replies", 1, vt=value)),
    **of_queues("wait_for(wait)", lambda queues, value: queues.wait_for("replies", wait=value)),
    **{
        f"{bus.replace('CommandBus', 'KeyLimitRepository')}.override(until)": tried
        for bus, tried in of_bus(
            lambda bus, value: bus.key_limits.override("orders", "x", "k", concurrency=1, until=value)
        )
    },
    **{
        f"{bus.replace('CommandBus', 'PlanRepository')}.preview(over)": tried
        for bus, tried in of_bus(lambda bus, value: bus.plans.preview("orders", "retry", over=value))
    },
    "rehearse(timeout)": lambda value: rehearse(
        "shop:handlers", "orders", "x", timeout=value, settings=Settings(database_url=NOBODY)
    ),
    **of_schedules("create(every)", lambda schedules, value: schedules.create("orders", "x", every=value)),
    **of_schedules(
        "create(timeout)", lambda schedules, value: schedules.create("orders", "x", every=60, timeout=value)
    ),
    **of_schedules(
        "create(expires)", lambda schedules, value: schedules.create("orders", "x", every=60, expires=value)
    ),
    "Schedule(expires)": lambda value: Schedule("orders", "x", every=60, expires=value),
    "HandlerRegistry.schedule(expires)": lambda value: HandlerRegistry().schedule(
        "orders", "x", every=60, expires=value
    ),
    "Schedule(every)": lambda value: Schedule("orders", "x", every=value),
    "Schedule(timeout)": lambda value: Schedule("orders", "x", every=60, timeout=value),
    "ScheduleTimes.make(every)": lambda value: ScheduleTimes.make(None, value, None),
    "HandlerRegistry.schedule(every)": lambda value: HandlerRegistry().schedule("orders", "x", every=value),
    "HandlerRegistry.schedule(timeout)": lambda value: HandlerRegistry().schedule(
        "orders", "x", every=60, timeout=value
    ),
    "NewCommand(unique_while)": lambda value: unique_key.split(NewCommand("x", unique="k", unique_while=value)),
    "NewCommand(debounce)": lambda value: unique_key.split(NewCommand("x", unique="k", debounce=value)),
    "NewCommand(max_delay)": lambda value: unique_key.split(
        NewCommand("x", unique="k", debounce=0.001, max_delay=value)
    ),
    "NewCommand(expires)": lambda value: dump(NewCommand("x", expires=value)),
    "RetryPolicy(max_snooze_time)": lambda value: RetryPolicy(max_snooze_time=value),
    "Snooze(delay)": lambda value: Snooze(value),
    "NewCommand(delay)": lambda value: dump(NewCommand("x", delay=value)),
    "NewCommand(timeout)": lambda value: dump(NewCommand("x", timeout=value)),
    "NewProcess(deadline)": lambda value: start.prepare_start(
        NewProcess(deadline=value), deadline=None, max_bytes=100
    ),
    "RetryPolicy(backoff_schedule)": lambda value: RetryPolicy(backoff_schedule=[1, value]),
    "Limit(lease)": lambda value: Limit("docai", 1, lease=value),
    "Limit(call_timeout)": lambda value: Limit("docai", 1, call_timeout=value),
    "Limit(max_wait)": lambda value: Limit("docai", 1, max_wait=value),
    "Limit(backoff)": lambda value: Limit("docai", 1, backoff=[value]),
    "Limit(breaker_reset)": lambda value: Limit("docai", 1, breaker_reset=value),
    "Limit.changed(lease)": lambda value: Limit("docai", 1).changed(lease=value),
    "Limit.changed(call_timeout)": lambda value: Limit("docai", 1).changed(call_timeout=value),
    "Limit.changed(max_wait)": lambda value: Limit("docai", 1).changed(max_wait=value),
    "Limit.changed(backoff)": lambda value: Limit("docai", 1).changed(backoff=[value]),
    "Limit.changed(breaker_reset)": lambda value: Limit("docai", 1).changed(breaker_reset=value),
    "Breaker(window)": lambda value: Breaker(window=value),
    "Breaker(reset)": lambda value: Breaker(reset=value),
    "Saga(deadline)": lambda value: Saga("order", step("pay", "bank"), deadline=value),
    "Saga(timeout)": lambda value: Saga("order", step("pay", "bank"), timeout=value),
    "step(timeout)": lambda value: step("pay", "bank", timeout=value),
    "step(deadline)": lambda value: step("pay", "bank", deadline=value),
    "step(delay)": lambda value: step("pay", "bank", delay=value),
    "handler(timeout)": lambda value: handler("orders", "x", timeout=value),
    "HandlerRegistry.handler(timeout)": lambda value: HandlerRegistry().handler("orders", "x", timeout=value),
    "HandlerRegistry.register(timeout)": lambda value: HandlerRegistry().register(
        "orders", "x", lambda command, ctx: None, timeout=value
    ),
    "handler(chunk_wait)": lambda value: handler("orders", "x", chunk=2, chunk_wait=value),
    "HandlerRegistry.handler(chunk_wait)": lambda value: HandlerRegistry().handler(
        "orders", "x", chunk=2, chunk_wait=value
    ),
    "HandlerRegistry.register(chunk_wait)": lambda value: HandlerRegistry().register(
        "orders", "x", lambda commands, ctx: None, chunk=2, chunk_wait=value
    ),
    "Worker.stop(wait)": lambda value: Worker(
        HandlerRegistry(), domains=["orders"], settings=Settings(database_url=NOBODY)
    ).stop(wait=value),
    "AsyncWorker.stop(wait)": lambda value: asyncio.run(
        commandbus.AsyncWorker(HandlerRegistry(), domains=["orders"], settings=Settings(database_url=NOBODY)).stop(
            wait=value
        )
    ),
    "ProcessReplyRouter.stop(wait)": lambda value: commandbus.ProcessReplyRouter(
        [Saga("order", step("pay", "bank"))], settings=Settings(database_url=NOBODY)
    ).stop(wait=value),
    "WorkerWatchdog(check_interval)": lambda value: WorkerWatchdog(None, check_interval=value),  # type: ignore[arg-type]
    "WorkerWatchdog(cooldown)": lambda value: WorkerWatchdog(None, cooldown=value),  # type: ignore[arg-type]
    "HealthStatus(window)": lambda value: HealthStatus(window=value),
}
ON_A_SERVER = {
    "start_process(deadline)": lambda bus, value: bus.start_process("order", deadline=value),
    "set_limit(lease)": lambda bus, value: bus.set_limit("docai", concurrency=1, lease=value),
    "set_limit(call_timeout)": lambda bus, value: bus.set_limit("docai", concurrency=1, call_timeout=value),
    "set_limit(max_wait)": lambda bus, value: bus.set_limit("docai", concurrency=1, max_wait=value),
    "set_limit(backoff)": lambda bus, value: bus.set_limit("docai", concurrency=1, backoff=[value]),
    "set_limit(breaker_reset)": lambda bus, value: bus.set_limit("docai", concurrency=1, breaker_reset=value),
    "limit(wait)": lambda bus, value: bus.limit("wide", wait=value),
    "limit(timeout)": lambda bus, value: bus.limit("wide", wait=2, timeout=value),
}
NOT_REFUSED = (commandbus.DatabaseUnavailableError, commandbus.LimitTimeoutError, RuntimeError)
"""The duration was accepted, and then: nobody serves the database, or the worker is not running."""
_names = map(str, itertools.count())


def _make_no_call(ctx: Any, value: Any) -> Any:
    block = ctx.effect(next(_names), settle_after=value)
    if hasattr(block, "__aenter__"):
        return _make_no_async_call(block)
    with block as effect:
        effect.not_done()
    return None


async def _make_no_async_call(block: Any) -> None:
    async with block as effect:
        effect.not_done()


def _call_once(ctx: Any, value: Any) -> Any:
    is_async = isinstance(ctx, commandbus.AsyncHandlerContext)
    call = (lambda _: asyncio.sleep(0)) if is_async else (lambda _: None)
    return ctx.effect_once(next(_names), call, settle_after=value)


IN_HANDLERS: dict[str, Callable[[Any, Any], Any]] = {
    "effect(settle_after)": _make_no_call,
    "effect_once(settle_after)": _call_once,
    "sleep(duration)": lambda ctx, value: ctx.sleep(value),
    "extend(duration)": lambda ctx, value: ctx.extend(value),
    "child(timeout)": lambda ctx, value: ctx.child(timeout=value),
    "limit(wait)": lambda ctx, value: ctx.limit("docai", wait=value),
    "limit(timeout)": lambda ctx, value: ctx.limit("docai", timeout=value),
}
SHORT = [0.01, "10ms", timedelta(milliseconds=10)]
LONG = [20, "20s", timedelta(seconds=20)]
TAKEN = {label: LONG if label.startswith("limit") else SHORT for label in IN_HANDLERS}
SENT = {"StepCommand(delay)", "StepCommand(timeout)", "StepCommand(deadline)"}
"""Checked when the step is sent; see below."""
SNOOZES = {f"{kind}Context.snooze(delay)" for kind in ("Handler", "AsyncHandler", "Chunk", "AsyncChunk")}
"""They raise Snooze(delay)."""
RETURNED = {"RetryPolicy(delay_from)"}
"""A function that returns a duration; see tests/worker/test_snooze_and_retry_rules.py."""
STARTED = {"BaseProcessManager.start(deadline)", "Saga.start(deadline)"}
"""By `bus.start_process`."""


def duration_parameters() -> list[str]:
    found = [each.label for each in all_parameters() if re.search(r"\bDuration\b", each.annotation)]
    return [label for label in found if not label.startswith("Settings(")]


def test_every_duration_of_the_public_api_is_tried_here() -> None:
    contexts = {f"{kind}.{label}" for kind in ("HandlerContext", "AsyncHandlerContext") for label in IN_HANDLERS}
    contexts |= {  # inherited
        f"{kind}.{label}"
        for kind in ("ChunkContext", "AsyncChunkContext")
        for label in IN_HANDLERS
        if not label.startswith(("limit", "effect"))
    }
    buses = {f"{kind}.{label}" for kind in ("CommandBus", "AsyncCommandBus") for label in ON_A_SERVER}
    assert sorted(duration_parameters()) == sorted(
        {*TRIES, *contexts, *buses, *SENT, *STARTED, *SNOOZES, *RETURNED}
    )


def test_what_looks_like_a_duration_is_one() -> None:
    odd = [
        each.label
        for each in all_parameters()
        if LOOKS_LIKE_A_DURATION.match(each.name)
        and not re.search(r"\bDuration\b", each.annotation)
        and not each.owner.startswith("Settings")
        and each.owner not in RECORDS
        and each.label not in NOT_ONE
    ]
    assert not odd
    assert set(NOT_ONE) <= {each.label for each in all_parameters()}


def is_named(error: BaseException, parameter: str) -> bool:
    text = str(error)
    return (
        parameter in text and text.endswith(ACCEPTED) and ("is not a duration" in text or "is negative" in text)
    ) or (parameter in text and text.endswith(f"is longer than ten years; {ACCEPTED}"))


@pytest.mark.parametrize("label", TRIES)
def test_bad_durations_are_refused_with_one_text(label: str) -> None:
    parameter = label.rpartition("(")[2].rstrip(")")
    for value in BAD:
        with pytest.raises(ValueError, match=parameter) as refused:
            TRIES[label](value)
        assert is_named(refused.value, parameter), str(refused.value)
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize("label", TRIES)
def test_all_forms_are_accepted(label: str) -> None:
    for value in GOOD:
        with suppress(*NOT_REFUSED):
            TRIES[label](value)


def test_the_same_where_a_server_is_needed(database: str) -> None:
    with CommandBus(database) as bus:
        bus.create_domain("processes")
        bus.set_limit("wide", concurrency=1000)
    for label, call in ON_A_SERVER.items():
        parameter = label.rpartition("(")[2].rstrip(")")
        for _, tried in of_bus(call, database):
            for value in BAD:
                with pytest.raises(ValueError, match=parameter) as refused:
                    tried(value)
                assert is_named(refused.value, parameter), str(refused.value)
            for value in GOOD:
                assert tried(value)


@pytest.mark.parametrize("lane", ["sync", "async"])
def test_the_same_in_handlers(database: str, lane: str) -> None:
    handlers = HandlerRegistry()
    handlers.declare_limit(Limit("docai", 1))
    refusals: list[tuple[str, BaseException]] = []
    accepted: list[tuple[str, object]] = []

    def tell(label: str, value: object, error: BaseException | None) -> None:
        if error is None:
            accepted.append((label, value))
        else:
            refusals.append((label.rpartition("(")[2].rstrip(")"), error))

    @handlers.handler("orders", "sync", timeout=60)
    def sync(command: Any, ctx: Any) -> None:
        for label, ask in IN_HANDLERS.items():
            for value in [*BAD, *TAKEN[label]]:
                try:
                    found = ask(ctx, value)
                    if hasattr(found, "__enter__"):
                        with found:
                            pass
                except ValueError as error:
                    tell(label, value, error)
                else:
                    tell(label, value, None)

    @handlers.handler("orders", "async", timeout=60)
    async def asynchronous(command: Any, ctx: Any) -> None:
        for label, ask in IN_HANDLERS.items():
            for value in [*BAD, *TAKEN[label]]:
                try:
                    found = ask(ctx, value)
                    if hasattr(found, "__aenter__"):
                        async with found:
                            pass
                    else:
                        await found
                except ValueError as error:
                    tell(label, value, error)
                else:
                    tell(label, value, None)

    with CommandBus(database) as bus:
        bus.create_domain("orders")
        bus.send("orders", lane)
        Worker(handlers, settings=quick_settings(database)).run(until_idle=True)
        page = bus.query_commands()
    assert [record.error for record in page] == [None]
    assert len(accepted) == 3 * len(IN_HANDLERS), accepted
    assert len(refusals) == len(BAD) * len(IN_HANDLERS)
    for parameter, error in refusals:
        assert is_named(error, parameter), str(error)


def test_settings_take_all_forms_too(tmp_path: Path) -> None:
    durations = [name for name, setting in SETTINGS.items() if setting.kind.is_duration]
    assert len(durations) > 12
    for name in durations:
        setting = SETTINGS[name]
        if name == "backoff_schedule":
            assert load_settings({name: [1, "2s", timedelta(minutes=1)]}).backoff_schedule == (1.0, 2.0, 60.0)
            continue
        default = setting.default or 30.0
        forms = [default, f"{default * 1000:.0f}ms", timedelta(seconds=default)]
        for form in forms:
            assert getattr(load_settings({name: form}, environ={}), name) == default, (name, form)
            assert getattr(Settings(**{name: form}), name) == default, (name, form)
        assert getattr(load_settings(environ={setting.env: f"{default}s"}), name) == default
        for value in (-1, "5 parsecs", math.nan, True, 10**12):
            for make in (lambda given: load_settings(given, environ={}), lambda given: Settings(**given)):
                with pytest.raises(ValueError, match=name):
                    make({name: value})


@pytest.mark.parametrize(
    ("said", "seconds"), [(7, 7.0), ("7s", 7.0), ("1m", 60.0), (timedelta(seconds=7), 7.0), ("parsecs", None)]
)
def test_a_rate_limit_error_takes_all_forms_and_refuses_none(said: Any, seconds: float | None) -> None:
    failure = api_failure(RateLimitError(retry_after=said))
    assert failure is not None
    assert failure.retry_after == seconds


class OneStep(BaseProcessManager[dict[str, Any]]):
    """Its one command has the options that its process was started with, if they come as JSON."""

    process_type = "one_step"
    options: dict[str, Any] = {}  # noqa: RUF012

    def first_step(self, state: dict[str, Any]) -> str:
        return "pay"

    def build_command(self, step: str, state: dict[str, Any]) -> StepCommand:
        return StepCommand("bank", step, **self.options)

    def next_step(self, step: str, reply: StepReply, state: dict[str, Any]) -> None:
        return None


def started(database: str, **options: Any) -> None:
    manager = OneStep()
    manager.options = options
    handlers = HandlerRegistry()
    handlers.register_process(manager)
    with CommandBus(database) as bus:
        for domain in ("processes", "bank"):
            bus.create_domain(domain)
        manager.start(bus)
    Worker(handlers, settings=quick_settings(database)).run(until_idle=True)


@pytest.mark.parametrize("parameter", ["delay", "timeout", "deadline"])
def test_step_commands_are_checked_when_they_are_sent(database: str, parameter: str) -> None:
    for value in ("5 parsecs", -1, math.nan):
        started(database, **{parameter: value})
        with CommandBus(database) as bus:
            (entry,) = TroubleshootingQueue(bus).list("processes")
            assert entry.error_code == "INVALID_STEP"
            assert f"cannot be sent: {parameter}: {value!r} is " in str(entry.error)
            assert str(entry.error).endswith(ACCEPTED)
            TroubleshootingQueue(bus).operator_cancel("processes", entry.command_id)


@pytest.mark.parametrize("form", [90, "90s", "1m30s", timedelta(seconds=90)])
def test_step_commands_take_all_forms(database: str, form: Any) -> None:
    started(database, delay=form, timeout=form, deadline=form)
    with CommandBus(database) as bus:
        (sent,) = bus.query_commands(domain="bank")
        (process,) = bus.query_processes()
        found = bus.get_process("processes", process.process_id)
    assert sent.timeout == 90.0
    assert sent.visible_at is not None
    assert round((sent.visible_at - sent.created_at).total_seconds()) == 90
    assert found is not None
    (step_record,) = found.steps
    assert step_record.deadline_at is not None
    assert round((step_record.deadline_at - step_record.sent_at).total_seconds()) == 90
