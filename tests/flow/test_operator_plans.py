"""Plans: the exact set of the preview, one start, portions at a pace, and nothing that is acted on twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, Roles, at_once, fail, one, queue_length, sync_only

from commandbus import (
    AsyncCommandBus,
    CommandNotFoundError,
    CommandStatus,
    InvalidCommandError,
    InvalidOperationError,
    NewCommand,
    PermanentCommandError,
    PlanChangedError,
    PlanNotFoundError,
    PlanRecord,
    PlanState,
    UnknownDomainError,
)
from commandbus.flow.commands.prune import Retention, prune_all
from commandbus.flow.plans.carry_out import Portion, carry_out
from support.waiting import until

pytestmark = sync_only  # the async twin has the same body: one test at the end shows it
Db = psycopg.Connection[Any]


def trouble(bus: Bus, *ids: str, command_type: str = "Ship", code: str = "BROKEN", **more: Any) -> None:
    """Send these and let them end in the troubleshooting queue."""
    bus.send_many("orders", [NewCommand(command_type, {"id": name}, command_id=name, **more) for name in ids])
    attempts = bus.claim(n=1000)
    assert bus.settle([fail(attempt, PermanentCommandError("no", code=code)) for attempt in attempts]) == {}


def portion(bus: Bus, bite: int = 1000) -> Portion | None:
    """What the maintenance thread of a worker does."""
    found: Portion | None = bus.run(carry_out(["orders"], bite=bite))
    return found


def statuses(bus: Bus, *ids: str) -> list[CommandStatus]:
    return [bus.get_command("orders", name).status for name in ids]


def test_a_preview_has_exactly_what_matches_and_does_nothing(orders: Bus, db: Db) -> None:
    trouble(orders, "a", "b", code="X")
    trouble(orders, "c", code="Y")
    trouble(orders, "d", command_type="Pack", code="X")
    plan = orders.plans.preview(
        "orders", "retry", command_type="Ship", error_code="X", over="10m", operator="ann", reason="fixed"
    )
    assert (plan.state, plan.total, plan.left, plan.progress) == (PlanState.PREVIEWED, 2, 2, 0)
    assert (plan.previewed_by, plan.reason, plan.over_seconds) == ("ann", "fixed", 600)
    assert [(group.command_type, group.error_code, group.count) for group in plan.groups] == [("Ship", "X", 2)]
    assert plan.text == (
        "put 2 commands into the queue again, attempts counted from 1, of orders/Ship with error code X, "
        "evenly over 10m (about 0.2 a minute)"
    )
    items = orders.plans.commands(plan.id, limit=1)
    assert [(item.command_id, item.state, item.error_code, item.error) for item in items] == [
        ("a", "WAITING", "X", "no")
    ]
    rest = orders.plans.commands(plan.id, cursor=items.next_cursor)
    assert ([item.command_id for item in rest], rest.next_cursor) == (["b"], None)
    assert portion(orders) is None
    assert orders.tsq.count() == 4
    by_id = orders.plans.preview("orders", "cancel", command_ids=["d", "a", "d"])
    assert {item.command_id for item in orders.plans.commands(by_id.id)} == {"a", "d"}
    assert [found.id for found in orders.plans.list("orders")] == [by_id.id, plan.id]
    first = orders.plans.list(limit=1)
    assert [found.id for found in orders.plans.list(cursor=first.next_cursor)] == [plan.id]
    assert orders.plans.get(plan.id) == plan
    assert one(db, "SELECT count(*) FROM commandbus.operator_action") == 0


def test_a_plan_is_carried_out_in_portions_and_recorded(orders: Bus, db: Db) -> None:
    ids = ["a", "b", "c", "d", "e"]
    trouble(orders, *ids)
    plan = orders.plans.preview("orders", "retry", operator="ann", reason="looks good")
    started = orders.plans.start(plan.id, operator="bob", reason="fixed")
    assert (started.state, started.started_by, started.reason) == (PlanState.RUNNING, "bob", "fixed")
    assert portion(orders, 2) == Portion(plan.id, 2, 0, is_last=False)
    assert orders.plans.get(plan.id).progress_text == "2 of 5 retried, 3 left"
    assert [item.state for item in orders.plans.commands(plan.id)] == ["MOVED"] * 2 + ["WAITING"] * 3
    assert portion(orders, 2) == Portion(plan.id, 2, 0, is_last=False)
    assert portion(orders, 2) == Portion(plan.id, 1, 0, is_last=True)
    assert portion(orders, 2) is None
    done = orders.plans.get(plan.id)
    assert (done.state, done.moved, done.skipped, done.left) == (PlanState.DONE, 5, 0, 0)
    assert statuses(orders, *ids) == [CommandStatus.PENDING] * 5
    assert queue_length(db) == 5
    events = [(entry.event, entry.details) for entry in orders.get_audit_trail("orders", "c")]
    assert events[-1] == ("OPERATOR_RETRY", {"operator": "bob", "reason": f"plan {plan.id}: fixed"})
    subjects = db.execute("SELECT subject, action, operator FROM commandbus.control_action").fetchall()
    assert subjects == [(f"plan orders/{plan.id}", "START", "bob")]


def test_cancel_and_complete_reply_and_leave_the_queue(orders: Bus, db: Db) -> None:
    orders.create_queue("answers")
    trouble(orders, "a", "b", reply_to="answers")
    plan = orders.plans.preview("orders", "complete", command_ids=["a"], result={"by": "hand"})
    assert plan.result == {"by": "hand"}
    orders.plans.start(plan.id)
    assert portion(orders) == Portion(plan.id, 1, 0, is_last=True)
    orders.plans.start(orders.plans.preview("orders", "cancel").id)
    assert portion(orders).moved == 1  # type: ignore[union-attr]
    assert statuses(orders, "a", "b") == [CommandStatus.COMPLETED, CommandStatus.CANCELED]
    assert orders.get_command("orders", "a").result == {"by": "hand"}
    replies = db.execute("SELECT message ->> 'outcome' FROM pgmq.q_answers ORDER BY msg_id").fetchall()
    assert [outcome for (outcome,) in replies if outcome != "FAILED"][-2:] == ["SUCCESS", "CANCELED"]


def test_a_set_of_the_same_size_that_is_not_the_same_set_is_refused(orders: Bus) -> None:
    trouble(orders, "a", "b")
    plan = orders.plans.preview("orders", "cancel")
    orders.tsq.operator_cancel("orders", "a")
    trouble(orders, "c")
    with pytest.raises(PlanChangedError, match="1 came and 1 went of 2 commands: preview it again"):
        orders.plans.start(plan.id)
    assert orders.plans.get(plan.id).state == PlanState.PREVIEWED
    assert portion(orders) is None


def test_a_command_that_left_and_came_back_is_another_case(orders: Bus) -> None:
    trouble(orders, "a", "b", "c")
    plan, second = orders.plans.preview("orders", "cancel"), orders.plans.preview("orders", "cancel")
    orders.plans.start(second.id)
    orders.tsq.operator_retry("orders", "b")
    orders.settle(fail(orders.claim_one(), PermanentCommandError("again", code="AGAIN")))
    with pytest.raises(PlanChangedError, match="1 came and 1 went"):
        orders.plans.start(plan.id)
    assert portion(orders) == Portion(second.id, 2, 1, is_last=True)
    assert [item.state for item in orders.plans.commands(second.id)] == ["MOVED", "SKIPPED", "MOVED"]
    assert "1 skipped because somebody else had moved them" in orders.plans.get(second.id).progress_text
    assert statuses(orders, "b") == [CommandStatus.IN_TROUBLESHOOTING_QUEUE]


def test_of_many_operators_one_starts_and_no_command_is_acted_on_twice(
    orders: Bus, connect: Callable[..., Bus], db: Db
) -> None:
    ids = [f"c{n}" for n in range(40)]
    trouble(orders, *ids)
    plan, other = orders.plans.preview("orders", "retry"), orders.plans.preview("orders", "retry")
    buses = [connect(orders.url) for _ in range(4)]

    def start(number: int) -> PlanRecord | Exception:
        try:
            return buses[number % 4].plans.start((plan if number < 4 else other).id, operator=f"op{number}")
        except InvalidOperationError as error:
            return error

    answers = at_once([partial(start, number) for number in range(8)])
    started = [answer.id for answer in answers if isinstance(answer, PlanRecord)]
    assert sorted(started) == [plan.id, other.id]
    with pytest.raises(InvalidOperationError, match=r"cannot be started: op\d started it at"):
        orders.plans.start(plan.id)

    def work(bus: Bus) -> None:
        while any(not found.state.is_final for found in bus.plans.list()):
            portion(bus, 3)

    at_once([partial(work, bus) for bus in buses])
    acted = db.execute("SELECT count(*), count(DISTINCT command) FROM commandbus.operator_action").fetchone()
    assert acted == (40, 40)
    totals = [(found.state, found.moved + found.skipped) for found in orders.plans.list()]
    assert totals == [(PlanState.DONE, 40)] * 2
    assert sum(found.moved for found in orders.plans.list()) == 40


@pytest.mark.parametrize("table", ["tsq t ON t.command = c.id", "command x ON x.id = c.id"])
def test_a_row_that_somebody_holds_is_passed_by_and_come_back_to(orders: Bus, db: Db, table: str) -> None:
    trouble(orders, "a", "b", "c", "d")
    plan = orders.plans.preview("orders", "retry", operator="ann")
    orders.plans.start(plan.id)
    of = table.split()[1]
    with psycopg.connect(orders.url) as other:
        held = f"JOIN commandbus.{table} WHERE c.command_id IN ('b', 'd') FOR UPDATE OF {of}"
        other.execute(f"SELECT FROM commandbus.command c {held}".encode())
        db.execute("DELETE FROM commandbus.tsq WHERE command = (SELECT min(command) FROM commandbus.tsq)")
        assert portion(orders) == Portion(plan.id, 1, 1, is_last=False, locked=2)
        found = orders.plans.get(plan.id)
        assert (found.moved, found.skipped, found.left, found.locked) == (1, 1, 2, 2)
        assert found.progress_text.endswith(", 2 left (another session has locked 2 of them: they follow)")
        states = {item.command_id: item.state for item in orders.plans.commands(plan.id)}
        assert states == {"a": "SKIPPED", "b": "LOCKED", "c": "MOVED", "d": "LOCKED"}
        assert portion(orders) == Portion(plan.id, 0, 0, is_last=False)
        assert portion(orders) is None  # it looks again in a moment, and not at once
        assert orders.plans.get(plan.id).state == PlanState.RUNNING
        if of == "t":
            other.execute("DELETE FROM commandbus.tsq WHERE command = (SELECT max(command) FROM commandbus.tsq)")
            other.commit()
    db.execute("UPDATE commandbus.plan SET next_at = clock_timestamp()")
    skipped = int(of == "t")
    assert portion(orders) == Portion(plan.id, 2 - skipped, skipped, is_last=True)
    done = orders.plans.get(plan.id)
    assert (done.state, done.moved + done.skipped, done.locked) == (PlanState.DONE, 4, 0)
    assert one(db, "SELECT count(*) FROM commandbus.operator_action") == done.moved


def test_locked_rows_do_not_keep_a_plan_from_those_behind_them(orders: Bus, db: Db) -> None:
    trouble(orders, "a", "b", "c", "d")
    plan = orders.plans.preview("orders", "cancel")
    orders.plans.start(plan.id)
    with psycopg.connect(orders.url) as other, psycopg.connect(orders.url) as another:
        other.execute("SELECT FROM commandbus.tsq ORDER BY command LIMIT 2 FOR UPDATE")
        another.execute("SELECT FROM commandbus.tsq ORDER BY command DESC LIMIT 1 FOR UPDATE")
        assert portion(orders, 2) == Portion(plan.id, 0, 0, is_last=False, locked=2)
        assert portion(orders, 2) == Portion(plan.id, 1, 0, is_last=False, locked=1)
        another.rollback()
        assert portion(orders, 1) == Portion(plan.id, 1, 0, is_last=False)
        stopped = orders.plans.stop(plan.id)
    assert (stopped.moved, stopped.left, stopped.progress_text) == (2, 2, "2 of 4 canceled, 2 left")


def test_a_bulk_action_waits_for_a_locked_row_only_at_the_end(orders: Bus, db: Db) -> None:
    trouble(orders, "a", "b", "c")
    with psycopg.connect(orders.url) as other, ThreadPoolExecutor(1) as threads:
        other.execute("SELECT FROM commandbus.tsq ORDER BY command LIMIT 1 FOR UPDATE")
        moved = threads.submit(orders.tsq.retry_all, "orders")
        until(lambda: queue_length(db) == 2)
        other.rollback()
        assert moved.result(30) == 3


def test_the_pace_spreads_a_plan_and_does_not_make_up_for_a_pause(orders: Bus, db: Db) -> None:
    trouble(orders, *[f"c{n}" for n in range(20)])
    plan = orders.plans.preview("orders", "retry", over=200)
    orders.plans.start(plan.id)
    assert portion(orders) == Portion(plan.id, 1, 0, is_last=False)
    assert portion(orders) is None  # the next one is due in ten seconds
    due = "SELECT extract(epoch FROM next_at - clock_timestamp()) FROM commandbus.plan"
    assert 9 < float(one(db, due)) <= 10
    db.execute("UPDATE commandbus.plan SET next_at = next_at - interval '1 hour'")
    assert portion(orders) == Portion(plan.id, 1, 0, is_last=False)  # not the 360 of an hour without workers
    assert portion(orders) is None
    fast = orders.plans.preview("orders", "retry", command_ids=[f"c{n}" for n in range(10, 20)], over=1)
    orders.plans.start(fast.id)
    db.execute("UPDATE commandbus.plan SET next_at = next_at - interval '0.5 s' WHERE id = %s", [fast.id])
    moved = portion(orders)
    assert moved is not None
    assert 6 <= moved.moved <= 10


def test_a_plan_is_stopped_for_good(orders: Bus, db: Db) -> None:
    trouble(orders, "a", "b", "c")
    plan = orders.plans.preview("orders", "cancel")
    orders.plans.start(plan.id)
    portion(orders, 1)
    stopped = orders.plans.stop(plan.id, operator="ann", reason="wrong ones")
    assert (stopped.state, stopped.stopped_by, stopped.note) == (PlanState.STOPPED, "ann", "wrong ones")
    assert stopped.progress_text == "1 of 3 canceled, 2 left"
    assert portion(orders) is None
    assert orders.tsq.count() == 2
    with pytest.raises(InvalidOperationError, match="cannot be started: ann stopped it"):
        orders.plans.start(plan.id)
    with pytest.raises(InvalidOperationError, match="cannot be stopped: ann stopped it"):
        orders.plans.stop(plan.id)


def test_a_plan_that_cannot_go_on_stops_with_the_reason(orders: Bus, db: Db) -> None:
    trouble(orders, "a")
    plan = orders.plans.preview("orders", "retry")
    orders.plans.start(plan.id)
    db.execute("DROP TABLE pgmq.q_orders__commands")
    done = portion(orders)
    assert done is not None
    assert done.trouble is not None
    found = orders.plans.get(plan.id)
    assert (found.state, found.moved, found.stopped_by) == (PlanState.STOPPED, 0, "commandbus")
    assert "stopped because of an error" in str(found.note)
    assert orders.tsq.count() == 1


def test_what_is_wrong_is_named(orders: Bus) -> None:
    trouble(orders, "a")
    orders.send("orders", "Ship", {}, command_id="fine")
    plans = orders.plans
    for words, error, text in (
        (("orders", "explode"), InvalidCommandError, "action 'explode' is not one of a plan: use retry, cancel"),
        (("nowhere", "retry"), UnknownDomainError, "nowhere"),
        (("No", "retry"), InvalidCommandError, "'No'"),
    ):
        with pytest.raises(error, match=text):
            plans.preview(*words)
    for options, error, text in (
        ({"over": "soon"}, InvalidCommandError, "over: 'soon' is not a duration"),
        ({"command_ids": ["nobody"]}, CommandNotFoundError, "no command 'nobody' in domain 'orders'"),
        ({"command_ids": ["fine"]}, InvalidOperationError, "command 'fine' is not in the troubleshooting queue"),
        ({"command_ids": []}, InvalidCommandError, "command_ids must be a list of 1 to 1000 ids"),
        ({"command_type": "Pack"}, InvalidOperationError, "in the troubleshooting queue matches"),
        ({"error_code": "\x00"}, InvalidCommandError, "error_code"),
        ({"result": 1}, InvalidCommandError, "result is for a plan that completes"),
        ({"operator": "\x07"}, InvalidCommandError, "operator"),
    ):
        with pytest.raises(error, match=text):
            plans.preview("orders", "retry", **options)
    for plan_id in (0, -1, True, "x", 2**63, None, "1 "):
        with pytest.raises(InvalidCommandError, match="plan_id"):
            plans.get(plan_id)
    with pytest.raises(PlanNotFoundError, match="there is no plan 99"):
        plans.start(99)
    with pytest.raises(PlanNotFoundError):
        plans.commands(99)
    assert plans.list().items == []


def test_old_plans_are_pruned_and_previews_after_a_day(orders: Bus, db: Db) -> None:
    trouble(orders, "a", "b")
    done, unused, young = (orders.plans.preview("orders", "retry") for _ in range(3))
    orders.plans.stop(done.id)
    orders.follow(prune_all(Retention(age_seconds=3600)))
    assert len(orders.plans.list()) == 3
    db.execute("UPDATE commandbus.plan SET created_at = now() - interval '25 hours' WHERE id = %s", [unused.id])
    orders.follow(prune_all(Retention(asides_count=10, asides_bytes=1_000_000)))
    assert [found.id for found in orders.plans.list()] == [young.id, done.id]
    db.execute("UPDATE commandbus.plan SET finished_at = now() - interval '2 hours' WHERE id = %s", [done.id])
    orders.follow(prune_all(Retention(age_seconds=3600)))
    assert [found.id for found in orders.plans.list()] == [young.id]
    assert one(db, "SELECT count(*) FROM commandbus.plan_command") == 2


def test_an_operator_plans_and_a_worker_carries_out(orders: Bus, acting: Roles) -> None:
    trouble(orders, "a", "b")
    operator, worker, reader = (acting(kind) for kind in ("operator", "worker", "reader"))
    plan = operator.plans.preview("orders", "retry")
    operator.plans.start(plan.id)
    assert portion(worker, 1) == Portion(plan.id, 1, 0, is_last=False)
    assert reader.plans.get(plan.id).moved == 1
    assert len(reader.plans.commands(plan.id)) == 2
    operator.plans.stop(plan.id)
    for bus in (worker, reader):
        with pytest.raises(Exception, match=r"privilege|permission"):
            bus.plans.preview("orders", "retry")
    operator.follow(prune_all(Retention(age_seconds=0)))


def test_async_code_plans_the_same_way(orders: Bus) -> None:
    trouble(orders, "a", "b")

    async def plan() -> None:
        async with AsyncCommandBus(orders.url) as bus:
            found = await bus.plans.preview("orders", "retry", over="1m", operator="ann")
            assert (await bus.plans.start(found.id)).state == PlanState.RUNNING
            assert (await bus.run(carry_out(["orders"]))) == Portion(found.id, 1, 0, is_last=False)
            assert len(await bus.plans.commands(found.id)) == 2
            await bus.plans.stop(found.id)
            assert [await bus.plans.get(found.id)] == (await bus.plans.list("orders")).items

    asyncio.run(plan())
