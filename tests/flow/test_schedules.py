"""Schedules in the database: made and changed at run time, fired once, declared by workers of several releases."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, Roles, assert_refused, one, sync_only

from commandbus import (
    CommandBus,
    CommandStatus,
    DuplicateScheduleError,
    InvalidCommandError,
    InvalidOperationError,
    Schedule,
    ScheduleNotFoundError,
    UnknownDomainError,
)
from commandbus.flow.schedules.declare import declare, forget, put_into_effect, undecided, undeclared
from commandbus.flow.schedules.fire import Decided, fire, look
from commandbus.flow.schedules.operate import list_actions
from commandbus.model.schedule import decide

Db = psycopg.Connection[Any]
Part = Callable[[str], Any]
NIGHTLY = {"cron": "30 2 * * *", "timezone": "Europe/Berlin"}
V1 = Schedule("orders", "nightly", cron="0 1 * * *")
V2 = Schedule("orders", "nightly", cron="0 2 * * *")


def test_a_life_at_run_time(orders: Bus, part: Part) -> None:
    schedules = part("schedules")
    made = schedules.create(
        "orders", "nightly", **NIGHTLY, data={"n": 1}, timeout="2m", operator="ann", reason="new"
    )
    assert (made.command_type, made.data, made.timeout, made.is_declared) == ("nightly", {"n": 1}, 120.0, False)
    assert made.next_at == schedules.next_firings("orders", "nightly", count=1)[0] > datetime.now(UTC)
    assert schedules.create("orders", "nightly", **NIGHTLY, data={"n": 1}, timeout=120) == made
    with pytest.raises(DuplicateScheduleError, match="already exists in domain 'orders' with another definition"):
        schedules.create("orders", "nightly", every="1h")
    changed = schedules.create("orders", "nightly", every="1h", overlap="skip", replace=True, operator="ann")
    assert (changed.every, changed.cron, changed.data, changed.created_at) == (3600.0, None, None, made.created_at)

    assert schedules.pause("orders", "nightly", operator="bob", reason="holidays") is True
    assert schedules.pause("orders", "nightly") is False
    paused = schedules.get("orders", "nightly")
    assert (paused.is_paused, paused.paused_by, paused.pause_reason) == (True, "bob", "holidays")
    assert paused.next_at is None
    assert len(schedules.next_firings("orders", "nightly", count=3)) == 3
    assert schedules.resume("orders", "nightly", operator="ann") > datetime.now(UTC)
    with pytest.raises(InvalidOperationError, match="schedule 'nightly' of domain 'orders' is not paused"):
        schedules.resume("orders", "nightly")

    sent = schedules.run_now("orders", "nightly", operator="ann")
    assert sent.command_id.startswith("schedule:nightly@")
    command = orders.get_command("orders", sent.command_id)
    assert (command.command_type, command.headers["schedule"]) == ("nightly", "nightly")
    found = schedules.get("orders", "nightly")
    assert (found.last_command_id, found.last_status, found.fired) == (sent.command_id, CommandStatus.PENDING, 1)
    assert (found.last_fired, found.skipped) == (None, 0)

    schedules.delete("orders", "nightly", operator="ann", reason="done")
    assert schedules.get("orders", "nightly") is None
    assert orders.get_command("orders", sent.command_id) is not None
    done = orders.run(list_actions("orders", "nightly", limit=10))
    assert [(item.action, item.operator) for item in reversed(done)] == [
        ("CREATE", "ann"), ("REPLACE", "ann"), ("PAUSE", "bob"), ("RESUME", "ann"), ("RUN_NOW", "ann"),
        ("DELETE", "ann"),
    ]  # fmt: skip
    assert (done[-1].reason, done[-1].details["cron"]) == ("new", "30 2 * * *")


def test_lists_have_pages(orders: Bus, part: Part) -> None:
    orders.create_domain("billing")
    for domain, name in (("orders", "b"), ("billing", "z"), ("orders", "a")):
        part("schedules").create(domain, name, every="1h")
    first = part("schedules").list(limit=2)
    assert [(item.domain, item.name) for item in first] == [("billing", "z"), ("orders", "a")]
    second = part("schedules").list(limit=2, cursor=first.next_cursor)
    assert ([item.name for item in second], second.has_more) == (["b"], False)
    assert [item.name for item in part("schedules").list("orders")] == ["a", "b"]
    with pytest.raises(InvalidCommandError, match="cursor 'x' is not one of this list"):
        part("schedules").list(cursor="x")


def test_what_is_not_there(orders: Bus, part: Part) -> None:
    schedules = part("schedules")
    with pytest.raises(UnknownDomainError):
        schedules.create("nowhere", "nightly", every="1h")
    for act in (schedules.pause, schedules.resume, schedules.delete, schedules.run_now, schedules.next_firings):
        with pytest.raises(ScheduleNotFoundError, match="there is no schedule 'nightly' in domain 'orders'"):
            act("orders", "nightly")
    assert schedules.get("orders", "nightly") is None
    with pytest.raises(InvalidCommandError, match=r"operator .* is not valid"):
        schedules.create("orders", "nightly", every="1h", operator="\x00")


def test_in_the_callers_transaction(orders: Bus, part: Part, db: Db) -> None:
    if orders.driver == "async":
        pytest.skip("a sync connection is lent")
    with psycopg.connect(orders.url) as conn:
        part("schedules").create("orders", "nightly", every="1h", conn=conn)
        conn.rollback()
    assert part("schedules").get("orders", "nightly") is None


# --- firing -----------------------------------------------------------------------------------------------------


def make_due(db: Db, name: str = "often", ago: str = "1 second") -> None:
    """The server's clock has passed the next firing: all of its instants since then are due."""
    db.execute(
        "UPDATE commandbus.schedule SET passed_at = clock_timestamp() - %s::interval, "
        "next_at = clock_timestamp(), version = version + 1 WHERE name = %s",
        (ago, name),
    )


