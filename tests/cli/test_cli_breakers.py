"""`commandbus breakers`: the list, and what people decide; and what `show` says of a parked command."""

from __future__ import annotations

import psycopg
import pytest

from commandbus.cli.exit_codes import ExitCode
from commandbus.flow.breakers.breaker import Bad, report
from commandbus.flow.commands.claim import claim, put_right
from commandbus.model.breaker import Breaker


def park(bus):
    """What a worker does with commands whose breaker is open."""
    found = bus.run(claim(domain="orders", worker="w", n=10, lease_seconds=30, cursor=None))
    assert not found.ready
    bus.run(put_right(domain="orders", worker="w", odd=found.odd, max_bytes=1000))


@pytest.fixture
def broken(orders, bus):
    """`orders` with an open breaker of `ship`, and a command that waits for it."""
    bus.send("orders", "ship", command_id="s1")
    bad = [Bad(n, True, "ExecutionStuck: \x1b[31mhangs") for n in (1, 2)]
    bus.run(report("orders", "ship", Breaker(stuck=2), bad=bad))
    park(bus)
    return orders


def test_nothing_has_been_counted(orders):
    assert orders("breakers").out == "no breaker has counted anything, and there are no limits\n"
    assert orders("breakers", "--json").document == []


def test_the_list(broken):
    answer = broken("breakers")
    assert answer.code == ExitCode.OK
    head, line = answer.out.splitlines()
    assert head.split() == ["OF", "NAME", "STATE", "UNTIL", "STUCK", "FAILURES", "OTHERS", "PARKED", "REASON"]
    assert line.startswith("type  orders/ship  open   ")
    assert "2 of 2 attempts stuck since " in line
    assert "(2 commands), the last: ExecutionStuck: " in line
    assert "\x1b" not in line
    (document,) = broken("breakers", "--json").document
    assert document.pop("opened_at") < document.pop("until")
    assert document.pop("reason").endswith(" UTC (2 commands), the last: ExecutionStuck: \x1b[31mhangs")
    assert document == {
        "kind": "type", "name": "orders/ship", "state": "OPEN", "probe": None, "stuck": 2, "failures": 0,
        "others": 0, "parked": 1, "is_forced": False,
    }  # fmt: skip


def test_show_and_commands_say_why_a_command_waits_and_until_when(broken, bus):
    shown = broken("show", "orders", "s1").out
    assert "waits for" in shown
    assert "(in about " in shown
    assert ": breaker open: 2 of 2 attempts stuck since " in shown
    assert "PARKED" in shown
    assert "parked until " in broken("commands").out
    document = broken("show", "orders", "s1", "--json").document
    assert document["waiting_for"] == "breaker"
    assert document["waiting_until"] is not None
    assert document["waiting_note"].startswith("breaker open: 2 of 2 attempts stuck")


def test_close_open_and_reset(broken, bus):
    assert broken("breakers", "close", "orders", "ship", "--operator", "ann").out == (
        "the breaker of orders/ship is closed; 1 parked command went back to the queue\n"
    )
    opened = broken("breakers", "open", "orders", "ship", "--operator", "ann", "--reason", "carrier is down")
    assert opened.out == "the breaker of orders/ship is open, until somebody closes it\n"
    assert broken("breakers", "open", "orders", "ship", "--json").document == {
        "breaker": "orders/ship", "state": "OPEN", "changed": False, "warning": None,
    }  # fmt: skip
    park(bus)
    assert "somebody closes it" in broken("breakers").out
    assert "breaker opened by ann: carrier is down" in broken("show", "s1").out
    assert broken("breakers", "reset", "orders", "ship", "--json").document == {
        "breaker": "orders/ship", "state": "CLOSED", "released": 1,
    }  # fmt: skip
    (info,) = bus.breakers()
    assert (info.state, info.stuck) == ("CLOSED", 0)


def test_the_breaker_of_a_limit(orders, database):
    with psycopg.connect(database, autocommit=True) as db:
        db.execute(
            "INSERT INTO commandbus.limits (name, environment, store, concurrency, lease, tries, backoff, "
            "breaker_failures, breaker_reset) VALUES ('docai', 'test', 'postgres', 5, 120, 4, '{2,4}', 3, 60)"
        )
    assert orders("breakers").out.splitlines()[1].split() == ["limit", "docai", "closed", "0", "0", "0"]
    assert orders("breakers", "open", "--limit", "docai", "--operator", "ann").code == ExitCode.OK
    assert "by ann" in orders("breakers").out
    closed = orders("breakers", "close", "--limit", "docai").out
    assert closed == "the breaker of limit docai is closed; 0 commands waited for the limit\n"
    reset = orders("breakers", "reset", "--limit", "docai").out
    assert reset.startswith("the breaker of limit docai is closed, and its counts are cleared")
    unknown = orders("breakers", "close", "--limit", "nobody")
    assert unknown.code == ExitCode.NOT_FOUND
    assert "unknown limit 'nobody' (known: docai)" in unknown.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["open", "orders"], ExitCode.USAGE, "give DOMAIN TYPE, or --limit NAME"),
        (["open", "orders", "ship", "--limit", "docai"], ExitCode.USAGE, "not both"),
        (["close", "orders", "ship"], ExitCode.REFUSED, "has counted nothing and was never opened"),
        (["open", "nowhere", "ship"], ExitCode.NOT_FOUND, "nowhere"),
    ],
)
def test_what_makes_no_sense(orders, words, code, said):
    answer = orders("breakers", *words)
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err
