"""Commands that wait for a handler: looked for and taken by index, however many wait."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from plan_reading import explain, first_statement, visits

from commandbus.flow.commands.unhandled_types import find_unhandled, give_up, take

pytestmark = [pytest.mark.slow, pytest.mark.plans, pytest.mark.shared_setup("crowded")]
Conn = psycopg.Connection[Any]
DOMAIN = "delayed"
BATCH = 200

WAITING = """
    INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason, parked_at)
    SELECT domain, CASE WHEN id %% 100 = 0 THEN 'rare' ELSE 'work' END, msg_id, id, 'handler',
           now() - interval '1 day'
      FROM commandbus.command WHERE domain = %s AND status = 'PENDING' ORDER BY id LIMIT 20000
"""


@pytest.fixture
def waiting(conn: Conn) -> Conn:
    """20,000 commands of two types wait for a handler."""
    conn.execute(WAITING, (DOMAIN,))
    return conn


@pytest.mark.parametrize("is_given_up", [False, True])
def test_taking_them(waiting: Conn, generic: bool, is_given_up: bool) -> None:
    asked: dict[str, Any] = {
        "domain": DOMAIN,
        "command_type": "work",
        "worker": "w",
        "n": BATCH,
        "lease_seconds": 30,
    }
    operation = give_up(**asked, age_seconds=3600) if is_given_up else take(**asked)
    plan = explain(waiting, first_statement(operation), generic=generic)
    assert plan.rows == BATCH
    for relation in ("parked", f"q_{DOMAIN}__commands", "command"):
        assert "Seq Scan" not in plan.kinds(relation), plan
        assert plan.visited(relation) <= 4 * BATCH + 20, plan


def test_looking_for_them(waiting: Conn, generic: bool) -> None:
    found = visits(waiting, first_statement(find_unhandled([DOMAIN, "backlog"])), generic=generic)
    assert found.rows == 2
    assert found.scanned("parked") == 0, found
    assert found.fetched("parked") < 20, found


def test_looking_where_none_wait(conn: Conn, generic: bool) -> None:
    found = visits(conn, first_statement(find_unhandled([DOMAIN, "backlog"])), generic=generic)
    assert found.rows == 0
    assert (found.scanned("worker"), found.scanned("parked")) == (0, 0), found
