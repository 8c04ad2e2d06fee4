"""`with ctx.limit(…)` and `async with ctx.limit(…)`: a permit for a part of a handler's code.

Where it can be, one body runs in both lanes (see support/workers.py).
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from commandbus import (
    ApiTimeoutError,
    CommandBus,
    CommandStatus,
    DeadlineExceededError,
    HandlerRegistry,
    Limit,
    LimitTimeoutError,
    RateLimitError,
    UnknownLimitError,
)
from commandbus.limits import client as client_module
from commandbus.model.command import NewCommand
from support.api_stub import ApiStub, Reply, too_many
from support.waiting import one, until
from support.workers import AT_ONCE, BUSY, add, done, either, opened

Db = psycopg.Connection[Any]
Start = Callable[..., Any]
TSQ = CommandStatus.IN_TROUBLESHOOTING_QUEUE


@pytest.fixture
def api() -> Iterator[ApiStub]:
    """A real HTTP API that counts who is inside."""
    with ApiStub() as api:
        yield api


@pytest.fixture
def never_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lost wake would be repaired by does not run: who is woken was told."""
    monkeypatch.setattr(client_module, "SWEEP_SECONDS", 1e9)


def holders(db: Db, name: str = "docai") -> dict[str, float]:
    """Who holds a permit now: tokens whose lease lasts."""
    found = one(
        db,
        "SELECT COALESCE(jsonb_object_agg(key, value), '{}') FROM commandbus.limits, jsonb_each(holders) "
        "WHERE name = %s AND value::float8 > extract(epoch FROM clock_timestamp())",
        name,
    )
    assert isinstance(found, dict)
    return found


def in_line(db: Db, name: str = "docai") -> int:
    """How many callers inside programs wait."""
    query = "SELECT count(*) FROM commandbus.parked WHERE limit_name = %s AND domain = '' AND woken_at IS NULL"
    return int(one(db, query, name))


def status_of(bus: CommandBus, sent: Any) -> CommandStatus:
    return bus.get_command("orders", sent.command_id).status


def failures_of(db: Db, sent: Any) -> list[tuple[str, str, str]]:
    """(verdict, error code, error) of a command's attempts."""
    rows = db.execute(
        "SELECT a.verdict, a.error_code, a.error FROM commandbus.attempt a "
        "JOIN commandbus.command c ON c.id = a.command WHERE c.command_id = %s ORDER BY a.number",
        [sent.command_id],
    )
    return [(verdict, code, error) for verdict, code, error in rows]


def fetch(url: str, timeout: float | None = None) -> Any:
    """A call of the API, as people write it."""
    with urllib.request.urlopen(url, timeout=timeout) as response:
        return json.load(response)


# --- a permit, and the wait for it ------------------------------------------------------------------------------


def test_a_permit_is_taken_and_given_back(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: Start,
    lane: str,
    go_on: threading.Event,
) -> None:
    bus.declare_limit(Limit("docai", concurrency=2))
    seen: list[Any] = []

    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai")) as call:
            seen.append((call.limit, call.is_lost, call.remaining() is None or call.remaining() > 1))
            await opened(go_on)

    add(handlers, lane, "page", page)
    sent = bus.send("orders", "page")
    start_worker(handlers)
    until(lambda: len(holders(db)) == 1)
    (token,) = holders(db)
    assert sent.command_id in token  # who holds it can be seen
    go_on.set()
    until(lambda: status_of(bus, sent) is CommandStatus.COMPLETED)
    until(lambda: holders(db) == {})
    assert seen == [("docai", False, True)]


def test_ac2_five_calls_at_once_and_further_chunks_wait_for_a_permit(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str, api: ApiStub
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    api.gathers = 5

    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai")):
            url = f"{api.url}/call?n={command.data}&seconds=0.02"
            await done(asyncio.to_thread(fetch, url) if lane == "async" else fetch(url))

    add(handlers, lane, "page", page)
    bus.send_many("orders", [NewCommand("page", n) for n in range(40)])
    start_worker(handlers, concurrency=10)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 40, 30)
    assert api.peak == 5
    assert set(api.counted().values()) == {1}
    until(lambda: holders(db) == {})
    # None failed, was parked or refused. One may have waited so long before busy slots that it was given back.
    assert one(db, "SELECT count(*) FROM commandbus.attempt WHERE error IS DISTINCT FROM %s", BUSY) == 0


