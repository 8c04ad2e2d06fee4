"""Attempts that a limit had to stop: what is kept of them, and how they are found again."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from flow_harness import POLICY, Bus, fail

from commandbus import InvalidCommandError, NewCommand
from commandbus.flow.commands.settle import Settlement
from commandbus.model.outcome import Failure, judge
from commandbus.worker.execution.attempt import Attempt

AUTOPSY = {"stacks": [{"title": "slot thread", "frames": ["File …"]}], "session": {"pid": 7}}


def _stopped(attempt: Attempt, *, rung: str = "stuck", duration_ms: int | None = 40_000) -> Settlement:
    failure = Failure(
        "ExecutionStuck",
        "EXECUTION_STUCK",
        "did not respond",
        rung=rung,
        autopsy=json.dumps(AUTOPSY),
        duration_ms=duration_ms,
    )
    return attempt.fail(judge(failure, charge=attempt.charge, policy=POLICY, max_attempts=attempt.max_attempts))


@pytest.fixture
def stuck(orders: Bus) -> Bus:
    """Three that were stopped, of two types and domains, and one that just failed."""
    orders.create_domain("billing")
    orders.send_many(
        "orders",
        [
            NewCommand("Ship", command_id="a"),
            NewCommand("Pack", command_id="b"),
            NewCommand("Ship", command_id="plain"),
        ],
    )
    first, second, failed = orders.claim()
    assert orders.settle(_stopped(first)) == {}
    assert orders.settle(_stopped(second, rung="deadline", duration_ms=None)) == {}
    assert orders.settle(fail(failed, ValueError())) == {}
    orders.send("billing", "Ship", command_id="c", max_attempts=1)
    assert orders.settle(_stopped(orders.claim_one(domain="billing"), rung="crash")) == {}
    return orders


def test_newest_first_and_filtered(stuck: Bus, db: psycopg.Connection[Any]) -> None:
    def found(*words: Any, **more: Any) -> list[str]:
        return [item.command_id for item in stuck.list_stuck(*words, **more)]

    assert found() == ["c", "b", "a"]
    assert found(limit=2) == ["c", "b"]
    assert found("orders") == ["b", "a"]
    assert found(command_type="Ship") == ["c", "a"]
    assert found("orders", "Ship") == ["a"]
    assert found("unheard_of") == []
    db.execute("UPDATE commandbus.attempt SET finished_at = finished_at - interval '1 hour' WHERE rung = 'stuck'")
    assert found(since=datetime.now(UTC) - timedelta(minutes=30)) == ["c", "b"]
    assert found(since=datetime.now(UTC) + timedelta(minutes=30)) == []


def test_pages_follow_each_other_also_where_attempts_ended_together(
    stuck: Bus, db: psycopg.Connection[Any]
) -> None:
    db.execute("UPDATE commandbus.attempt SET finished_at = now() WHERE rung IS NOT NULL")
    whole = stuck.list_stuck()
    assert not whole.has_more
    found, cursor = [], None
    while True:
        page = stuck.list_stuck(limit=1, cursor=cursor)
        found += page.items
        cursor = page.next_cursor
        if not page.has_more:
            break
    assert found == whole.items
    assert len(found) == 3
    for wrong in ("5", "x|1|1|RETRY", "", 7, f"{whole[0].finished_at.isoformat()}|1|one|RETRY"):
        with pytest.raises(InvalidCommandError, match="is not one of this list"):
            stuck.list_stuck(cursor=wrong)


def test_what_is_told(stuck: Bus) -> None:
    item = stuck.list_stuck("orders", "Ship")[0]
    record = stuck.get_command("orders", "a")
    assert (item.id, item.domain, item.command_type, item.number) == (record.id, "orders", "Ship", 1)
    assert (item.verdict, item.rung, item.duration_ms, item.worker) == ("RETRY", "stuck", 40_000, "w1")
    assert (item.error_type, item.error_code, item.error) == (
        "ExecutionStuck",
        "EXECUTION_STUCK",
        "did not respond",
    )
    assert item.autopsy == AUTOPSY
    assert item.started_at <= item.finished_at
    (attempt,) = stuck.get_attempts("orders", "a")
    assert (attempt.rung, attempt.duration_ms, attempt.autopsy) == ("stuck", 40_000, AUTOPSY)
    (failed,) = [entry for entry in stuck.get_audit_trail("orders", "a") if entry.event.value == "FAILED"]
    assert (failed.details["rung"], failed.details["duration_ms"]) == ("stuck", 40_000)
    (plain,) = stuck.get_attempts("orders", "plain")
    assert (plain.rung, plain.duration_ms, plain.autopsy) == (None, None, None)


def test_bad_questions_are_named(orders: Bus) -> None:
    for words, named in [
        ({"domain": "Orders"}, "domain"),
        ({"command_type": "a\x00"}, "command_type"),
        ({"limit": 0}, "limit"),
        ({"limit": "5"}, "limit"),
        ({"since": "1h"}, "since"),
        ({"since": datetime(2026, 1, 1)}, "since"),  # noqa: DTZ001
    ]:
        with pytest.raises(InvalidCommandError, match=named):
            orders.list_stuck(**words)


def test_groups_by_own_frame(orders: Bus, db: Any) -> None:
    for number, (frame, rung, verdict) in enumerate(
        [
            ("shop/scan.py: wait", "stuck", "FAILED"),
            ("shop/scan.py: wait", "deadline", "FAILED"),
            ("shop/scan.py: wait", "stuck", "FAILED"),
            (None, "kill", "FAILED"),
            ("shop/other.py: run", "shutdown", "WAIVED"),
        ]
    ):
        sent = orders.send("orders", "scan", command_id=f"s{number}")
        db.execute(
            "INSERT INTO commandbus.attempt (command, number, verdict, rung, own_frame, finished_at) "
            "VALUES (%s, 1, %s, %s, %s, now() + make_interval(secs => %s))",
            [sent.id, verdict, rung, frame, number],
        )
    killed, hung = orders.list_stuck_groups()
    assert (killed.own_frame, killed.count, killed.rungs, killed.command_id) == (None, 1, {"kill": 1}, "s3")
    assert (hung.own_frame, hung.count) == ("shop/scan.py: wait", 3)
    assert list(hung.rungs.items()) == [("stuck", 2), ("deadline", 1)]
    assert (hung.command_id, hung.first_at < hung.last_at) == ("s2", True)
    assert [item.own_frame for item in orders.list_stuck_groups(limit=1)] == [None]
    assert orders.list_stuck_groups(limit=1).is_partial
    assert not orders.list_stuck_groups("orders", "other").items
