"""command_id is an idempotency key: the unique constraint decides, also among fifty senders at once."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, at_once, one, queue_length, sync_only

from commandbus import (
    AsyncCommandBus,
    CommandBus,
    CommandStatus,
    DuplicateCommandError,
    NewCommand,
    SentCommand,
    load_settings,
)

FULL: dict[str, Any] = {
    "command_type": "Ship",
    "data": {"a": 1, "b": [1, 2]},
    "correlation_id": "c",
    "reply_to": "answers",
    "max_attempts": 3,
    "timeout": "2m",
    "headers": {"x": 1, "y": 2},
}
OTHERS: list[tuple[str, Any]] = [
    ("command_type", "Shop"),
    ("data", {"a": 1, "b": [2, 1]}),
    ("data", {"a": True, "b": [1, 2]}),
    ("data", {"a": 1.0, "b": [1, 2]}),
    ("data", {"a": "1", "b": [1, 2]}),
    ("data", None),
    ("correlation_id", "d"),
    ("correlation_id", None),
    ("reply_to", "others"),
    ("reply_to", None),
    ("max_attempts", 4),
    ("max_attempts", None),
    ("timeout", 121),
    ("timeout", 0),
    ("timeout", None),
    ("headers", {"x": 1}),
    ("headers", {"x": 1, "y": False}),
    ("headers", None),
]


def test_the_same_content_is_the_same_command(orders: Bus, db: psycopg.Connection[Any]) -> None:
    first = orders.send("orders", command_id="k", **FULL)
    reordered = {**FULL, "data": {"b": [1, 2], "a": 1}, "headers": {"y": 2, "x": 1}}
    for again in (FULL, reordered, {**FULL, "delay": 60}, {**FULL, "timeout": timedelta(minutes=2)}):
        second = orders.send("orders", command_id="k", **again)
        assert (second.id, second.command_id, second.created) == (first.id, "k", False)
        (third,) = orders.send_many("orders", [{**again, "command_id": "k"}])
        assert (third.id, third.created) == (first.id, False)
    assert queue_length(db) == 1
    assert one(db, "SELECT count(*) FROM commandbus.command") == 1
    assert orders.claim_one().command_id == "k"


def test_every_differing_field_is_named(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", command_id="k", **FULL)
    for field, value in OTHERS:
        other = {**FULL, field: value}
        said = rf"'k' already exists .* other content \({field}\);"
        with pytest.raises(DuplicateCommandError, match=said) as caught:
            orders.send("orders", command_id="k", **other)
        assert (caught.value.domain, caught.value.command_id, caught.value.difference) == ("orders", "k", field)
        with pytest.raises(DuplicateCommandError, match=rf"other content \({field}\);"):
            orders.send_many("orders", [NewCommand("Ship"), {**other, "command_id": "k"}])
    assert queue_length(db) == 1


def test_a_settled_command_is_found_and_not_run_again(orders: Bus, db: psycopg.Connection[Any]) -> None:
    first = orders.send("orders", command_id="k", **FULL | {"reply_to": None})
    attempt = orders.claim_one()
    assert orders.settle(attempt.complete('"done"')) == {}
    again = orders.send("orders", command_id="k", **FULL | {"reply_to": None})
    assert (again.id, again.created) == (first.id, False)
    assert queue_length(db) == 0
    assert orders.get_command("orders", "k").status is CommandStatus.COMPLETED


def test_one_id_in_two_domains_is_two_commands(orders: Bus) -> None:
    orders.create_domain("billing")
    first = orders.send("orders", "Ship", command_id="k")
    second = orders.send("billing", "Ship", command_id="k")
    assert first.id != second.id
    assert first.created
    assert second.created


SENDERS = 50


def _send_at_once(database: str, driver: str, contents: list[Any]) -> list[Any]:
    """All of them send one id; threads of one bus, or tasks of one."""
    settings = load_settings({"database_url": database, "pool_max_size": SENDERS, "pool_min_size": 4})
    if driver == "sync":
        with CommandBus(settings=settings) as bus:
            bus.list_domains()
            return at_once(
                [lambda data=data: bus.send("orders", "Ship", data, command_id="k") for data in contents]
            )

    async def gather() -> list[Any]:
        async with AsyncCommandBus(settings=settings) as bus:
            sends = [bus.send("orders", "Ship", data, command_id="k") for data in contents]
            return list(await asyncio.gather(*sends, return_exceptions=True))

    return asyncio.run(gather())


def test_fifty_senders_of_the_same_get_one_command(orders: Bus, db: psycopg.Connection[Any]) -> None:
    answers = _send_at_once(orders.url, orders.driver, [{"n": 1}] * SENDERS)
    assert all(isinstance(answer, SentCommand) for answer in answers), answers
    assert len({answer.id for answer in answers}) == 1
    assert sum(answer.created for answer in answers) == 1
    assert queue_length(db) == 1
    assert one(db, "SELECT count(*) FROM commandbus.command") == 1
    assert one(db, "SELECT (message ->> 'command')::bigint FROM pgmq.q_orders__commands") == answers[0].id


def test_of_fifty_senders_of_different_content_one_wins(orders: Bus, db: psycopg.Connection[Any]) -> None:
    answers = _send_at_once(orders.url, orders.driver, [{"n": n} for n in range(SENDERS)])
    winners = [(n, answer) for n, answer in enumerate(answers) if isinstance(answer, SentCommand)]
    losers = [answer for answer in answers if isinstance(answer, DuplicateCommandError)]
    assert (len(winners), len(losers)) == (1, SENDERS - 1)
    ((n, winner),) = winners
    assert winner.created
    assert orders.get_command("orders", "k").data == {"n": n}
    assert queue_length(db) == 1
    assert all(error.difference == "data" for error in losers)


@sync_only
def test_a_sender_waits_for_an_open_transaction_with_its_id(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """Rolled back: the second inserts. Committed: it finds the first."""
    from concurrent.futures import ThreadPoolExecutor

    from flow_harness import wait_until_blocked

    with ThreadPoolExecutor(1) as threads:
        for number, (end, created) in enumerate((("rollback", True), ("commit", False))):
            with psycopg.connect(orders.url) as conn:
                orders.send("orders", "Ship", 1, command_id=f"k{number}", conn=conn)
                second = threads.submit(orders.send, "orders", "Ship", 1, command_id=f"k{number}")
                wait_until_blocked(db)
                getattr(conn, end)()
                assert second.result(30).created is created
    assert queue_length(db) == 2


@sync_only
def test_many_senders_of_overlapping_chunks(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """In opposite orders too: nobody gets an error, everything is there once."""
    ids = [f"k{n:04}" for n in range(1000)]
    chunks = [ids, ids[::-1], ids[500:] + ids[:500], ids[::-1]]

    def sender(chunk: list[str]) -> Any:
        with CommandBus(orders.url) as bus:
            return bus.send_many("orders", [NewCommand("Ship", command_id=name) for name in chunk])

    answers: list[Any] = at_once([lambda chunk=chunk: sender(chunk) for chunk in chunks])
    assert all(isinstance(answer, list) for answer in answers), answers
    assert sum(command.created for answer in answers for command in answer) == 1000
    assert queue_length(db) == 1000
    for chunk, answer in zip(chunks, answers, strict=True):
        assert [command.command_id for command in answer] == chunk