def test_who_waits_is_told_when_a_permit_is_free(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: Start,
    lane: str,
    go_on: threading.Event,
    never_sweeps: None,
) -> None:
    """No polling: while a caller waits, the limit client asks the database nothing."""
    bus.declare_limit(Limit("docai", concurrency=1))
    order: list[int] = []

    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai")):
            order.append(command.data)
            if command.data == 0:
                await opened(go_on)

    add(handlers, lane, "page", page)
    bus.send("orders", "page", 0)
    start_worker(handlers, concurrency=8)
    until(lambda: order == [0])
    for n in (1, 2, 3):
        bus.send("orders", "page", n)
        until(lambda n=n: in_line(db) == n)
    # A poller would be seen: the limit client's connection stays as it is for more than a second.
    quiet = (
        "SELECT bool_and(state = 'idle' AND clock_timestamp() - query_start > interval '1.2 s') "
        "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '%% limit client'"
    )
    until(lambda: one(db, quiet.replace("%%", "%")))
    assert order == [0]
    go_on.set()
    until(lambda: order == [0, 1, 2, 3])
    until(lambda: holders(db) == {})


def test_waiting_too_long_names_the_limit_and_is_not_a_429(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: Start,
    lane: str,
    go_on: threading.Event,
) -> None:
    bus.declare_limit(Limit("docai", concurrency=1))
    errors: list[Exception] = []

    async def holder(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai")):
            await opened(go_on)

    async def waiter(command: Any, ctx: Any) -> None:
        try:
            async with either(ctx.limit("docai", wait=0.3)):
                raise AssertionError("there was no permit")
        except LimitTimeoutError as error:
            errors.append(error)
            raise

    add(handlers, lane, "hold", holder)
    add(handlers, lane, "page", waiter)
    bus.send("orders", "hold")
    start_worker(handlers, retry_policy=AT_ONCE)
    until(lambda: len(holders(db)) == 1)
    sent = bus.send("orders", "page", max_attempts=1)
    until(lambda: status_of(bus, sent) is TSQ)
    ((verdict, code, error),) = failures_of(db, sent)
    assert (verdict, code) == ("EXHAUSTED", "LIMIT_TIMEOUT")
    assert "'docai'" in error
    assert not isinstance(errors[0], RateLimitError)
    assert errors[0].limit == "docai"  # type: ignore[attr-defined]
    assert one(db, "SELECT (step, failures, rate_limited) = (0, 0, 0) FROM commandbus.limits")
    until(lambda: in_line(db) == 0)
    go_on.set()
    until(lambda: holders(db) == {})


def test_a_short_wait_is_as_short_as_it_says(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str
) -> None:
    bus.declare_limit(Limit("docai", concurrency=1))
    took: list[float] = []

    async def page(command: Any, ctx: Any) -> None:
        for wait in (0.0, 0.2):
            began = time.monotonic()
            with pytest.raises(LimitTimeoutError, match="docai"):
                async with either(ctx.limit("docai", wait=wait)):
                    raise AssertionError("there was no permit")
            took.append(time.monotonic() - began)

    add(handlers, lane, "page", page)
    with bus.limit("docai"):
        sent = bus.send("orders", "page")
        start_worker(handlers)
        until(lambda: status_of(bus, sent) is CommandStatus.COMPLETED)
    assert took[0] < 0.8
    assert 0.2 <= took[1] < 0.8, "it said 0.2 s"


def test_the_wait_counts_against_the_deadline(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: Start,
    lane: str,
    go_on: threading.Event,
) -> None:
    bus.declare_limit(Limit("docai", concurrency=1))
    errors: list[BaseException] = []

    async def page(command: Any, ctx: Any) -> None:
        try:
            async with either(ctx.limit("docai", wait=60)):
                raise AssertionError("there was no permit")
        except BaseException as error:
            errors.append(error)
            raise

    add(handlers, lane, "page", page)
    with bus.limit("docai"):
        sent = bus.send("orders", "page", timeout=0.6, max_attempts=1)
        start_worker(handlers, retry_policy=AT_ONCE)
        until(lambda: status_of(bus, sent) is TSQ)
    ((verdict, code, error),) = failures_of(db, sent)
    assert (verdict, code) == ("EXHAUSTED", "TIMEOUT")
    assert "deadline" in error
    assert isinstance(errors[0], DeadlineExceededError | asyncio.CancelledError)
    assert not isinstance(errors[0], ApiTimeoutError)
    until(lambda: in_line(db) == 0)


def test_cancelling_ends_the_wait(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str
) -> None:
    bus.declare_limit(Limit("docai", concurrency=1))

    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai", wait=60)):
            raise AssertionError("there was no permit")

    add(handlers, lane, "page", page)
    with bus.limit("docai"):
        sent = bus.send("orders", "page")
        start_worker(handlers)
        until(lambda: in_line(db) == 1)
        bus.cancel("orders", sent.command_id, operator="ann")
        until(lambda: status_of(bus, sent) is CommandStatus.CANCELED)
        until(lambda: in_line(db) == 0)
    until(lambda: holders(db) == {})


def test_stopping_the_worker_ends_the_wait_and_spends_no_attempt(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str
) -> None:
    bus.declare_limit(Limit("docai", concurrency=1))
    runs: list[tuple[int, int]] = []

    async def page(command: Any, ctx: Any) -> None:
        runs.append((ctx.attempt, ctx.attempt_number))
        async with either(ctx.limit("docai", wait=60)):
            return

    add(handlers, lane, "page", page)
    with bus.limit("docai"):
        sent = bus.send("orders", "page", max_attempts=1)
        worker = start_worker(handlers, shutdown_timeout=1.0, cancel_grace=0.5)
        until(lambda: in_line(db) == 1)
        worker.stop()
        assert in_line(db) == 0
        assert status_of(bus, sent) is CommandStatus.PENDING
    start_worker(handlers)
    until(lambda: status_of(bus, sent) is CommandStatus.COMPLETED)
    assert runs == [(1, 1), (1, 2)]


def test_an_unknown_limit_and_bad_terms_are_refused(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str
) -> None:
    bus.declare_limit(Limit("docai", concurrency=1))
    seen: list[str] = []

    async def page(command: Any, ctx: Any) -> None:
        for name, terms, kind in (
            ("docia", {}, UnknownLimitError),
            ("no name", {}, ValueError),
            ("x'; DROP TABLE commandbus.limits; --", {}, ValueError),
            ("docai", {"wait": -1}, ValueError),
            ("docai", {"wait": float("nan")}, ValueError),
            ("docai", {"timeout": -1}, ValueError),
            ("docai", {"timeout": "soon"}, ValueError),
        ):
            with pytest.raises(kind) as caught:
                async with either(ctx.limit(name, **terms)):
                    raise AssertionError("was let in")
            seen.append(str(caught.value))

    add(handlers, lane, "page", page)
    sent = bus.send("orders", "page")
    start_worker(handlers)
    until(lambda: status_of(bus, sent) is CommandStatus.COMPLETED, what=lambda: failures_of(db, sent))
    assert len(seen) == 7
    assert "docia" in seen[0]
    assert "known: docai" in seen[0]
    assert holders(db) == {}


def test_blocks_of_two_limits_can_be_nested(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str
) -> None:
    bus.declare_limit(Limit("docai", concurrency=2))
    bus.declare_limit(Limit("gpu", concurrency=1))
    inside: list[tuple[int, int]] = []
    lock = threading.Lock()
    count = {"docai": 0, "gpu": 0}

    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai")):
            with lock:
                count["docai"] += 1
            async with either(ctx.limit("gpu")):
                with lock:
                    count["gpu"] += 1
                    inside.append((count["docai"], count["gpu"]))
                await done(ctx.sleep(0.01))
                with lock:
                    count["gpu"] -= 1
            with lock:
                count["docai"] -= 1

    add(handlers, lane, "page", page)
    bus.send_many("orders", [NewCommand("page", n) for n in range(15)])
    start_worker(handlers, concurrency=6)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 15, 30)
    assert max(docai for docai, _ in inside) <= 2
    assert {gpu for _, gpu in inside} == {1}
    until(lambda: holders(db) == {} and holders(db, "gpu") == {})


