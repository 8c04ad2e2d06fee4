"""Commands that wait for a worker that handles their type, as status, show, workers and doctor tell it."""

from __future__ import annotations

import psycopg
import pytest

from commandbus import HandlerRegistry, Worker
from support.waiting import until
from support.workers import quick_settings


def _registry(*types):
    registry = HandlerRegistry()
    for name in types:
        registry.register("orders", name, lambda ctx: None)
    return registry


@pytest.fixture
def waiting(orders, bus, database):
    """Two commands of a type that the running worker does not know."""
    for command_id in ("s1", "s2"):
        bus.send("orders", "ship", command_id=command_id)
    with Worker(_registry("pack"), settings=quick_settings(database), name="old"):
        until(lambda: bus.status("orders")[0].parked == 2)
        yield orders


def test_status_and_show_say_that_nobody_handles_it(waiting):
    told = "2 commands of orders/ship wait for a worker that handles that type (the first for "
    status = waiting("status", "orders").out.splitlines()[-1]
    assert status.startswith(told)
    assert status.endswith("); no running worker does")
    (item,) = waiting("status", "--json").document[0]["unhandled"]
    assert (item["command_type"], item["waiting"], item["workers"]) == ("ship", 2, 0)
    note = "no running worker handles orders/ship; after 1h without one it goes to the troubleshooting queue"
    assert note in " ".join(waiting("show", "s1").out.split())
    shown = waiting("show", "s1", "--json").document
    assert (shown["waiting_for"], shown["waiting_note"]) == ("handler", note)
    assert "NO_HANDLER" in waiting("show", "s1").out


def test_doctor_warns_until_somebody_does(waiting, bus, database):
    def warned():
        found = [item for item in waiting("doctor", "--json").document if item["check"] == "command types"]
        return [(item["level"], item["message"], item["remedy"]) for item in found]

    ((level, message, remedy),) = warned()
    assert level == "WARN"
    assert message.startswith("2 commands of orders/ship wait for a worker that handles that type")
    assert remedy == "start workers whose registry has a handler for orders/ship, or cancel these commands"
    with Worker(_registry("ship"), settings=quick_settings(database), name="new"):
        until(lambda: all(bus.get_command("orders", name).status == "COMPLETED" for name in ("s1", "s2")))
    assert warned() == []


def test_doctor_warns_if_those_who_handle_it_have_no_time(waiting, bus, database):
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("UPDATE commandbus.worker SET types = types || '{orders/ship}'")  # until its next heartbeat
        db.execute("UPDATE commandbus.parked SET parked_at = now() - interval '2 minutes'")
        item = bus.status("orders")[0].unhandled[0]
        found = [item for item in waiting("doctor", "--json").document if item["check"] == "command types"]
        assert item.workers == 1
    assert "these workers have no free slot for it" in found[0]["remedy"]


def test_workers_tell_which_types_they_know(waiting):
    (worker,) = waiting("workers", "--json").document
    assert worker["types"] == ["orders/pack"]