def decided(bus: Any, domain: str = "orders") -> list[Decided]:
    rows = bus.run(look([domain], n=10))
    return [Decided(row.name, row.version, decide(row.to_due())) for row in rows if row.seconds <= 0]


def test_of_many_who_decide_the_same_one_fires(orders: Bus, part: Part, db: Db) -> None:
    part("schedules").create(
        "orders",
        "often",
        every="1s",
        data={"n": 1},
        headers={"h": 2},
        max_attempts=3,
        expires="1h",
        on_exhausted="fail",
        timeout=9,
    )
    make_due(db, ago="2 seconds")
    same = decided(orders)
    moved = [orders.run(fire("orders", same)) for _ in range(3)]
    assert [len(found) for found in moved] == [1, 0, 0]
    assert moved[0][0].commands == 1
    (row,) = db.execute(
        "SELECT command_id, command_type, data, headers, max_attempts, timeout, on_exhausted, "
        "round(extract(epoch FROM expires_at - created_at)) FROM commandbus.command"
    ).fetchall()
    instant = same[0].decision.firings[0].isoformat().replace("+00:00", "Z")
    headers = {"h": 2, "schedule": "often", "scheduled_for": instant}
    assert row == (f"schedule:often@{instant}", "often", {"n": 1}, headers, 3, 9.0, "fail", 3600)
    found = part("schedules").get("orders", "often")
    assert (found.last_fired, found.last_command_id) == (same[0].decision.firings[0], row[0])
    assert found.last_status == CommandStatus.PENDING
    assert len(orders.claim()) == 1
    assert part("schedules").get("orders", "often").last_status == CommandStatus.IN_PROGRESS


@sync_only
def test_twenty_at_once_make_one_firing(orders: Bus, db: Db) -> None:
    orders.schedules.create("orders", "often", every="1s", missed="run_all")
    make_due(db, ago="5 seconds")
    same = decided(orders)
    with ThreadPoolExecutor(20) as pool, CommandBus(orders.url) as bus:
        moved = list(pool.map(lambda _: len(bus.run(fire("orders", same))), range(20)))
    assert sum(moved) == 1
    assert (
        one(db, "SELECT count(*) FROM commandbus.command") == 5 == one(db, "SELECT fired FROM commandbus.schedule")
    )