def test_a_block_uses_the_permit_that_its_handler_has_anyway(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str
) -> None:
    """Parked when it is full, by `limits`, and a time for the one call, by the block: one permit is enough."""
    bus.declare_limit(Limit("docai", concurrency=1))
    seen: list[int] = []

    async def page(command: Any, ctx: Any) -> None:
        for _ in range(3):
            async with either(ctx.limit("docai", wait=0.5, timeout=20)):
                seen.append(len(holders(db)))

    add(handlers, lane, "page", page, limits=["docai"])
    sent = bus.send("orders", "page")
    start_worker(handlers)
    until(lambda: status_of(bus, sent) is CommandStatus.COMPLETED, what=lambda: failures_of(db, sent))
    assert seen == [1, 1, 1]
    until(lambda: holders(db) == {})


@pytest.mark.parametrize("outer", ["block", "handler"])
def test_the_only_permit_asked_for_twice_ends_in_an_error_not_in_a_deadlock(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str, outer: str
) -> None:
    bus.declare_limit(Limit("docai", concurrency=1))

    async def page(command: Any, ctx: Any) -> None:
        # With limits=["docai"] the first block has the permit that the attempt has anyway.
        async with either(ctx.limit("docai")), either(ctx.limit("docai", wait=0.3)):
            return

    add(handlers, lane, "page", page, limits=["docai"] if outer == "handler" else [])
    sent = bus.send("orders", "page", max_attempts=1)
    start_worker(handlers, retry_policy=AT_ONCE)
    until(lambda: status_of(bus, sent) is TSQ)
    assert failures_of(db, sent)[-1][1] == "LIMIT_TIMEOUT"
    until(lambda: holders(db) == {})


