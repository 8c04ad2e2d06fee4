"""The plan of the look at called commands: by their keys, beside any number of others, and no more than these."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from plan_reading import explain, first_statement

from commandbus.flow.call import outcomes

pytestmark = [pytest.mark.slow, pytest.mark.shared_setup("crowded")]
Conn = psycopg.Connection[Any]
DIRECT = {"Index Scan", "Index Only Scan", "Bitmap Heap Scan"}
CALLED = 50
ACTED = """
    INSERT INTO commandbus.operator_action (command, action, operator)
    SELECT id, 'CANCEL', 'kim' FROM commandbus.command ORDER BY id LIMIT 20000
"""


@pytest.mark.parametrize("domain", ["backlog", "history", "trouble"])
def test_the_outcomes_of_some_commands(conn: Conn, generic: bool, domain: str) -> None:
    conn.execute(ACTED)
    rows = conn.execute("SELECT id FROM commandbus.command WHERE domain = %s LIMIT %s", (domain, CALLED))
    plan = explain(conn, first_statement(outcomes([id_ for (id_,) in rows])), generic=generic)
    assert plan.rows == CALLED
    for relation in ("command", "attempt", "operator_action"):
        assert plan.kinds(relation) <= DIRECT, plan
        assert plan.visited(relation) <= 2 * CALLED, plan
