"""The plans of unparking: of very many parked commands each bite reads its own rows, and the sweep reads a few."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from plan_reading import explain, first_statement

from commandbus.flow.breakers.breaker import Row, _probe
from commandbus.flow.commands.unpark import BITE, Parked, left_parked, wake_some
from commandbus.flow.operation import Operation

pytestmark = [pytest.mark.slow, pytest.mark.plans, pytest.mark.shared_setup("crowded")]
Conn = psycopg.Connection[Any]
DIRECT = {"Index Scan", "Index Only Scan", "Bitmap Heap Scan", "Tid Scan"}
WORK = Parked("breaker", "delayed", "work")
WAIT = "UPDATE pgmq.q_delayed__commands SET vt = now() + %s::interval WHERE msg_id <= 5000"


@pytest.fixture(scope="module")
def parked(crowded: str, statistics: str) -> Iterator[None]:
    """Of `delayed` 20,000 commands are parked, and 5,000 of their messages wait for years.

    Nobody has analyzed them: what is known is that the rows which were parked before are gone.
    """
    with psycopg.connect(crowded, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason) "
            "SELECT 'delayed', 'work', msg_id, id, 'breaker' "
            "FROM commandbus.command WHERE domain = 'delayed' ORDER BY id LIMIT 20000"
        )
        conn.execute(WAIT, ("10 years",))
        yield
        # Not DELETE: the crowd's onlooker would keep 20,000 dead rows, and other tests would walk over them.
        conn.execute("TRUNCATE commandbus.parked")
        conn.execute(WAIT, ("1 day",))


@pytest.fixture
def conn(parked: None, conn: Conn) -> Conn:
    return conn


@pytest.mark.parametrize("is_first", [True, False])
def test_a_bite(conn: Conn, generic: bool, is_first: bool) -> None:
    row = conn.execute("SELECT seq FROM commandbus.parked ORDER BY seq OFFSET 2000 LIMIT 1").fetchone()
    assert row is not None
    plan = explain(conn, first_statement(wake_some(WORK, 0 if is_first else row[0])), generic=generic)
    for relation in ("q_delayed__commands", "parked"):
        assert plan.kinds(relation) <= DIRECT, plan
        assert plan.visited(relation) <= 5 * BITE, plan
    assert plan.most_buffers <= 60 * BITE, "it was a thousand for each row, where dead rows had been analyzed"


def test_what_is_left_is_found_without_reading_it(conn: Conn, generic: bool) -> None:
    plan = explain(conn, first_statement(left_parked(["delayed", "backlog"])), generic=generic)
    assert plan.rows == 1
    assert plan.kinds("parked") <= DIRECT, plan
    assert plan.visited("parked") <= 10, plan


@pytest.mark.parametrize("vain", [0, 50])
def test_the_next_probe(conn: Conn, generic: bool, vain: int) -> None:
    rows = conn.execute("SELECT command FROM commandbus.parked ORDER BY seq LIMIT %s", (vain,)).fetchall()
    now = datetime.now(UTC)
    row = Row(
        "delayed",
        "work",
        "OPEN",
        [],
        False,
        now,
        now,
        None,
        None,
        None,
        [command for (command,) in rows],
        60.0,
        now,
    )
    plan = explain(conn, first_statement(Operation(_probe(row), atomic=False)), generic=generic)
    assert plan.rows == 1
    for relation in ("q_delayed__commands", "parked"):
        assert plan.kinds(relation) <= DIRECT, plan
        assert plan.visited(relation) <= 10 + 2 * vain, plan
