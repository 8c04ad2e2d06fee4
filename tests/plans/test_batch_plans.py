"""The plans of batches: beside a large one, thousands of others and a large backlog, each reads what it needs.

`backlog` is one batch of 100k members that wait, `history` one of 200k that are finished; 5,000 others are
finished and empty, and there are 3,000 deltas that nobody has folded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from crowd import analyze, crowded_database
from plan_reading import Plan, explain, first_statement, visits
from psycopg import sql

from commandbus import CommandQuery
from commandbus.db.drivers import run
from commandbus.db.embedded import EmbeddedPostgres
from commandbus.flow.batches import inspect as batch_look
from commandbus.flow.batches.fold_and_complete import fold
from commandbus.flow.batches.leftovers import Canceling, leftovers
from commandbus.flow.batches.operate import cancel_bite
from commandbus.flow.commands import operate
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.prune import Retention, prune_groups
from commandbus.flow.commands.query import query_commands
from commandbus.flow.commands.settle import settle
from commandbus.flow.operation import Operation, Statement
from commandbus.worker.execution.attempt import Attempt

pytestmark = [pytest.mark.slow, pytest.mark.plans, pytest.mark.shared_setup]
Conn = psycopg.Connection[Any]
DIRECT = {"Index Scan", "Index Only Scan", "Bitmap Heap Scan", "Tid Scan"}
WAITING, FINISHED = 5001, 5002


@pytest.fixture(scope="module")
def crowded(
    server: EmbeddedPostgres, server_admin: Callable[[sql.Composable], None], migrated_template: str
) -> Iterator[str]:
    """One of its own, in which most commands are members of two large batches."""
    with crowded_database(server, server_admin, migrated_template) as url:
        _add_batches(url)
        yield url


@pytest.fixture(scope="module", params=["unknown", "known"])
def statistics(request: pytest.FixtureRequest, crowded: str) -> str:
    if request.param == "known":
        analyze(crowded)
    return str(request.param)


def _add_batches(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        for table in ("batch", "batch_delta"):
            conn.execute(f"ALTER TABLE commandbus.{table} SET (autovacuum_enabled = false)".encode())
        conn.execute(
            "INSERT INTO commandbus.batch (domain, batch_id, status, finished_at) "
            "SELECT 'history', 'b' || n, 'COMPLETED', now() - interval '9 days' FROM generate_series(1, 5000) n"
        )
        conn.execute(
            "INSERT INTO commandbus.batch (domain, batch_id, total) VALUES ('backlog', 'waiting', 100000), "
            "('history', 'finished', 200000)"
        )
        conn.execute("UPDATE commandbus.command SET batch = %s WHERE domain = 'backlog'", (WAITING,))
        conn.execute("UPDATE commandbus.command SET batch = %s WHERE domain = 'history'", (FINISHED,))
        conn.execute(
            "INSERT INTO commandbus.batch_delta (batch, completed) SELECT n %% 3000 + 2003, 1 "
            "FROM generate_series(1, 3000) n", ()
        )  # fmt: skip


def statements(operation: Operation[Any], *answers: list[Any]) -> Statement:
    """The statement that an operation comes to when it gets these answers."""
    statement = next(operation.steps)
    for answer in answers:
        statement = operation.steps.send(answer)
    return statement


def check(plan: Plan, limits: dict[str, int]) -> None:
    for relation, most in limits.items():
        assert plan.kinds(relation) <= DIRECT, plan
        assert plan.visited(relation) <= most, plan


def test_fold(conn: Conn, generic: bool) -> None:
    plan = explain(conn, first_statement(fold([WAITING, FINISHED, 17])), generic=generic)
    assert plan.rows == 3
    check(plan, {"batch": 12, "batch_delta": 10})
    assert plan.buffers < 200, plan


def test_settling_members(conn: Conn, generic: bool) -> None:
    found = run(conn, claim(domain="backlog", worker="w", n=200, lease_seconds=60, cursor=None))
    outcomes = []
    for row in found.ready:
        attempt = Attempt("backlog", row, None, 0.0)
        attempt.started = 1.0
        outcomes.append(attempt.complete(None))
    plan = explain(conn, first_statement(settle("backlog", "w", outcomes)), generic=generic)
    check(plan, {"command": 200, "q_backlog__commands": 600})
    assert plan.visited("process") == 0


def test_leftovers(conn: Conn, generic: bool) -> None:
    plan = explain(conn, first_statement(leftovers(100)), generic=generic)
    assert plan.rows == 100
    check(plan, {"batch": 0})
    assert plan.visited("batch_delta") <= 3000


@pytest.mark.parametrize("statistics", ["known"], indirect=True)
def test_looking_at_one(conn: Conn, generic: bool) -> None:
    plan = explain(conn, first_statement(batch_look.get("backlog", "waiting")), generic=False)
    assert plan.rows == 1
    check(plan, {"batch": 2, "batch_delta": 5})
    run(conn, claim(domain="backlog", worker="w", n=50, lease_seconds=60, cursor=None))
    row = (0,) * 17 + (None,) * 5
    running = statements(batch_look.get("backlog", "waiting"), [row])
    plan = explain(conn, running, generic=generic)
    assert plan.rows == 1
    check(plan, {"command": 50, "q_backlog__commands": 60})


@pytest.mark.parametrize("statistics", ["known"], indirect=True)
def test_a_page_of_batches(conn: Conn) -> None:
    operation = batch_look.query(domain=None, status="COMPLETED", limit=50, cursor="4000")
    plan = explain(conn, statements(operation, []), generic=False)
    assert plan.rows == 51
    check(plan, {"batch": 60, "batch_delta": 100})


@pytest.mark.parametrize("statistics", ["known"], indirect=True)
@pytest.mark.parametrize(("domain", "batch_id"), [("backlog", "waiting"), ("history", "finished")])
def test_a_page_of_members(conn: Conn, domain: str, batch_id: str) -> None:
    query = CommandQuery(domain=domain, batch_id=batch_id)
    known = {"waiting": WAITING, "finished": FINISHED}[batch_id]
    statement = statements(query_commands(query, limit=50), [(known,)])
    plan = explain(conn, statement, generic=False)
    assert plan.rows == 51
    check(plan, {"command": 51, "batch": 51})
    assert plan.buffers < 600, plan


def test_a_bite_of_a_cancellation(conn: Conn, generic: bool) -> None:
    canceling = Canceling(WAITING, "backlog", "commands", operate.operator_action("ann", action="CANCEL"))
    bite = cancel_bite(canceling, after_id=0, is_sweep=False)
    seen = statements(bite, [(None,)])
    plan = explain(conn, seen, generic=generic)
    assert plan.rows == 1000
    check(plan, {"command": 1000})
    ids = [row[0] for row in conn.execute(seen.sql, seen.params).fetchall()]
    statement = bite.steps.send([(id_, "PENDING") for id_ in ids])
    plan = explain(conn, statement, generic=generic)
    assert plan.rows == 1000
    check(plan, {"command": 2000, "q_backlog__commands": 4000})


def test_what_retention_looks_at(conn: Conn, generic: bool) -> None:
    statement = first_statement(prune_groups("batches/prune_batches", Retention(86400.0)))
    seen = visits(conn, statement, generic=generic)
    assert seen.scanned("command") + seen.fetched("command") <= 1000, seen
    assert seen.scanned("batch") + seen.fetched("batch") <= 20_000, seen
