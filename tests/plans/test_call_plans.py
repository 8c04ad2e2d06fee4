"""The plan of the look at called commands: by their keys, beside any number of others, and no more than these."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from plan_reading import first_statement, visits

from commandbus.flow.commands.call import outcomes

pytestmark = [pytest.mark.slow, pytest.mark.plans, pytest.mark.shared_setup("crowded")]
Conn = psycopg.Connection[Any]
CALLED = 50
ACTED = """
    INSERT INTO commandbus.operator_action (command, action, operator)
    SELECT id, 'CANCEL', 'kim' FROM commandbus.command ORDER BY id LIMIT 20000
"""


@pytest.mark.parametrize("domain", ["backlog", "history", "trouble"])
def test_the_outcomes_of_some_commands(conn: Conn, generic: bool, domain: str) -> None:
    conn.execute(ACTED)
    rows = conn.execute("SELECT command_id FROM commandbus.command WHERE domain = %s LIMIT %s", (domain, CALLED))
    names = [(domain, command_id) for (command_id,) in rows]
    seen = visits(conn, first_statement(outcomes(names)), generic=generic)
    assert seen.rows == CALLED
    for relation in ("command", "attempt", "operator_action"):
        assert seen.scanned(relation) == 0, seen
        assert seen.fetched(relation) <= 2 * CALLED, seen