# --- the time of one call --------------------------------------------------------------------------------------


def test_an_async_call_that_takes_too_long_is_canceled_and_the_others_go_on(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    seen: list[Any] = []

    @handlers.handler("orders", "page")
    async def page(command: Any, ctx: Any) -> str:
        async def call(seconds: float) -> str:
            async with ctx.limit("docai", timeout=0.3):
                try:
                    await asyncio.sleep(seconds)
                except asyncio.CancelledError:
                    seen.append("canceled")
                    raise
            return "done"

        first, *others = await asyncio.gather(call(60), call(0.01), call(0.05), return_exceptions=True)
        seen.append(first)
        async with ctx.limit("docai", timeout=5):  # the handler goes on
            return f"{others}"

    sent = bus.send("orders", "page")
    start_worker(handlers)
    until(lambda: status_of(bus, sent) is CommandStatus.COMPLETED)
    assert bus.get_command("orders", sent.command_id).result == "['done', 'done']"
    assert seen[0] == "canceled"
    assert isinstance(seen[1], ApiTimeoutError)
    assert str(seen[1]) == "no answer from docai within 0.3 s (timeout of the block)"


NO_ANSWER = "no answer from docai within 0.4 s (timeout of the block)"


def _calls_too_long(lane: str, how: str, api: ApiStub) -> Callable[[Any, Any], Any]:
    async def page(command: Any, ctx: Any) -> None:
        if command.data == "quick":
            async with either(ctx.limit("docai", timeout=20)):
                return
        async with either(ctx.limit("docai", timeout=0.4)) as call:
            if how == "sleep":
                await done(ctx.sleep(60))
            elif how == "client":
                left = call.remaining()
                await done(asyncio.to_thread(fetch, api.url, left) if lane == "async" else fetch(api.url, left))
            else:
                while True:
                    ctx.raise_if_canceled()
                    await done(asyncio.sleep(0.01) if lane == "async" else ctx.canceled.wait(0.01))

    return page


@pytest.mark.parametrize("how", ["sleep", "client", "asks"])
def test_ac1_a_call_that_takes_too_long_fails_its_attempt_with_the_error_timeout(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: Start,
    lane: str,
    how: str,
    api: ApiStub,
) -> None:
    """on_timeout="fail": the command is FAILED, its error names the API and the figure, and the others go on."""
    bus.declare_limit(Limit("docai", concurrency=5, lease=2))
    api.usual = Reply(hangs=True)
    add(handlers, lane, "page", _calls_too_long(lane, how, api), on_timeout="fail")
    slow = bus.send("orders", "page", "slow")
    start_worker(handlers)
    others = [bus.send("orders", "page", "quick") for _ in range(3)]
    for sent in others:
        until(lambda sent=sent: status_of(bus, sent) is CommandStatus.COMPLETED)
    until(lambda: status_of(bus, slow) is CommandStatus.FAILED, what=lambda: failures_of(db, slow))
    assert failures_of(db, slow) == [("TIMED_OUT", "TIMEOUT", NO_ANSWER)]
    assert bus.get_command("orders", slow.command_id).error == NO_ANSWER
    assert one(db, "SELECT failures FROM commandbus.limits") in (0, 1)  # a quick one may have come after it


def test_ac1_by_default_a_timed_out_call_is_retried(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str, api: ApiStub
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5, breaker_failures=0))
    add(handlers, lane, "page", _calls_too_long(lane, "sleep", api))
    sent = bus.send("orders", "page", "slow", max_attempts=2)
    start_worker(handlers, retry_policy=AT_ONCE)
    until(lambda: status_of(bus, sent) is TSQ)
    assert failures_of(db, sent) == [("RETRY", "TIMEOUT", NO_ANSWER), ("EXHAUSTED", "TIMEOUT", NO_ANSWER)]


