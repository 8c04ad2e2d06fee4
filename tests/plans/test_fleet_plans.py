"""What workers and people ask of the fleet is bounded, however many commands wait."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from plan_reading import explain, first_statement

from commandbus.flow.workers.figures import add_figures
from commandbus.model.minute_figures import BUCKETS, MOST_COUNTED

pytestmark = [pytest.mark.slow, pytest.mark.plans, pytest.mark.shared_setup("crowded")]
Conn = psycopg.Connection[Any]
NONE = [0] * BUCKETS


@pytest.mark.parametrize("domain", ["backlog", "delayed"])
def test_what_is_ready_is_counted_up_to_a_bound(conn: Conn, generic: bool, domain: str) -> None:
    statement = first_statement(add_figures(domain, settled=1, waits=NONE, counts_ready=True))
    plan = explain(conn, statement, generic=generic)
    queue = f"q_{domain}__commands"
    assert "Seq Scan" not in plan.kinds(queue), plan
    assert plan.visited(queue) <= 3 * MOST_COUNTED, plan


def test_what_is_not_to_be_counted_is_not_looked_at(conn: Conn, generic: bool) -> None:
    statement = first_statement(add_figures("backlog", settled=1, waits=NONE, counts_ready=False))
    assert explain(conn, statement, generic=generic).visited("q_backlog__commands") == 0
