"""What a worker counts of its attempts: outcomes, waits, runs, lease losses, waits for connections."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg_pool import PoolTimeout

from commandbus import (
    BusinessRuleException,
    CommandBus,
    HandlerRegistry,
    NewCommand,
    PermanentCommandError,
    Snooze,
    TransientCommandError,
    Worker,
)
from commandbus.model.attempt_counts import BOUNDS, MOST_TYPES, OTHERS, OUTCOMES, AttemptCounts, TypeCounts
from commandbus.worker.counts_page import CountsPage
from commandbus.worker.execution.attempt import Attempt
from support.waiting import until, until_settled
from support.workers import AT_ONCE, add, done, either, opened

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]


def outcomes(counts: AttemptCounts, command_type: str = "work") -> dict[str, int]:
    found = counts.by_type.get(("orders", command_type), TypeCounts())
    return {name: count for name, count in zip(OUTCOMES, found.outcomes, strict=True) if count}


def test_every_way_to_end_is_counted_once(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def work(command: Any, ctx: Any) -> Any:
        match command.data["how"]:
            case "result":
                return {"n": 1}
            case "own transaction":
                async with either(ctx.transaction()) as tx:
                    await done(tx.complete(None))
            case "business":
                raise BusinessRuleException("no")
            case "permanent":
                raise PermanentCommandError("never")
            case "transient":
                raise TransientCommandError("later")
            case "snooze":
                if ctx.command.command_id not in snoozed:
                    snoozed.add(ctx.command.command_id)
                    raise Snooze(0)
        return None

    snoozed: set[str] = set()
    add(handlers, lane, "work", work)
    ways = ["plain"] * 5 + ["result", "own transaction", "business", "permanent", "transient", "snooze"]
    bus.send_many("orders", [NewCommand("work", {"how": how}) for how in ways])
    worker = start_worker(handlers, retry_policy=AT_ONCE)
    until_settled(db)
    expected = {"completed": 8, "business_rule": 1, "permanent": 1, "retry": 2, "exhausted": 1, "snoozed": 1}
    until(lambda: outcomes(worker._counts.read()) == expected, what=lambda: str(outcomes(worker._counts.read())))
    found = worker._counts.read().by_type["orders", "work"]
    assert sum(found.runs.buckets) == sum(expected.values())
    assert sum(found.waits.buckets) == len(ways), "only first attempts have waited since they were sent"
    assert sum(worker._counts.read().connection_waits.buckets) == 1
    worker.stop()
    assert outcomes(worker._counts.read()) == expected, "the counts outlive a run"


def test_waits_and_runs_fall_into_their_buckets(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    async def work(command: Any, ctx: Any) -> None:
        await opened(go_on)

    add(handlers, "async", "work", work)
    bus.send("orders", "work")
    db.execute("UPDATE commandbus.command SET created_at = created_at - interval '100 s'")
    worker = start_worker(handlers)
    until(lambda: worker._runtime is not None and worker._runtime.attempts.running)
    threading.Timer(0.3, go_on.set).start()
    until(lambda: outcomes(worker._counts.read()) == {"completed": 1})
    found = worker._counts.read().by_type["orders", "work"]
    assert found.waits.buckets[BOUNDS.index(300.0)] == 1
    assert 100 <= found.waits.total < 130
    assert 0.2 < found.runs.total < 20
    assert found.runs.buckets[: BOUNDS.index(0.25)] == (0,) * BOUNDS.index(0.25)


def test_a_chunk_counts_each_member_and_its_time_once(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    took: list[float] = []

    @handlers.handler("orders", "work", chunk=4, chunk_wait=5)
    def work(commands: Any, ctx: Any) -> None:
        threading.Event().wait(0.2)
        took.append(0.2)

    bus.send_many("orders", [NewCommand("work") for _ in range(4)])
    worker = start_worker(handlers, concurrency=1)
    until(lambda: outcomes(worker._counts.read()) == {"completed": 4})
    found = worker._counts.read().by_type["orders", "work"].runs
    assert sum(found.buckets) == 4
    assert 0.2 * len(took) <= found.total < 0.2 * len(took) + 2


def test_a_stuck_attempt_counts_with_the_time_that_it_ran(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    @handlers.handler("orders", "work")
    def work(command: Any, ctx: Any) -> None:
        go_on.wait(30)

    bus.send("orders", "work", timeout=0.3, max_attempts=1)
    worker = start_worker(handlers, cancel_grace=0.2)
    until(lambda: outcomes(worker._counts.read()) == {"exhausted": 1})
    assert 0.4 <= worker._counts.read().by_type["orders", "work"].runs.total < 20


def test_a_lost_lease_is_counted_and_no_outcome(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    started = threading.Event()

    @handlers.handler("orders", "work")
    def work(command: Any, ctx: Any) -> None:
        started.set()
        go_on.wait(20)

    bus.send("orders", "work")
    worker = start_worker(handlers)
    assert started.wait(60)
    db.execute("UPDATE pgmq.q_orders__commands SET read_ct = read_ct + 1, vt = now() + interval '1 h'")
    go_on.set()
    until(lambda: worker._counts.read().lease_losses == 1)
    assert outcomes(worker._counts.read()) == {}


def test_a_wait_for_a_connection_in_vain_is_counted(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    holding = threading.Event()

    @handlers.handler("orders", "hold")
    def hold(command: Any, ctx: Any) -> None:
        with ctx.connection():
            holding.set()
            go_on.wait(20)

    @handlers.handler("orders", "work")
    def work(command: Any, ctx: Any) -> None:
        with pytest.raises(PoolTimeout), ctx.connection():
            pass

    bus.send("orders", "hold")
    worker = start_worker(handlers, pool_max_size=1, pool_timeout=0.1)
    assert holding.wait(60)
    bus.send("orders", "work")
    until(lambda: worker._counts.read().connection_timeouts == 1)
    assert sum(worker._counts.read().connection_waits.buckets) == 1


# --- the page -------------------------------------------------------------------------------------------------


class _Handler:
    """Stands for any handler: the page only asks whether there is one."""


def attempt(command_type: str = "work", handler: Any = _Handler, sent: Any = 0.0) -> Attempt:
    row = (1, 1, 1, "c", command_type, None, 0, 0, None, None, None, None, sent)
    made = Attempt("orders", row, handler, 0.0)
    made.started, made.ran = 1.0, 0.001
    return made


def test_types_without_a_handler_and_types_that_are_too_many_share_one_record() -> None:
    page = CountsPage()
    page.completed([attempt(f"unknown-{n}", None) for n in range(1000)])
    assert list(page.read().by_type) == [OTHERS]
    page.completed([attempt(f"type-{n}") for n in range(MOST_TYPES + 50)])
    found = page.read()
    assert len(found.by_type) <= MOST_TYPES + 1
    assert sum(counts.outcomes[0] for counts in found.by_type.values()) == 1000 + MOST_TYPES + 50


def test_merged_counts_stay_bounded() -> None:
    merged = AttemptCounts()
    for n in range(3):
        page = CountsPage()
        page.completed([attempt(f"generation {n} type {m}") for m in range(MOST_TYPES)])
        merged = merged.plus(page.read())
    assert len(merged.by_type) == MOST_TYPES + 1
    assert sum(counts.outcomes[0] for counts in merged.by_type.values()) == 3 * MOST_TYPES


@pytest.mark.parametrize("sent", [float("nan"), float("inf"), float("-inf"), 1e300, -1.0])
def test_whatever_a_row_says_about_its_time_the_sums_stay_numbers(sent: float) -> None:
    page = CountsPage()
    page.completed([attempt(sent=sent)])
    waits = page.read().by_type["orders", "work"].waits
    assert sum(waits.buckets) == 1
    assert 0.0 <= waits.total <= 1e9


def test_a_page_shared_between_processes_reads_the_same_and_a_closed_one_is_empty() -> None:
    ours = CountsPage.create()
    theirs = CountsPage.attach(os.dup(ours.fd))
    theirs.completed([attempt("a\nb“\u202e")])
    theirs.lease_lost()
    theirs.close()
    assert ("orders", "a\nb“\u202e") in ours.read().by_type
    assert ours.read().lease_losses == 1
    ours.close()
    assert ours.read() == AttemptCounts()


def test_nonsense_on_a_page_never_raises_and_never_shows() -> None:
    page = CountsPage()
    page.completed([attempt()])
    for byte in (0xFF, 0x80, 0x7F):
        page._view[:] = bytes([byte]) * len(page._view)
        found = page.read()
        assert len(found.by_type) <= MOST_TYPES + 1
        assert 0 <= found.lease_losses <= 2**53