def test_a_sync_call_that_ignores_its_time_goes_down_the_ladder_and_the_others_go_on(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, go_on: threading.Event
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5, lease=30))

    @handlers.handler("orders", "page", on_timeout="fail")
    def page(command: Any, ctx: Any) -> None:
        with ctx.limit("docai", timeout=0.3):
            if command.data == "deaf":
                go_on.wait(60)

    deaf = bus.send("orders", "page", "deaf")
    start_worker(handlers, concurrency=1, cancel_grace=0.3)
    until(lambda: status_of(bus, deaf) is CommandStatus.FAILED)
    ((verdict, code, error),) = failures_of(db, deaf)
    assert (verdict, code) == ("TIMED_OUT", "EXECUTION_STUCK")
    assert "timeout" in error
    assert len(holders(db)) == 1  # its call goes on on the other side
    other = bus.send("orders", "page", "quick")
    until(lambda: status_of(bus, other) is CommandStatus.COMPLETED)


def test_after_a_timeout_the_permit_is_kept_until_its_lease_ends(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str, api: ApiStub
) -> None:
    """The call may still run on the other side: a permit that was free at once would let one too many in."""
    bus.declare_limit(Limit("docai", concurrency=1, lease=2, breaker_failures=0))
    add(handlers, lane, "page", _calls_too_long(lane, "sleep", api), on_timeout="fail")
    slow = bus.send("orders", "page", "slow")
    start_worker(handlers)
    until(lambda: status_of(bus, slow) is CommandStatus.FAILED)
    ended_at = one(db, "SELECT extract(epoch FROM finished_at)::float8 FROM commandbus.attempt")
    (lease_end,) = holders(db).values()
    assert lease_end > ended_at
    quick = bus.send("orders", "page", "quick")
    until(lambda: in_line(db) == 1)
    until(lambda: status_of(bus, quick) is CommandStatus.COMPLETED, 10)
    began = one(
        db,
        "SELECT extract(epoch FROM finished_at)::float8 FROM commandbus.command WHERE command_id = %s",
        quick.command_id,
    )
    assert began >= lease_end


def test_an_outer_call_that_times_out_after_an_inner_one_is_called_timeout_too(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    bus.declare_limit(Limit("gpu", concurrency=5))

    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai", timeout=0.5)):
            async with either(ctx.limit("gpu", timeout=0.2)):
                pass
            await done(ctx.sleep(60))

    add(handlers, lane, "page", page, on_timeout="fail")
    sent = bus.send("orders", "page")
    start_worker(handlers)
    until(lambda: status_of(bus, sent) is CommandStatus.FAILED)
    assert failures_of(db, sent) == [("TIMED_OUT", "TIMEOUT", NO_ANSWER.replace("0.4", "0.5"))]


def test_after_a_block_the_deadline_is_the_attempts_own_again(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    left: list[float] = []

    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai", timeout=0.5)) as call:
            left.append(call.remaining())
        left.append(ctx.remaining())
        await done(ctx.sleep(0.8))

    add(handlers, lane, "page", page)
    sent = bus.send("orders", "page", timeout=30)
    start_worker(handlers)
    until(lambda: status_of(bus, sent) is CommandStatus.COMPLETED, what=lambda: failures_of(db, sent))
    assert left[0] <= 0.5
    assert left[1] > 20


def test_a_block_cannot_outlast_the_deadline_of_the_attempt(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))

    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai", timeout=60)) as call:
            assert call.remaining() <= 0.5
            await done(ctx.sleep(60))

    add(handlers, lane, "page", page, on_timeout="fail")
    sent = bus.send("orders", "page", timeout=0.5)
    start_worker(handlers)
    until(lambda: status_of(bus, sent) is CommandStatus.FAILED)
    ((_, code, error),) = failures_of(db, sent)
    assert code == "TIMEOUT"
    assert "deadline" in error  # the attempt's own, not the call's


# --- 429s ------------------------------------------------------------------------------------------------------


def backing_off(db: Db, name: str = "docai") -> Any:
    return db.execute(
        "SELECT step, rate_limited, reason FROM commandbus.limits WHERE name = %s", [name]
    ).fetchone()


def test_ac3_a_429_begins_the_back_off_and_the_chunk_is_retried_after_it(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5, backoff=[0.5]))
    calls: list[float] = []

    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai")):
            calls.append(time.monotonic())
            if len(calls) == 1:
                raise RateLimitError("429 from docai")

    add(handlers, lane, "page", page)
    sent = bus.send("orders", "page", max_attempts=1)
    start_worker(handlers)
    until(lambda: status_of(bus, sent) is CommandStatus.COMPLETED, what=lambda: failures_of(db, sent))
    assert calls[1] - calls[0] >= 0.4
    assert [(verdict, code) for verdict, code, _ in failures_of(db, sent)] == [("PARKED", "RATE_LIMITED")]
    until(lambda: backing_off(db) == (0, 1, None))  # over, after a probe that went well


