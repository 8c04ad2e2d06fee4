"""prune: finished commands go by age or count with all that is known of them; the unfinished stay."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, fail, one, send_raw

from commandbus import BusinessRuleException, InvalidCommandError, NewCommand, PermanentCommandError, load_settings
from commandbus.flow.audit.list_actions import list_actions
from commandbus.flow.commands.prune import Retention, prune, prune_all, prune_archive, prune_set_aside, through_id

UNFINISHED = ["waiting", "delayed", "running", "troubled", "retried"]
FINISHED = ["completed", "failed", "canceled"]
BAD_PLACES: list[Any] = [
    *("", "x", "[]", "[" * 1500, 7),
    '["commands", null, 0, ""]',
    '["nowhere", null, 0, "", ""]',
    '["commands", 1e99, 0, "", ""]',
    '["commands", null, -1, "", ""]',
    '["keys", null, 0, "\\u0000", ""]',
    '["excess", null, 0, "command", ""]',
]


@pytest.fixture
def varied(orders: Bus, db: psycopg.Connection[Any]) -> Bus:
    """Every state, all of it a month old."""
    orders.send_many("orders", [NewCommand("Ship", command_id=name) for name in FINISHED[:2] + UNFINISHED[2:]])
    by_id = {attempt.command_id: attempt for attempt in orders.claim()}
    orders.settle(fail(by_id["completed"], ValueError()))
    (by_id["completed"],) = [attempt for attempt in orders.claim() if attempt.command_id == "completed"]
    orders.settle(
        [
            by_id["completed"].complete(None),
            fail(by_id["failed"], BusinessRuleException()),
            fail(by_id["troubled"], PermanentCommandError()),
            fail(by_id["retried"], ValueError()),
        ]
    )
    for name, delay in (("waiting", 0), ("delayed", 60), ("canceled", 0)):
        orders.send("orders", "Ship", command_id=name, delay=delay)
    orders.cancel("orders", "canceled", operator="ann")
    _age(db, "30 days")
    return orders


def _age(db: psycopg.Connection[Any], by: str) -> None:
    db.execute(
        "UPDATE commandbus.command SET created_at = created_at - %(by)s::interval, "
        "finished_at = finished_at - %(by)s::interval",
        {"by": by},
    )


def _left(db: psycopg.Connection[Any]) -> list[str]:
    return sorted(row[0] for row in db.execute("SELECT command_id FROM commandbus.command"))


def _orphans(db: psycopg.Connection[Any]) -> int:
    count: int = one(
        db,
        "SELECT (SELECT count(*) FROM commandbus.attempt "
        "WHERE command NOT IN (SELECT id FROM commandbus.command)) "
        "+ (SELECT count(*) FROM commandbus.operator_action "
        "WHERE command NOT IN (SELECT id FROM commandbus.command))",
    )
    return count


@pytest.mark.parametrize("age", [86400, "1d", timedelta(days=29), "29d 23h", 0])
def test_by_age(varied: Bus, db: psycopg.Connection[Any], age: Any) -> None:
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 4
    report = varied.prune(age=age)
    assert report.commands == 3
    assert _left(db) == sorted(UNFINISHED)
    assert _orphans(db) == 0
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 2
    assert varied.prune(age=age).commands == 0
    assert varied.tsq.count() == 1


def test_what_is_too_young_stays(varied: Bus, db: psycopg.Connection[Any]) -> None:
    assert varied.prune(age="31d").commands == 0
    assert len(_left(db)) == 8
    db.execute("UPDATE commandbus.command SET finished_at = now() WHERE command_id = 'failed'")
    assert varied.prune(age="1d").commands == 2
    assert _left(db) == sorted([*UNFINISHED, "failed"])


def test_by_count(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send_many("orders", [NewCommand("Ship", command_id=f"k{n:02}") for n in range(20)])
    attempts = orders.claim(n=20)
    orders.settle([attempt.complete(None) for attempt in attempts if attempt.command_id != "k03"])
    for count, removed in ((25, 0), (19, 0), (10, 9), (0, 10)):
        assert orders.prune(count=count).commands == removed
        assert one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'") == min(count, 19)
        assert "k03" in _left(db)
    assert _left(db) == ["k03"]


def test_the_newest_are_kept(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send_many("orders", [NewCommand("Ship", command_id=f"k{n:02}") for n in range(20)])
    orders.settle([attempt.complete(None) for attempt in orders.claim(n=20)])
    orders.prune(count=3)
    assert _left(db) == ["k17", "k18", "k19"]


def test_age_or_count(varied: Bus, db: psycopg.Connection[Any]) -> None:
    db.execute("UPDATE commandbus.command SET finished_at = now() WHERE command_id IN ('failed', 'canceled')")
    assert varied.prune(age="1d", count=1).commands == 2
    assert _left(db) == sorted([*UNFINISHED, "canceled"])


def test_in_bites(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send_many("orders", [NewCommand("Ship") for _ in range(25)])
    attempts = orders.claim(n=25)
    orders.settle([attempt.complete(None) for attempt in attempts[:10] + attempts[15:]])
    _age(db, "2 days")
    retention = Retention(age_seconds=86400)
    after, bites = 0, []
    while True:
        bite = orders.run(prune(retention, through=0, after_id=after, bite=7))
        bites.append(bite.removed)
        assert bite.removed <= 7
        after = bite.after_id
        if bite.is_done:
            break
    assert sum(bites) == 20
    assert len(bites) == 4
    assert one(db, "SELECT count(*) FROM commandbus.command") == 5


def test_the_walk_ends_at_the_young(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send_many("orders", [NewCommand("Ship") for _ in range(50)])
    orders.settle([attempt.complete(None) for attempt in orders.claim(n=50)])
    db.execute(
        "UPDATE commandbus.command SET created_at = now() - interval '9 d', finished_at = now() - interval '9 d' "
        "WHERE id IN (SELECT id FROM commandbus.command ORDER BY id LIMIT 15)"
    )
    retention = Retention(age_seconds=86400)
    first = orders.run(prune(retention, through=0, bite=10))
    second = orders.run(prune(retention, through=0, after_id=first.after_id, bite=10))
    third = orders.run(prune(retention, through=0, after_id=second.after_id, bite=10))
    assert [(bite.removed, bite.is_done) for bite in (first, second, third)] == [
        (10, False),
        (5, False),
        (0, True),
    ]


def test_archives_and_what_was_put_aside(orders: Bus, db: psycopg.Connection[Any]) -> None:
    for _ in range(5):
        send_raw(db, '{"command_type": "x"}')
    db.execute("SELECT pgmq.archive('orders__commands', msg_id) FROM pgmq.q_orders__commands")
    db.execute("UPDATE pgmq.a_orders__commands SET archived_at = now() - interval '2 days' WHERE msg_id <= 3")
    send_raw(db, "[]")
    orders.claim()
    orders.create_queue("fleeting")
    orders.send("orders", "Ship", reply_to="fleeting")
    db.execute("SELECT pgmq.drop_queue('fleeting')")
    orders.settle(orders.claim_one().complete(None))
    db.execute("UPDATE commandbus.rejected_message SET rejected_at = now() - interval '2 days'")
    db.execute("UPDATE commandbus.undelivered_reply SET created_at = now() - interval '2 days'")
    db.execute(
        "INSERT INTO commandbus.worker (id, host, pid, domains, concurrency, version, state, heartbeat_at) VALUES "
        "('old', 'h', 1, '{}', 1, '1', 'STOPPED', now() - interval '2 days'), "
        "('new', 'h', 1, '{}', 1, '1', 'ACTIVE', now())"
    )
    report = orders.prune(age="1d")
    assert (report.commands, report.archived, report.asides) == (0, 3, 3)
    assert one(db, "SELECT count(*) FROM pgmq.a_orders__commands") == 2
    assert [worker.id for worker in orders.workers()] == ["new"]
    assert orders.run(prune_archive("orders", 0.0, bite=1)) == 1
    assert orders.run(prune_set_aside(0.0)) == 0


def test_a_locked_command_is_left_for_the_next_time(varied: Bus, db: psycopg.Connection[Any]) -> None:
    with psycopg.connect(varied.url) as other:
        other.execute("SELECT FROM commandbus.command WHERE command_id = 'failed' FOR UPDATE")
        assert varied.prune(age="1d").commands == 2
    assert varied.prune(age="1d").commands == 1


def test_a_pruned_id_can_be_sent_again(varied: Bus) -> None:
    varied.prune(age="1d")
    assert varied.get_command("orders", "completed") is None
    assert varied.get_audit_trail("orders", "completed").items == []
    assert varied.send("orders", "Other", command_id="completed").created


def test_the_settings_decide_if_nothing_is_said(connect: Any, varied: Bus, db: psycopg.Connection[Any]) -> None:
    kept = connect(None, settings=load_settings({"database_url": varied.url, "retention_age": "40d"}))
    assert kept.prune().commands == 0
    pruned = connect(None, settings=load_settings({"database_url": varied.url, "retention_age": "20d"}))
    assert pruned.prune().commands == 3
    assert Retention().is_off
    assert list(prune_all(Retention())) == []
    assert varied.run(through_id(Retention(count=1))) == 0


def test_bad_bounds_are_named(orders: Bus) -> None:
    for age in (-1, "soon", float("nan"), True, "1000y"):
        with pytest.raises(ValueError, match="age"):
            orders.prune(age=age)
    for count in (-1, 1.5, True, "5"):
        with pytest.raises(ValueError, match="count"):
            orders.prune(count=count)


def test_in_portions_that_go_on_where_the_last_one_ended(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send_many("orders", [NewCommand("Ship") for _ in range(4500)])
    db.execute("UPDATE commandbus.command SET status = 'COMPLETED', finished_at = now()")
    _age(db, "2 days")
    for _ in range(3):
        send_raw(db, '{"command_type": "x"}')
    db.execute("DELETE FROM pgmq.q_orders__commands WHERE message ? 'command'")
    db.execute("SELECT pgmq.archive('orders__commands', msg_id) FROM pgmq.q_orders__commands")
    db.execute("UPDATE pgmq.a_orders__commands SET archived_at = now() - interval '2 days'")
    reports = [orders.prune(age="1d", portion=2000)]
    while (place := reports[-1].go_on_from) is not None:
        reports.append(orders.prune(age="1d", portion=2000, go_on_from=place))
        assert len(reports) < 20
    assert sum(report.commands for report in reports) == 4500
    assert max(report.commands for report in reports) <= 2000
    assert sum(report.archived for report in reports) == 3
    assert _left(db) == []


def test_a_place_that_is_none_is_refused(orders: Bus) -> None:
    for bad in BAD_PLACES:
        with pytest.raises(InvalidCommandError, match="go_on_from"):
            orders.prune(age="1d", go_on_from=bad)
    for portion in (0, -1, True, "many", 10**9):
        with pytest.raises(InvalidCommandError, match="portion"):
            orders.prune(age="1d", portion=portion)  # type: ignore[arg-type]
    assert orders.prune(age="1d", go_on_from='["asides", null, 0, "", ""]').commands == 0


def test_the_place_of_another_prune_deletes_nothing_that_is_kept(varied: Bus, db: psycopg.Connection[Any]) -> None:
    varied.prune(age="31d", go_on_from='["commands", 9000000000, 0, "", ""]')
    assert len(_left(db)) == 8, "`through` counts only for a prune by count"


@pytest.mark.parametrize(
    "bounds", [{"age": "1d"}, {"count": 0}, {"count": 1}, {"age": "31d"}, {"age": "1d", "count": 1}]
)
def test_the_preview_counts_what_a_prune_deletes(varied: Bus, db: psycopg.Connection[Any], bounds: Any) -> None:
    found = varied.preview_prune(**bounds)
    assert sum(found.by_status.values()) == found.commands
    assert not found.is_partial
    assert (found.before is None) == ("age" not in bounds)
    assert len(_left(db)) == 8, "nothing was deleted"
    assert varied.prune(**bounds).commands == found.commands


def test_a_preview_of_many_is_cut_and_says_so(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send_many("orders", [NewCommand("Ship") for _ in range(20)])
    db.execute(
        "INSERT INTO commandbus.command (domain, command_id, command_type, status, created_at, finished_at) "
        "SELECT 'orders', 'old' || n, 'Ship', 'COMPLETED', now() - interval '2 d', now() - interval '2 d' "
        "FROM generate_series(1, 12100) n"
    )
    found = orders.preview_prune(age="1d")
    assert str(found.commands) == "10,000+"
    assert found.is_partial
    assert found.about is None
    db.execute("ANALYZE commandbus.command")
    found = orders.preview_prune(count=12_050)
    assert (found.about, found.commands) == (70, 0), "so many are not counted one by one"
    assert str(orders.preview_prune(count=12_000).commands) == "100"
    db.execute("DELETE FROM commandbus.command WHERE id % 3 > 0 AND command_id LIKE 'old%'")
    found = orders.preview_prune(age="1d")
    assert found.commands == 4034
    assert not found.is_partial


def test_a_preview_by_count_does_not_walk_through_all_that_wait(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send_many("orders", [NewCommand("Ship") for _ in range(10)])
    db.execute("UPDATE commandbus.command SET status = 'COMPLETED', finished_at = now() - interval '2 d'")
    assert orders.preview_prune(count=4).commands == 6
    db.execute(
        "INSERT INTO commandbus.command (domain, command_id, command_type) "
        "SELECT 'orders', 'new' || n, 'Ship' FROM generate_series(1, 12100) n"
    )
    db.execute("ANALYZE commandbus.command")
    found = orders.preview_prune(count=4)
    assert (found.commands, found.about) == (0, 12_106), "the newest finished one is too far away"


def test_who_pruned_and_what_is_in_the_audit(varied: Bus) -> None:
    varied.prune(age="1d")
    assert varied.run(list_actions(action="PRUNE")).items == [], "no person was named"
    varied.prune(age="1d", operator="ann", reason="disk full")
    done, begun = varied.run(list_actions(operator="ann")).items
    assert (begun.action, begun.reason, begun.subject) == ("PRUNE", "disk full", "retention")
    assert begun.details == {"age_seconds": 86400.0, "count": None}
    assert done.action == "PRUNED"
    assert (done.details["commands"], done.details["is_last"]) == (0, True)
