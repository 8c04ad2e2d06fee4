"""fold: counts are added up under concurrency, and a batch ends exactly once."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, at_once, fail, one, sync_only

from commandbus import (
    BatchStatus,
    BusinessRuleException,
    CommandBus,
    InvalidCommandError,
    NewCommand,
    OnComplete,
    PermanentCommandError,
)
from commandbus.db.drivers import run
from commandbus.flow.batches.fold_and_complete import fold
from commandbus.flow.batches.leftovers import leftovers
from support.waiting import until

Db = psycopg.Connection[Any]


def commands(count: int) -> list[NewCommand]:
    return [NewCommand("Ship", {"n": n}, f"c{n}") for n in range(count)]


def completions(db: Db) -> int:
    count: int = one(db, "SELECT count(*) FROM commandbus.command WHERE command_type = 'Done'")
    return count


@sync_only
def test_concurrent_settlers_and_folders(orders: Bus, db: Db) -> None:
    """Three batches, four workers that settle and fold, two who only fold: each ends once, and counted right."""
    count = 300
    ids = []
    for name in ("a", "b", "c"):
        made = orders.create_batch(
            "orders", [NewCommand("Ship", {"n": n}) for n in range(count)], batch_id=name,
            on_complete=OnComplete("orders", "Done"),
        )  # fmt: skip
        ids.append(made.id)
    over = threading.Event()

    def work(name: str) -> int:
        settled = 0
        with CommandBus(orders.url) as bus:
            mine = Bus(bus, None, "sync", orders.url, orders.runner)
            while attempts := [item for item in mine.claim(name, 7) if item.command_type == "Ship"]:
                mine.settle(
                    [
                        fail(item, BusinessRuleException("no"))
                        if item.row[5].endswith("3}")
                        else item.complete(None)
                        for item in attempts
                    ],
                    name,
                    waiting=True,
                )
                bus.run(fold({item.batch for item in attempts if item.batch is not None}))
                settled += len(attempts)
        return settled

    def only_fold() -> None:
        with psycopg.connect(orders.url, autocommit=True) as conn:
            while not over.is_set():
                run(conn, fold(ids))

    folders = [threading.Thread(target=only_fold) for _ in range(2)]
    for thread in folders:
        thread.start()
    try:
        settled = at_once([lambda name=f"w{n}": work(name) for n in range(4)])
    finally:
        over.set()
        for thread in folders:
            thread.join()
    assert sum(n for n in settled if isinstance(n, int)) == 3 * count, settled
    orders.run(fold(ids))
    for name in ("a", "b", "c"):
        record = orders.get_batch("orders", name)
        assert record.status == BatchStatus.COMPLETED_WITH_FAILURES
        assert (record.total, record.completed, record.failed) == (count, count - count // 10, count // 10)
    assert completions(db) == 3
    assert one(db, "SELECT count(*) FROM commandbus.batch_delta") == 0


def test_what_was_settled_but_not_folded_is_swept(orders: Bus, db: Db) -> None:
    """As if the worker had been killed in between."""
    orders.create_batch("orders", commands(2), batch_id="b", on_complete=OnComplete("orders", "Done"))
    made = orders.claim()
    orders.settle([item.complete(None) for item in made])
    record = orders.get_batch("orders", "b")
    assert (record.completed, record.status, completions(db)) == (2, BatchStatus.IN_PROGRESS, 0)
    found = orders.run(leftovers())
    assert found.to_fold == [record.id]
    orders.run(fold(found.to_fold))
    assert orders.get_batch("orders", "b").status == BatchStatus.COMPLETED
    assert completions(db) == 1
    assert orders.run(leftovers()) == ([], [])


@sync_only
def test_a_locked_batch_is_left_to_who_has_it(orders: Bus, db: Db) -> None:
    made = orders.create_batch("orders", commands(1), batch_id="b")
    orders.settle(orders.claim_one().complete(None))
    with psycopg.connect(orders.url) as conn:
        conn.execute("SELECT FROM commandbus.batch FOR UPDATE")
        assert orders.run(fold([made.id])) == set()
        conn.rollback()
    assert orders.run(fold([made.id])) == {made.id}
    assert orders.run(fold([made.id, 10**9])) == {made.id}, "there is nothing to do, and nothing in the way"


@sync_only
def test_a_fold_that_rolls_back_sends_nothing(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", commands(1), batch_id="b", on_complete=OnComplete("orders", "Done"))
    attempt = orders.claim_one()
    orders.settle(attempt.complete(None))
    with psycopg.connect(orders.url) as conn:
        run(conn, fold([attempt.batch]))
        conn.rollback()
    assert (completions(db), orders.get_batch("orders", "b").is_finished) == (0, False)
    orders.run(fold([attempt.batch]))
    assert (completions(db), orders.get_batch("orders", "b").is_finished) == (1, True)


@sync_only
def test_a_completion_does_not_wait_for_somebodys_transaction(orders: Bus, db: Db) -> None:
    """Who is about to use its command_id might stay for hours; the worker that folds has other things to do."""
    completion = OnComplete("orders", "Done", command_id="mine")
    orders.create_batch("orders", commands(1), batch_id="b", on_complete=completion)
    attempt = orders.claim_one()
    orders.settle(attempt.complete(None))
    with psycopg.connect(orders.url) as conn:
        orders.send("orders", "Other", command_id="mine", conn=conn)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            orders.run(fold([attempt.batch]))
        conn.rollback()
    orders.run(fold([attempt.batch]))
    assert completions(db) == 1


@sync_only
@pytest.mark.parametrize("is_lent", [False, True])
def test_an_operator_does_not_wait_for_somebodys_transaction(orders: Bus, db: Db, is_lent: bool) -> None:
    """What the operator did is done; the batch is left to the workers, and its completion is sent once."""
    completion = OnComplete("orders", "Done", command_id="mine")
    orders.create_batch("orders", commands(1), batch_id="b", on_complete=completion)
    if not is_lent:
        orders.settle(fail(orders.claim_one(), PermanentCommandError("no")))
    with psycopg.connect(orders.url) as conn, psycopg.connect(orders.url) as lent:
        conn.execute("SET idle_in_transaction_session_timeout = '20s'")
        lent.execute("SET lock_timeout = '7s'")
        orders.send("orders", "Other", command_id="mine", conn=conn)
        if is_lent:
            orders.cancel("orders", "c0", operator="ann", conn=lent)
        else:
            orders.tsq.operator_cancel("orders", "c0", operator="ann")
        assert one(lent, "SHOW lock_timeout") == "7s"
        lent.commit()
        record = orders.get_batch("orders", "b")
        assert (record.canceled, record.is_finished) == (1, False)
        conn.rollback()
    assert orders.run(leftovers()).to_fold == [record.id]
    orders.run(fold([record.id]))
    assert (completions(db), orders.get_batch("orders", "b").is_finished) == (1, True)


@sync_only
def test_a_fold_in_a_lent_transaction_leaves_its_limits_alone(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", commands(1), batch_id="b", on_complete=OnComplete("orders", "Done"))
    with psycopg.connect(orders.url) as lent:
        lent.execute("SET lock_timeout = '7s'")
        orders.cancel("orders", "c0", operator="ann", conn=lent)
        assert one(lent, "SELECT completion_sent_at IS NOT NULL FROM commandbus.batch")
        assert one(lent, "SHOW lock_timeout") == "7s"
    assert completions(db) == 1


@sync_only
def test_a_fold_may_wait_for_the_row(orders: Bus, db: Db) -> None:
    """What was noted while somebody else was folding is not left behind; of those in one line, one waits."""
    made = orders.create_batch("orders", commands(1), batch_id="b")
    orders.settle(orders.claim_one().complete(None))
    line: set[int] = set()
    with psycopg.connect(orders.url) as conn, psycopg.connect(orders.url, autocommit=True) as waiter:
        conn.execute("SELECT FROM commandbus.batch FOR NO KEY UPDATE")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            run(waiter, fold([made.id], waiting=True, line=line))
        assert line == set()
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(run, waiter, fold([made.id], waiting=True, line=line))
            until(lambda: line)
            assert orders.run(fold([made.id], waiting=True, line=line)) == set(), "somebody waits already"
            conn.rollback()
            assert waiting.result(20) == {made.id}
    assert (line, orders.get_batch("orders", "b").is_finished) == (set(), True)


@sync_only
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("on_complete", '{"reply_to": "no queue has this name!"}'),
        ("on_complete", '{"domain": "orders", "command_type": "", "data": 1}'),
        ("on_complete", "[" * 3000 + "]" * 3000),
        ("custom_data", "[" * 3000 + "]" * 3000),
    ],
)
def test_what_cannot_be_built_is_put_aside(orders: Bus, db: Db, column: str, value: str) -> None:
    """Stored by an older version, or by hand: it must not keep the batch, nor those who fold it."""
    made = orders.create_batch("orders", commands(1), batch_id="b", on_complete=OnComplete("orders", "Done"))
    db.execute(f"UPDATE commandbus.batch SET {column} = %s::json".encode(), [value])
    orders.settle(orders.claim_one().complete(None))
    orders.run(fold([made.id]))
    assert one(db, "SELECT finished_at IS NOT NULL AND completion_sent_at IS NOT NULL FROM commandbus.batch")
    reason, message = db.execute("SELECT reason, message FROM commandbus.undelivered_reply").fetchone() or ("", {})
    assert reason.startswith(f"on_complete of batch {made.id}: ")
    assert message.keys() == {"batch", "on_complete"}
    assert completions(db) == 0


def test_custom_data_has_a_limit_of_nesting(orders: Bus) -> None:
    """And what is at the limit gets through to whoever is told."""

    def nested(depth: int) -> list[Any]:
        value: list[Any] = []
        for _ in range(depth - 1):
            value = [value]
        return value

    orders.create_queue("answers")
    for number, completion in enumerate([{"reply_to": "answers"}, OnComplete("orders", "Done")]):
        for depth in (201, 5000, 50_000):
            with pytest.raises(InvalidCommandError, match=r"custom_data is (nested more than 200|not JSON)"):
                orders.create_batch("orders", [], batch_id="x", custom_data=nested(depth), on_complete=completion)
        orders.create_batch("orders", [], batch_id=f"{number}", custom_data=nested(200), on_complete=completion)
    assert orders.claim_one().command().data["custom_data"] == nested(200)
    with psycopg.connect(orders.url) as conn:
        assert one(conn, "SELECT count(*) FROM commandbus.undelivered_reply") == 0
        text = one(conn, "SELECT message::text FROM pgmq.q_answers")
    assert json.loads(text)["custom_data"] == nested(200)


def test_not_complete_while_anything_is_in_the_troubleshooting_queue(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", commands(4), batch_id="b", on_complete=OnComplete("orders", "Done"))
    made = orders.claim()
    orders.settle([fail(item, PermanentCommandError("no")) for item in made])
    record = orders.get_batch("orders", "b")
    orders.run(fold([record.id]))

    def counts() -> tuple[int, int, int, int]:
        found = orders.get_batch("orders", "b")
        assert found.is_finished == (found.finished == 4)
        return found.completed, found.failed, found.canceled, found.in_tsq

    assert counts() == (0, 0, 0, 4)
    orders.tsq.operator_complete("orders", "c0", operator="ann")
    assert counts() == (1, 0, 0, 3)
    orders.tsq.operator_cancel("orders", "c1", operator="ann")
    assert counts() == (1, 0, 1, 2)
    orders.tsq.operator_retry("orders", "c2", operator="ann")
    assert counts() == (1, 0, 1, 1)
    orders.settle(orders.claim_one().complete(None))
    assert counts() == (2, 0, 1, 1)
    assert orders.tsq.retry_all("orders", operator="ann") == 1
    orders.cancel("orders", "c3", operator="ann")
    assert counts() == (2, 0, 2, 0)
    record = orders.get_batch("orders", "b")
    assert (record.status, completions(db)) == (BatchStatus.COMPLETED_WITH_FAILURES, 1)


def test_the_status_follows_the_members(orders: Bus) -> None:
    fates = {
        BatchStatus.COMPLETED: lambda item: item.complete(None),
        BatchStatus.COMPLETED_WITH_FAILURES: lambda item: fail(item, BusinessRuleException("no")),
    }
    for status, fate in fates.items():
        orders.create_batch("orders", [NewCommand("Ship")] * 2, batch_id=status)
        first, second = orders.claim()
        orders.settle(first.complete(None))
        orders.run(fold([first.batch]))
        assert orders.get_batch("orders", status).status == BatchStatus.IN_PROGRESS
        orders.settle(fate(second))
        orders.run(fold([first.batch]))
        record = orders.get_batch("orders", status)
        assert (record.status, record.is_finished, record.progress) == (status, True, 1.0)