def test_a_429_that_the_handler_catches_begins_the_back_off_all_the_same(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5, backoff=[30]))

    async def page(command: Any, ctx: Any) -> str:
        try:
            async with either(ctx.limit("docai")):
                raise RateLimitError("429 from docai")
        except RateLimitError:
            return "made do without"

    add(handlers, lane, "page", page)
    sent = bus.send("orders", "page")
    start_worker(handlers)
    until(lambda: status_of(bus, sent) is CommandStatus.COMPLETED)
    until(lambda: backing_off(db) == (1, 1, "429 from docai"))
    assert holders(db) == {}  # a permit is not held while backing off
    with pytest.raises(LimitTimeoutError, match="docai"), bus.limit("docai", wait=0):
        raise AssertionError("the back-off is everybody's")


def test_what_a_429_names_is_the_limit_that_backs_off(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str
) -> None:
    """RateLimitError(limit=…) may concern a limit that the attempt holds no permit of."""
    bus.declare_limit(Limit("docai", concurrency=5, backoff=[30]))
    bus.declare_limit(Limit("gpu", concurrency=5, backoff=[30]))

    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai")):
            pass
        raise RateLimitError("429 from gpu", limit="gpu")

    add(handlers, lane, "page", page)
    sent = bus.send("orders", "page")
    start_worker(handlers)
    until(lambda: backing_off(db, "gpu") == (1, 1, "429 from gpu"), what=lambda: failures_of(db, sent))
    assert backing_off(db) == (0, 0, None)
    until(lambda: bus.status("orders")[0].parked == 1)


def test_a_429_for_another_limit_out_of_a_block_leaves_the_blocks_own_alone(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5, backoff=[30]))
    bus.declare_limit(Limit("gpu", concurrency=5, backoff=[30]))

    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai")):
            raise RateLimitError("429 from gpu", limit="gpu")

    add(handlers, lane, "page", page)
    bus.send("orders", "page")
    start_worker(handlers)
    until(lambda: backing_off(db, "gpu")[0] == 1)
    assert backing_off(db) == (0, 0, None)


def test_a_429_of_a_real_api_with_retry_after_is_recognised(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str, api: ApiStub
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5, backoff=[30]))
    api.plan(too_many("1"))

    async def page(command: Any, ctx: Any) -> Any:
        async with either(ctx.limit("docai")):
            url = f"{api.url}/call?n={command.data}"
            return await done(asyncio.to_thread(fetch, url) if lane == "async" else fetch(url))

    add(handlers, lane, "page", page)
    sent = bus.send("orders", "page", 7, max_attempts=1)
    start_worker(handlers)
    until(lambda: backing_off(db)[0] == 1)
    assert backing_off(db)[2] == "429 from docai"
    until(lambda: status_of(bus, sent) is CommandStatus.COMPLETED)
    first, second = api.visits
    assert 1.0 <= second.began - first.began < 10
    assert [code for _, code, _ in failures_of(db, sent)] == ["RATE_LIMITED"]


def test_a_503_with_a_date_is_a_429_too_and_its_command_says_until_when(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str, api: ApiStub
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    when = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 600))
    api.usual = Reply(503, headers={"Retry-After": when})

    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai")):
            await done(asyncio.to_thread(fetch, api.url) if lane == "async" else fetch(api.url))

    add(handlers, lane, "page", page)
    bus.send("orders", "page")
    start_worker(handlers)
    until(lambda: bus.status("orders")[0].parked == 1)
    found = bus.get_limit("docai")
    assert found.state == "BACKING_OFF"
    assert found.seconds_left is not None
    assert 500 < found.seconds_left <= 601
    until_, note = db.execute(
        "SELECT extract(epoch FROM until - now())::float8, note FROM commandbus.parked"
    ).fetchone() or (0, "")
    assert 500 < until_ <= 601
    assert "503 from docai" in note
    assert "step 1 of the back-off" in note


