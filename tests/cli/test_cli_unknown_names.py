"""Names that nobody knows are accepted, because they may be new, and warned of, because they may be misspelt."""

from __future__ import annotations

import asyncio
import json

import psycopg
import pytest

from commandbus import AsyncCommandBus, Limit
from commandbus.flow.commands import known_types as known

WORDS = {
    "pause": ["pause", "orders", "shpi"],
    "breakers open": ["breakers", "open", "orders", "shpi"],
    "process start": ["process", "start", "shpi", "--domain", "orders"],
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_type_that_nobody_knows_is_warned_of(orders, bus, words):
    bus.send("orders", "ship")
    answer = orders(*words)
    assert answer.code == 0
    assert "warning: nobody knows" in answer.err
    assert "'shpi' of domain 'orders'" in answer.err
    assert "did you mean 'ship'?" in answer.err
    assert "warning" not in answer.out


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_document_has_the_warning(orders, bus, words):
    answer = orders(*words, "--json")
    assert answer.err == ""
    assert "nobody knows" in answer.document["warning"]
    assert "none is known yet" in answer.document["warning"]


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_type_of_which_there_are_commands_is_known(orders, bus, words):
    bus.send("orders", "shpi")
    answer = orders(*words)
    assert (answer.code, answer.err) == (0, "")
    bus.create_domain("others")
    others = ["others" if word == "orders" else word for word in words]
    assert "none is known yet" in orders(*others).err, "types are those of a domain"


def test_a_type_that_a_live_worker_handles_is_known(orders, bus, database):
    with psycopg.connect(database, autocommit=True) as db:
        db.execute(
            "INSERT INTO commandbus.worker "
            "       (id, host, pid, domains, concurrency, version, state, heartbeat_at, types) "
            "VALUES ('live', 'h', 1, '{orders}', 1, '1', 'ACTIVE', now(), '{orders/ship,orders_2/bill}'), "
            "       ('dead', 'h', 2, '{orders}', 1, '1', 'ACTIVE', now() - interval '1 hour', '{orders/pack}'), "
            "       ('old', 'h', 3, '{orders}', 1, '1', 'ACTIVE', now(), NULL)"
        )
    assert bus.run(known.doubt_type("orders", "ship")) is None
    assert "known are ship" in bus.run(known.doubt_type("orders", "pack"))
    assert bus.run(known.doubt_type("orders", "bill")) is not None


def test_many_names_are_counted(orders, bus):
    bus.send_many("orders", [{"command_type": f"task{number}"} for number in range(8)])
    doubt = bus.run(known.doubt_type("orders", "unlike"))
    assert doubt.endswith("known are task0, task1, task2, task3, task4, and 3 more")


def test_a_domain_that_is_paused_is_no_type(orders):
    answer = orders("pause", "orders", "--json")
    assert answer.document["warning"] is None


def test_a_role_that_may_not_look_is_not_warned(orders, bus, database):
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("CREATE ROLE nosy_nobody_knows")
        try:
            db.execute("GRANT USAGE ON SCHEMA commandbus TO nosy_nobody_knows")
            with psycopg.connect(database, autocommit=True) as lent:
                lent.execute("SET ROLE nosy_nobody_knows")
                assert bus.run(known.doubt_type("orders", "ship"), lent) is None
        finally:
            db.execute("DROP OWNED BY nosy_nobody_knows")
            db.execute("DROP ROLE nosy_nobody_knows")


def test_a_limit_that_nobody_declares_is_warned_of(orders, bus, database):
    bus.declare_limit(Limit("docai", concurrency=5))
    answer = orders("limits", "set", "docia", "--concurrency", "5")
    assert answer.code == 0
    assert "warning: nobody knows limit 'docia'" in answer.err
    assert "did you mean 'docai'?" in answer.err
    assert json.loads(orders("limits", "set", "docia", "--rate", "5/s", "--json").out)["warning"]
    assert orders("limits", "set", "docai", "--concurrency", "6").err == ""


def test_the_answer_of_the_bus_has_it_too(orders, bus, database):
    async def set_it():
        async with AsyncCommandBus(database) as other:
            return await other.set_limit("docia", concurrency=6)

    assert "'docia'" in bus.set_limit("docia", concurrency=5).warning
    assert "'docia'" in asyncio.run(set_it()).warning
    with bus.limit("docia"):
        pass
    assert bus.set_limit("docia", concurrency=5).warning is None, "somebody has used it"
