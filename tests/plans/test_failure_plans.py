"""Failures that are alike, and the ledger of a command: read by index, however many attempts there are."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from plan_reading import explain, first_statement

from commandbus import sql
from commandbus.flow.commands import failures
from commandbus.flow.commands.failures import list_failures
from commandbus.flow.commands.ledger import get_ledger
from commandbus.flow.operation import Statement

pytestmark = [pytest.mark.slow, pytest.mark.plans, pytest.mark.shared_setup("crowded")]
Conn = psycopg.Connection[Any]
DOMAIN = "delayed"
ATTEMPTS = 20_000

FAILED = """
    INSERT INTO commandbus.attempt (command, number, verdict, fingerprint, error_type, finished_at)
    SELECT id, 1000, 'RETRY', lpad((id %% 5)::text, 12, '0'), 'ValueError', now() - id * interval '1 ms'
      FROM commandbus.command WHERE domain = %s ORDER BY id LIMIT %s
"""
TROUBLED = """
    INSERT INTO commandbus.tsq (command, domain, command_type, attempt, fingerprint)
    SELECT command, %s, 'work', number, fingerprint FROM commandbus.attempt WHERE fingerprint IS NOT NULL
    ON CONFLICT DO NOTHING
"""


@pytest.fixture
def failing(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> Conn:
    """20,000 attempts have failed in five ways."""
    monkeypatch.setattr(failures, "MOST_COUNTED", 100)
    monkeypatch.setattr(failures, "NEWEST_COMMANDS", 100)
    conn.execute(FAILED, (DOMAIN, ATTEMPTS))
    conn.execute(TROUBLED, (DOMAIN,))
    return conn


@pytest.mark.parametrize("in_troubleshooting", [False, True])
def test_a_list_of_failures_visits_a_bounded_number_of_rows(
    failing: Conn, generic: bool, in_troubleshooting: bool
) -> None:
    statement = first_statement(list_failures(in_troubleshooting=in_troubleshooting))
    plan = explain(failing, statement, generic=generic)
    assert plan.rows == 5
    for relation in ("attempt", "tsq", "command"):
        assert "Seq Scan" not in plan.kinds(relation), plan
        assert plan.visited(relation) < 2500, plan


def test_a_ledger_reads_by_keys(failing: Conn, generic: bool) -> None:
    (command_id,) = failing.execute(
        "SELECT command_id FROM commandbus.command WHERE domain = %s LIMIT 1", (DOMAIN,)
    ).fetchone() or ("",)
    operation = get_ledger(DOMAIN, command_id)
    statement = first_statement(operation)
    plan = explain(failing, statement, generic=generic)
    assert plan.rows == 1
    for relation in ("command", f"q_{DOMAIN}__commands"):
        assert "Seq Scan" not in plan.kinds(relation), plan
    row = failing.execute(statement.sql, statement.params).fetchone()
    assert row is not None
    for _ in range(2):
        statement = operation.steps.send([row] if "clock_timestamp" in str(statement.sql) else [])
        assert explain(failing, statement, generic=generic).visited("attempt") <= 2


def test_a_place_in_the_queue_is_counted_along_the_index(conn: Conn, generic: bool) -> None:
    """Of the last of a large backlog: up to the cap, and no further."""
    (command_id,) = conn.execute(
        "SELECT command_id FROM commandbus.command WHERE domain = 'backlog' AND status = 'PENDING' "
        "ORDER BY id DESC LIMIT 1"
    ).fetchone() or ("",)
    text = sql.text("commands/place_in_queue", domain="backlog")
    asked = {"domain": "backlog", "command_id": command_id, "most": 101, "alive": 15.0}
    plan = explain(conn, Statement(text, asked), generic=generic)
    assert plan.rows == 1
    assert "Seq Scan" not in plan.kinds("q_backlog__commands"), plan
    assert plan.visited("q_backlog__commands") <= 310, plan
