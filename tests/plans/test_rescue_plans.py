"""The plans of a post-mortem: beside a large backlog it reads what the dead worker held, and little more."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from plan_reading import explain, first_statement

from commandbus.db.drivers import run
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.rescue import claimable_work, held_by

pytestmark = [pytest.mark.slow, pytest.mark.plans, pytest.mark.shared_setup("crowded")]
Conn = psycopg.Connection[Any]
DIRECT = {"Index Scan", "Index Only Scan", "Bitmap Heap Scan"}


@pytest.mark.parametrize("domain", ["backlog", "delayed"])
def test_what_a_dead_worker_held(conn: Conn, generic: bool, domain: str) -> None:
    taken = run(conn, claim(domain=domain, worker="dead", n=20, lease_seconds=30, cursor=None))
    running = [row[0] for row in taken.ready[:4]]
    statement = first_statement(held_by(domain, "dead", running=running, past_seconds=10, lease_seconds=40))
    plan = explain(conn, statement, generic=generic)
    assert plan.rows == 20
    for relation in (f"q_{domain}__commands", "command"):
        assert plan.kinds(relation) <= DIRECT, plan
        assert plan.visited(relation) <= 100, plan


@pytest.mark.parametrize("domain", ["backlog", "delayed"])
def test_claimable_work(conn: Conn, generic: bool, domain: str) -> None:
    plan = explain(conn, first_statement(claimable_work(domain)), generic=generic)
    assert plan.kinds(f"q_{domain}__commands") <= DIRECT, plan
    assert plan.visited(f"q_{domain}__commands") <= 10_000, plan