@sync_only
def test_nobody_waits_for_a_row_that_somebody_holds(orders: Bus, db: Db) -> None:
    orders.schedules.create("orders", "often", every="1s")
    make_due(db)
    same = decided(orders)
    with psycopg.connect(orders.url) as holder:
        holder.execute("SELECT FROM commandbus.schedule FOR UPDATE")
        assert orders.run(fire("orders", same)) == []
        holder.rollback()
    assert len(orders.run(fire("orders", same))) == 1


def test_a_row_that_was_moved_back_does_not_fire_again(orders: Bus, part: Part, db: Db) -> None:
    part("schedules").create("orders", "often", every="1s")
    make_due(db)
    first = decided(orders)
    orders.run(fire("orders", first))
    db.execute(
        "UPDATE commandbus.schedule SET passed_at = %s, version = 0",
        (first[0].decision.passed_at - timedelta(seconds=1),),
    )
    again = [Decided(first[0].name, 0, first[0].decision)]
    (moved,) = orders.run(fire("orders", again))
    assert (moved.commands, one(db, "SELECT count(*) FROM commandbus.command")) == (0, 1)


def test_what_was_paused_changed_or_deleted_meanwhile_does_not_fire(orders: Bus, part: Part, db: Db) -> None:
    schedules = part("schedules")
    for change in (
        lambda: schedules.pause("orders", "often"),
        lambda: schedules.create("orders", "often", every="2s", replace=True),
        lambda: schedules.delete("orders", "often"),
    ):
        if schedules.get("orders", "often") is not None:
            schedules.delete("orders", "often")
        schedules.create("orders", "often", every="1s")
        make_due(db)
        same = decided(orders)
        change()
        assert orders.run(fire("orders", same)) == []
    assert one(db, "SELECT count(*) FROM commandbus.command") == 0


def test_a_pause_is_not_made_up_for(orders: Bus, part: Part, db: Db) -> None:
    part("schedules").create("orders", "often", every="1s", missed="run_all")
    part("schedules").pause("orders", "often")
    make_due(db, ago="1 hour")
    assert decided(orders) == []
    part("schedules").resume("orders", "often")
    assert one(db, "SELECT clock_timestamp() - passed_at < interval '5 seconds' FROM commandbus.schedule")


def test_new_times_make_up_for_nothing_and_other_changes_do(orders: Bus, part: Part, db: Db) -> None:
    schedules = part("schedules")
    schedules.create("orders", "often", every="1h")
    make_due(db, ago="3 hours")
    schedules.create("orders", "often", every="1h", data={"n": 2}, replace=True)
    assert len(decided(orders)[0].decision.firings) == 1
    schedules.create("orders", "often", every="30m", data={"n": 2}, replace=True)
    assert decided(orders) == []


# --- what workers declare ---------------------------------------------------------------------------------------


def beat(bus: Bus, *schedules: Schedule) -> None:
    """A worker with this code is alive."""
    bus.run(declare(schedules))
    for found in bus.run(undecided(["orders"])):
        if not found.is_taken:
            bus.run(put_into_effect(found))


def pass_time(db: Db, seconds: int, *but: Schedule) -> None:
    """So much time passes, in which no worker lives but those with this code."""
    db.execute(
        "UPDATE commandbus.schedule_declaration SET first_seen = first_seen - make_interval(secs => %(s)s), "
        "seen_at = seen_at - CASE WHEN fingerprint = ANY (%(but)s) THEN interval '0' "
        "ELSE make_interval(secs => %(s)s) END",
        {"s": seconds, "but": [item.fingerprint() for item in but]},
    )


def in_effect(db: Db) -> str | None:
    row = db.execute("SELECT cron FROM commandbus.schedule WHERE name = 'nightly'").fetchone()
    return None if row is None else row[0]


def test_of_two_releases_the_newest_wins_also_over_old_workers_that_restart(orders: Bus, db: Db) -> None:
    beat(orders, V1)
    assert in_effect(db) == "0 1 * * *"
    pass_time(db, 60, V1)
    beat(orders, V2)
    assert in_effect(db) == "0 2 * * *"
    pass_time(db, 60, V1, V2)
    beat(orders, V1)  # an old worker, restarted while the release is rolled out
    assert in_effect(db) == "0 2 * * *"
    assert one(db, "SELECT count(*) FROM commandbus.schedule") == 1