def test_nobody_who_was_let_in_before_calls_during_a_back_off(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, api: ApiStub
) -> None:
    """Commands that have a permit but no slot yet when the API says no: they do not call it either."""
    # Quick ones first: the worker has several in hand then.
    api.plan(*[Reply()] * 30, too_many(), *[Reply(seconds=0.3)] * 10)

    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=50, backoff=[1.5])])
    def page(command: Any, ctx: Any) -> None:
        fetch(f"{api.url}/call?n={command.data}")

    bus.send_many("orders", [NewCommand("page", n) for n in range(80)])
    start_worker(handlers, concurrency=1)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 80, 30)
    (refused,) = [visit for visit in api.visits if visit.status == 429]
    told = refused.ended or 0
    # The one that begins in the same moment, before the fleet can know, is one of those that are under way.
    assert [visit.name for visit in api.visits if told + 0.15 < visit.began < told + 1.3] == []


def test_an_api_that_says_at_once_is_not_called_in_a_hot_loop(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, api: ApiStub
) -> None:
    """429 with Retry-After: 0, for ever, and no breaker: nobody would be helped by a hundred calls a second."""
    api.usual = too_many("0")

    @handlers.handler("orders", "page", limits=[Limit("docai", concurrency=5, breaker_failures=0)])
    def page(command: Any, ctx: Any) -> None:
        fetch(f"{api.url}/call?n={command.data}")

    bus.send_many("orders", [NewCommand("page", n) for n in range(3)])
    start_worker(handlers)
    until(lambda: len(api.visits) >= 4)
    fourth = api.visits[3].began
    until(lambda: time.monotonic() > fourth + 2)
    assert len([visit for visit in api.visits if fourth < visit.began <= fourth + 2]) <= 10


def test_a_probe_that_is_canceled_makes_room_for_another(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: Start,
    lane: str,
    go_on: threading.Event,
) -> None:
    calls: list[int] = []

    async def page(command: Any, ctx: Any) -> None:
        calls.append(command.data)
        if len(calls) == 1:
            raise RateLimitError("429 from docai")
        if len(calls) == 2:
            await done(ctx.sleep(60))

    bus.declare_limit(Limit("docai", concurrency=5, backoff=[0.2], lease=2))
    add(handlers, lane, "page", page, limits=["docai"])
    sent = [bus.send("orders", "page", n) for n in range(3)]
    start_worker(handlers, concurrency=1)
    until(lambda: len(calls) == 2)
    probe = sent[calls[1]]
    bus.cancel("orders", probe.command_id, operator="ann")
    until(lambda: status_of(bus, probe) is CommandStatus.CANCELED)
    for item in sent:
        if item is not probe:
            until(lambda item=item: status_of(bus, item) is CommandStatus.COMPLETED)
    assert one(db, "SELECT (step, probe IS NULL) = (0, true) FROM commandbus.limits")


# --- the breaker of a limit ------------------------------------------------------------------------------------


def test_three_5xx_open_the_breaker_and_one_probe_closes_it(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str, api: ApiStub
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5, breaker_reset=5))  # until then six are sent and looked at
    api.plan(*[Reply(500)] * 3, Reply(200, seconds=0.5))

    async def page(command: Any, ctx: Any) -> None:
        url = f"{api.url}/call?n={command.data}"
        await done(asyncio.to_thread(fetch, url) if lane == "async" else fetch(url))

    add(handlers, lane, "page", page, limits=["docai"])
    bad = bus.send("orders", "page", "bad", max_attempts=3)
    start_worker(handlers, retry_policy=AT_ONCE)
    until(lambda: one(db, "SELECT breaker_open FROM commandbus.limits"))
    until(lambda: [code for _, code, _ in failures_of(db, bad)] == ["ERROR"] * 3)
    waiting = [bus.send("orders", "page", n) for n in range(6)]
    until(lambda: bus.status("orders")[0].parked == 6)
    assert len(api.visits) == 3
    notes = db.execute("SELECT DISTINCT note FROM commandbus.parked").fetchall()
    assert len(notes) == 1
    assert "the breaker of docai is open: 3 bad answers in a row, the last: 500 from docai" in notes[0][0]
    found = bus.get_limit("docai")
    assert (found.state, found.failures) == ("BREAKER_OPEN", 3)
    until(lambda: len(api.visits) == 4)
    probe = api.visits[3]
    until(lambda: probe.ended)
    assert len([visit for visit in api.visits if visit.began <= (probe.ended or 0)]) == 4  # one probe, alone
    assert probe.began - (api.visits[2].ended or 0) >= 4.9
    for sent in waiting:
        until(lambda sent=sent: status_of(bus, sent) is CommandStatus.COMPLETED)
    assert one(db, "SELECT (breaker_open, failures) = (false, 0) FROM commandbus.limits")
    done_ = db.execute("SELECT action FROM commandbus.control_action WHERE subject = 'breaker docai' ORDER BY id")
    assert [action for (action,) in done_] == ["OPEN", "CLOSE"]


