"""The plans of what pages, the API and lists of the CLI read: by index, and a bounded number of rows, whatever was
asked, however large the tables are."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from plan_reading import Plan, plans_of

from commandbus.flow.batches import inspect as batches
from commandbus.flow.commands import query_filters
from commandbus.flow.commands.history import list_stuck
from commandbus.flow.commands.inspect import domain_status, list_rejected
from commandbus.flow.commands.query import CommandQuery, query_commands
from commandbus.flow.commands.stuck_groups import list_stuck_groups
from commandbus.flow.commands.tsq import count_tsq, list_tsq
from commandbus.flow.operation import Operation
from commandbus.flow.processes.inspect import list_summaries, query_processes
from commandbus.model.command import CommandStatus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.plans,
    pytest.mark.shared_setup("crowded"),
    pytest.mark.parametrize("statistics", ["known"], indirect=True),
]
Conn = psycopg.Connection[Any]
DIRECT = {"Index Scan", "Index Only Scan", "Tid Scan", "Bitmap Heap Scan", "Subquery Scan"}
EMPTY = 10
FUTURE = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def modest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that is small beside the tables."""
    monkeypatch.setattr(query_filters, "BUDGET", 2_000)
    monkeypatch.setattr(query_filters, "BUDGET_FOR_DATA", 1_000)


@pytest.fixture
def rare(conn: Conn) -> None:
    """Among half a million commands, a few of a kind: at the very beginning, where a walk arrives last."""
    first = "(SELECT id FROM commandbus.command ORDER BY id LIMIT 5)"
    conn.execute(f"UPDATE commandbus.command SET status = 'FAILED', correlation_id = 'trace' WHERE id IN {first}")
    conn.execute(
        f"INSERT INTO commandbus.attempt (command, number, verdict, error) "
        f"SELECT id, 2, 'BUSINESS_RULE', 'the Moon is full' FROM commandbus.command WHERE id IN {first}"
    )


def check(plans: list[Plan], most: int) -> None:
    """No table is scanned but empty ones, and of none are more rows looked at than that."""
    for plan in plans:
        for relation in plan.relations():
            scanned = sum(scan.visited for scan in plan.scans(relation) if scan.kind not in DIRECT)
            assert scanned <= EMPTY, (relation, plan)
            assert plan.visited(relation) <= most, (relation, plan)


@pytest.mark.parametrize(
    ("query", "most", "found", "is_partial"),
    [
        (CommandQuery(), 60, 50, False),
        (CommandQuery(domain="history", command_id="history-17"), 5, 1, False),
        (CommandQuery(command_id="history-17"), 40, 1, False),
        (CommandQuery(correlation_id="trace"), 60, 5, False),
        (CommandQuery(correlation_id="trace", status="FAILED", domain="history"), 60, 5, False),
        (CommandQuery(status=CommandStatus.FAILED), 400, 5, False),
        (CommandQuery(status=CommandStatus.CANCELED), 60, 0, False),
        (CommandQuery(status=CommandStatus.IN_TROUBLESHOOTING_QUEUE), 60, 50, False),
        (CommandQuery(status=CommandStatus.IN_TROUBLESHOOTING_QUEUE, domain="trouble"), 60, 50, False),
        (CommandQuery(status="IN_TROUBLESHOOTING_QUEUE", domain="trouble", command_type="work"), 60, 50, False),
        (CommandQuery(status=CommandStatus.PENDING, domain="backlog"), 45_000, 0, True),
        (CommandQuery(status=CommandStatus.IN_PROGRESS, domain="backlog"), 45_000, 0, False),
        (CommandQuery(command_type="never"), 2_100, 0, True),
        (CommandQuery(domain="trouble"), 2_100, 0, True),
        (CommandQuery(data={"n": "2"}), 2_100, 0, True),
        (CommandQuery(error="No such thing"), 2_100, 0, True),
        (CommandQuery(created_after=FUTURE), 400, 0, False),
        (CommandQuery(created_before=FUTURE - timedelta(days=50_000)), 400, 0, False),
    ],
    ids=str,
)  # fmt: skip
def test_commands(
    conn: Conn, rare: None, query: CommandQuery, most: int, found: int, is_partial: bool, generic: bool
) -> None:
    page, plans = plans_of(conn, query_commands(query, limit=50), generic=generic)
    assert (len(page), page.is_partial) == (found, is_partial)
    assert page.has_more == (is_partial or found == 50)
    check(plans, most)


def test_a_partial_answer_goes_on_to_the_end(conn: Conn, rare: None) -> None:
    query = CommandQuery(command_type="work", worker="w", domain="trouble")
    query_filters.BUDGET = 50_000
    found, cursor, calls = [], None, 0
    while calls < 20:
        page, _ = plans_of(conn, query_commands(query, limit=9_000, cursor=cursor), generic=False)
        found += [item.id for item in page]
        calls, cursor = calls + 1, page.next_cursor
        if cursor is None:
            break
    assert (len(found), len(set(found))) == (20_000, 20_000)
    assert found == sorted(found, reverse=True)
    assert calls > 5


@pytest.mark.parametrize("domain", ["backlog", "delayed", "trouble"])
def test_the_status_of_a_domain(conn: Conn, generic: bool, domain: str) -> None:
    ((status,), plans) = plans_of(conn, domain_status([domain]), generic=generic)
    check(plans, 45_000)
    expected = {
        "backlog": (10_000, 0, 0, ["ready"]),
        "delayed": (300, 10_000, 0, ["delayed", "running"]),
        "trouble": (0, 0, 10_000, ["in_tsq"]),
    }[domain]
    assert (status.ready, status.delayed, status.in_tsq) == expected[:3]
    assert set(expected[3]) <= set(status.capped)
    assert str(status.ready) == ("10,000+" if expected[0] == 10_000 else str(expected[0]))


@pytest.mark.parametrize(
    ("operation", "most"),
    [
        (lambda: list_tsq(domain=None, command_type=None, error_code=None, limit=50), 60),
        (lambda: list_tsq(domain="trouble", command_type=None, error_code=None, limit=50), 60),
        (lambda: list_tsq(domain="trouble", command_type="work", error_code=None, limit=50, cursor="9"), 60),
        (lambda: list_tsq(domain="trouble", command_type="work", error_code="RARE", limit=50), 2_100),
        (lambda: list_tsq(domain=None, command_type="never", error_code=None, limit=50), 2_100),
        (lambda: count_tsq(domain=None, command_type=None, error_code=None), 20_010),
        (lambda: count_tsq(domain="trouble", command_type="work", error_code="RARE"), 20_010),
        (lambda: list_stuck(limit=50), 70),
        (lambda: list_stuck_groups(limit=50), 10_010),
        (lambda: list_rejected(domain="orders", limit=50), 60),
        (lambda: query_processes(limit=50), 60),
        (lambda: list_summaries(limit=50), 60),
        (lambda: batches.query(domain=None, status=None, limit=50), 10_010),
    ],
)
def test_lists(conn: Conn, generic: bool, operation: Any, most: int) -> None:
    made: Operation[Any] = operation()
    _, plans = plans_of(conn, made, generic=generic)
    check(plans, most)
