"""When a connection of ours makes the server plan its statements anew. That it helps: tests/plans."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus
from commandbus.db.drivers import DROP_PLANS, PLAN_SECONDS, OwnAsyncConnection, OwnConnection, run, run_async
from commandbus.flow.commands.claim import announce, claim, next_due, withdraw
from commandbus.flow.operation import Operation, Statement, Steps

LOOK = Statement(b"SELECT count(*) FROM pg_class WHERE oid = %(oid)s", {"oid": 1})
INSERT = LOOK._replace(only_inserts=True)


class Recorder(psycopg.Cursor[Any]):
    """Remembers what was run."""

    said: list[bytes]

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        self.said.append(query)
        return super().execute(query, *args, **kwargs)


class AsyncRecorder(psycopg.AsyncCursor[Any]):
    """The same."""

    said: list[bytes]

    async def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        self.said.append(query)
        return await super().execute(query, *args, **kwargs)


@pytest.fixture
def said() -> list[bytes]:
    Recorder.said = AsyncRecorder.said = []
    return Recorder.said


@pytest.fixture
def conn(database: str, said: list[bytes]) -> Iterator[OwnConnection]:
    with OwnConnection.connect(database, autocommit=True, prepare_threshold=2, cursor_factory=Recorder) as conn:
        yield conn


def operation(*statements: Statement) -> Operation[None]:
    def steps() -> Steps[None]:
        for statement in statements:  # noqa: UP028 - the driver sends rows in
            yield statement

    return Operation(steps(), atomic=False)


def test_plans_are_dropped_once_they_are_old(conn: OwnConnection, said: list[bytes]) -> None:
    run(conn, operation(LOOK, LOOK))
    run(conn, operation(LOOK))
    assert said == [DROP_PLANS, LOOK.sql, LOOK.sql, LOOK.sql]
    conn.planned_at -= PLAN_SECONDS
    run(conn, operation(LOOK, LOOK))
    assert said[4:] == [DROP_PLANS, LOOK.sql, LOOK.sql]


def test_plans_of_an_async_connection(database: str, said: list[bytes]) -> None:
    async def use() -> None:
        async with await OwnAsyncConnection.connect(
            database, autocommit=True, prepare_threshold=2, cursor_factory=AsyncRecorder
        ) as conn:
            await run_async(conn, operation(LOOK, LOOK))
            conn.planned_at -= PLAN_SECONDS
            await run_async(conn, operation(LOOK))

    asyncio.run(use())
    assert said == [DROP_PLANS, LOOK.sql, LOOK.sql, DROP_PLANS, LOOK.sql]


def test_a_send_does_not_pay_for_it(conn: OwnConnection, said: list[bytes]) -> None:
    run(conn, operation(INSERT))
    assert said == [INSERT.sql]


def test_a_claimer_that_becomes_idle_keeps_the_plan_of_its_claim(
    database: str, conn: OwnConnection, said: list[bytes]
) -> None:
    with CommandBus(database) as bus:
        bus.create_domain("orders")
    conn.goes_by_keys = True
    for _ in range(3):
        run(conn, claim(domain="orders", worker="w", n=1, lease_seconds=30, cursor=None))
        run(conn, announce(worker="w", domains=["orders"], seconds=60))
        run(conn, next_due("orders", within_seconds=1))
        run(conn, withdraw("w"))
    assert len(said) == 12
    assert DROP_PLANS not in said


def test_without_prepared_statements_there_is_nothing_to_drop(conn: OwnConnection, said: list[bytes]) -> None:
    conn.prepare_threshold = None
    run(conn, operation(LOOK))
    assert said == [LOOK.sql]


def test_a_failed_transaction_can_still_be_rolled_back(conn: OwnConnection, said: list[bytes]) -> None:
    def steps() -> Steps[None]:
        yield Statement(b"SAVEPOINT before")
        with pytest.raises(psycopg.errors.DivisionByZero):
            yield Statement(b"SELECT 1 / 0")
        conn.planned_at -= PLAN_SECONDS
        yield Statement(b"ROLLBACK TO SAVEPOINT before")
        yield LOOK

    run(conn, Operation(steps(), atomic=True))
    assert said[-3:] == [b"ROLLBACK TO SAVEPOINT before", DROP_PLANS, LOOK.sql]
