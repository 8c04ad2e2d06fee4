"""Sends without a cursor: from the third on, a plain send is a prepared statement of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, queue_length

from commandbus import InvalidOperationError, UnknownDomainError, sql
from commandbus.db import quick_statements
from commandbus.flow.operation import Operation, Statement, Steps, operation
from commandbus.settings import Settings

Db = psycopg.Connection[Any]
USES = quick_statements.USES_BEFORE + 3


@pytest.fixture
def bus(connect: Callable[..., Bus], database: str) -> Bus:
    """With one connection. On a busy machine a pool that waits for its first one opens another."""
    made = connect(None, settings=Settings(database_url=database, pool_max_size=1))
    made.url = database
    return made


def _prepared(bus: Bus) -> list[str]:
    """The domains for which the session of a bus with one connection has prepared a send itself."""

    def steps() -> Steps[list[str]]:
        rows = yield Statement(
            b"SELECT substring(statement FROM 'INSERT INTO pgmq.q_(\\w+)__commands') "
            b"FROM pg_prepared_statements WHERE name ~ '^commandbus_[0-9a-f]{32}$' ORDER BY 1"
        )
        return [domain for (domain,) in rows]

    found: list[str] = bus.run(Operation(steps(), atomic=False))
    return found


def test_receipts_and_rows_are_the_same(orders: Bus, db: Db) -> None:
    data = {"text": "naïve ☃ \U0001f600 ' \" \\ %s $1 \\u0000"}
    sent = [orders.send("orders", "Ship it", data) for _ in range(USES)]
    assert _prepared(orders) == ["orders"]
    found = db.execute("SELECT id, command_id, data FROM commandbus.command ORDER BY id").fetchall()
    assert [(each.id, each.command_id, data) for each in sent] == found
    assert all(type(each.id) is int and each.created for each in sent)
    assert queue_length(db) == USES


def test_the_same_command_twice(orders: Bus, db: Db) -> None:
    sent = [orders.send("orders", "Ship", command_id="same") for _ in range(USES)]
    assert _prepared(orders) == ["orders"]
    assert [each.created for each in sent] == [True] + [False] * (USES - 1)
    assert len({each.id for each in sent}) == 1
    assert queue_length(db) == 1


def test_a_send_after_psycopg_has_dropped_what_was_prepared(orders: Bus, db: Db) -> None:
    """It does so after a ROLLBACK, if it has prepared something itself."""
    for _ in range(USES):
        orders.send("orders", "Ship")
        orders.get_command("orders", "nothing")
    for _ in range(USES):
        with pytest.raises(InvalidOperationError):
            orders.run(refused())
        orders.send("orders", "Ship")
        orders.get_command("orders", "nothing")
    assert queue_length(db) == 2 * USES


@operation(atomic=True)
def refused() -> Steps[None]:
    yield Statement(b"SELECT")
    raise InvalidOperationError("rolled back")


def test_a_domain_that_is_gone_is_named(orders: Bus, db: Db) -> None:
    for _ in range(USES):
        orders.send("orders", "Ship")
    db.execute("DROP TABLE pgmq.q_orders__commands CASCADE")
    for _ in range(2):
        with pytest.raises(UnknownDomainError, match="orders"):
            orders.send("orders", "Ship")


def test_a_statement_that_cannot_be_prepared_fails_each_time(orders: Bus) -> None:
    for _ in range(USES):
        with pytest.raises(UnknownDomainError, match="nowhere"):
            orders.send("nowhere", "Ship")
    assert _prepared(orders) == []
    orders.create_domain("nowhere")
    assert orders.send("nowhere", "Ship").created
    assert _prepared(orders) == ["nowhere"]


def test_the_encoding_of_the_client(connect: Callable[..., Bus], orders: Bus) -> None:
    bus = connect(f"{orders.url}{'&' if '?' in orders.url else '?'}client_encoding=latin1")
    for _ in range(USES):
        assert orders.get_command("orders", bus.send("orders", "Ship", "naïve").command_id).data == "naïve"
    assert _prepared(bus) == ["orders"]
    with pytest.raises(UnicodeEncodeError):
        bus.send("orders", "Ship", "☃")
    assert bus.send("orders", "Ship", "naïve").created


def test_a_server_that_keeps_no_prepared_statements(connect: Callable[..., Bus], orders: Bus) -> None:
    bus = connect(None, settings=Settings(database_url=orders.url, prepared_statements=False))
    for _ in range(USES):
        assert bus.send("orders", "Ship").created
    assert _prepared(bus) == []


def test_a_session_has_not_too_many(orders: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_statements, "MOST", 1)
    orders.create_domain("mail")
    for domain in ("orders", "mail"):
        for _ in range(USES):
            assert orders.send(domain, "Ship").created
    assert _prepared(orders) == ["orders"]


def test_a_terminated_session_is_an_error_once_at_most(orders: Bus, db: Db) -> None:
    """The pool notices it, or the send does; the next one has another connection, and prepares again."""
    for _ in range(USES):
        orders.send("orders", "Ship")
    db.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        "WHERE application_name = 'commandbus bus' AND datname = current_database()"
    )
    try:
        orders.send("orders", "Ship")
    except psycopg.OperationalError as error:
        assert error.sqlstate in {None, "57P01"}  # noqa: PT017 - the pool may have noticed it
    for _ in range(USES):
        assert orders.send("orders", "Ship").created
    assert _prepared(orders) == ["orders"]


def test_placeholders_are_numbered() -> None:
    text = sql.text("commands/send_plain", domain="orders", conflict="")
    numbered = quick_statements._numbered(text)
    assert text.count(b"%") == 4
    assert b"%" not in numbered
    assert numbered.index(b"$1") < numbered.index(b"$2") < numbered.index(b"$3") < numbered.index(b"$4")