def test_a_probe_that_fails_opens_the_breaker_again(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, api: ApiStub
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5, breaker_reset=0.5, breaker_failures=2))
    api.plan(*[Reply(502)] * 3)

    @handlers.handler("orders", "page", limits=["docai"])
    def page(command: Any, ctx: Any) -> None:
        fetch(f"{api.url}/call?n={command.data}")

    sent = bus.send("orders", "page", 0, max_attempts=9)
    start_worker(handlers, retry_policy=AT_ONCE)
    until(lambda: one(db, "SELECT breaker_open FROM commandbus.limits"))
    bus.send_many("orders", [NewCommand("page", n, max_attempts=9) for n in (1, 2, 3)])
    until(lambda: status_of(bus, sent) is CommandStatus.COMPLETED, 30)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == 4)
    assert [visit.status for visit in api.visits[:4]] == [502, 502, 502, 200]
    assert api.visits[2].began - (api.visits[1].ended or 0) >= 0.45
    assert api.visits[3].began - (api.visits[2].ended or 0) >= 0.45
    # Nobody called beside a probe.
    assert all(visit.inside == 1 for visit in api.visits[:4])


def test_time_outs_open_the_breaker_too(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str, api: ApiStub
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5, breaker_failures=2))
    add(handlers, lane, "page", _calls_too_long(lane, "sleep", api), on_timeout="fail")
    bus.send_many("orders", [NewCommand("page", "slow") for _ in range(2)])
    start_worker(handlers)
    until(lambda: one(db, "SELECT breaker_open FROM commandbus.limits"))
    assert "2 bad answers in a row, the last: timeout" in one(db, "SELECT open_reason FROM commandbus.limits")


def test_a_handlers_own_mistakes_say_nothing_of_the_api(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str, api: ApiStub
) -> None:
    bus.declare_limit(Limit("docai", concurrency=5))
    api.usual = Reply(404)

    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai")):
            if command.data == "http":
                await done(asyncio.to_thread(fetch, api.url) if lane == "async" else fetch(api.url))
            raise ValueError("a mistake")

    add(handlers, lane, "page", page)
    bus.send_many("orders", [NewCommand("page", "http" if n % 2 else "", max_attempts=1) for n in range(8)])
    start_worker(handlers, retry_policy=AT_ONCE)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.tsq") == 8)
    until(lambda: holders(db) == {})
    assert one(db, "SELECT (failures, step, breaker_open) = (0, 0, false) FROM commandbus.limits")
    with pytest.raises(urllib.error.HTTPError):
        fetch(api.url)


def test_callers_that_have_all_slots_do_not_wait_for_a_command_that_nobody_can_claim(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str
) -> None:
    """The first in line is a parked command. The permit that is kept for it helps when a slot is free, and the
    slots are held by those who wait for that permit."""
    limit = Limit("docai", concurrency=1)
    bus.declare_limit(limit)

    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai")):
            pass

    async def whole(command: Any, ctx: Any) -> None:
        pass

    add(handlers, lane, "page", page)
    add(handlers, lane, "whole", whole, limits=[limit])
    with bus.limit("docai"):
        start_worker(handlers, concurrency=2)
        first = bus.send("orders", "whole")
        until(lambda: one(db, "SELECT count(*) FROM commandbus.parked WHERE domain = 'orders'") == 1)
        pages = [bus.send("orders", "page") for _ in range(6)]
        until(lambda: in_line(db) == 2)
    until(lambda: all(status_of(bus, sent) is CommandStatus.COMPLETED for sent in [first, *pages]))