def test_after_a_rollback_the_old_definition_is_in_effect_again(orders: Bus, db: Db) -> None:
    beat(orders, V1)
    pass_time(db, 60, V1)
    beat(orders, V2)
    pass_time(db, 10, V1)
    beat(orders, V1)
    assert in_effect(db) == "0 2 * * *", "a worker of the newer release may be restarting"
    pass_time(db, 10, V1)
    beat(orders, V1)
    assert in_effect(db) == "0 1 * * *"
    pass_time(db, 60, V1)
    beat(orders, V2)  # and forward again
    assert in_effect(db) == "0 2 * * *"


def test_a_declared_schedule_lives_for_a_grace_and_keeps_its_state_over_a_deploy(
    orders: Bus, part: Part, db: Db
) -> None:
    beat(orders, V1)
    part("schedules").pause("orders", "nightly", operator="ann")
    pass_time(db, 599)
    assert orders.run(undeclared(["orders"], grace_seconds=600)) == set()
    assert orders.run(forget("orders", "nightly", grace_seconds=600)) is False
    beat(orders, V1)
    pass_time(db, 60, V1)
    beat(orders, V2)
    assert part("schedules").get("orders", "nightly").paused_by == "ann"
    pass_time(db, 601)
    assert orders.run(undeclared(["orders"], grace_seconds=600)) == {("orders", "nightly")}
    assert orders.run(forget("orders", "nightly", grace_seconds=600)) is True
    assert (in_effect(db), one(db, "SELECT count(*) FROM commandbus.schedule_declaration")) == (None, 0)
    actions = [item.action for item in orders.run(list_actions("orders", "nightly", limit=10))]
    assert actions == ["REMOVE", "DECLARE", "PAUSE", "DECLARE"]


def test_code_and_run_time_do_not_change_each_others_schedules(orders: Bus, part: Part, db: Db) -> None:
    beat(orders, V1)
    with pytest.raises(InvalidOperationError, match="is declared in the code of workers; change it there"):
        part("schedules").create("orders", "nightly", every="1h", replace=True)
    with pytest.raises(InvalidOperationError, match="remove it there, or pause it"):
        part("schedules").delete("orders", "nightly")
    part("schedules").create("orders", "weekly", cron="@weekly")
    mine = Schedule("orders", "weekly", cron="@daily")
    beat(orders, mine)
    (found,) = orders.run(undecided(["orders"]))
    assert found.is_taken
    assert orders.run(put_into_effect(found)) is False
    assert part("schedules").get("orders", "weekly").cron == "@weekly"
    assert orders.run(undeclared(["orders"], grace_seconds=0.001)) <= {("orders", "nightly")}


def test_an_older_release_leaves_a_definition_alone_that_it_does_not_know(orders: Bus, db: Db) -> None:
    beat(orders, V1)
    db.execute(
        "INSERT INTO commandbus.schedule_declaration (domain, name, fingerprint, definition, first_seen) VALUES "
        "('orders', 'nightly', 'x', '{\"cron\": \"0 3 * * *\", \"moon\": \"full\"}', now() + interval '1 s')"
    )
    (found,) = orders.run(undecided(["orders"]))
    with pytest.raises(TypeError, match="moon"):
        orders.run(put_into_effect(found))
    assert in_effect(db) == "0 1 * * *"


def test_roles(orders: Bus, acting: Roles, db: Db) -> None:
    def schedules(kind: str) -> Any:
        bus = acting(kind)
        found = bus.schedules
        run = bus.runner.run if bus.driver == "async" else (lambda result: result)
        return bus, lambda method, *args, **options: run(getattr(found, method)(*args, **options))

    _, operate = schedules("operator")
    operate("create", "orders", "often", every="1s")
    operate("pause", "orders", "often")
    operate("resume", "orders", "often")
    operate("run_now", "orders", "often")
    _, read = schedules("reader")
    assert read("get", "orders", "often").fired == 1
    assert_refused(lambda: read("pause", "orders", "often"))
    _, produce = schedules("producer")
    assert_refused(lambda: produce("create", "orders", "other", every="1s"))
    worker = acting("worker")
    make_due(db)
    assert len(worker.run(fire("orders", decided(worker)))) == 1
    beat(worker, V1)
    assert worker.run(undeclared(["orders"], grace_seconds=1000)) == set()
    operate("delete", "orders", "often")
