"""Processes with megabytes of state and data, and with thousands of steps: lists and pages stay small."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, Saga, Worker, step
from web.conftest import Serve

LONG = "x" * 600_000
SHIPPED = Saga("shipped", step("ship", "orders"))


@pytest.fixture
def many(bus: CommandBus, database: str) -> None:
    """Thirty processes with a megabyte each; the first has 1,200 steps, and a signal with a long text."""
    handlers = HandlerRegistry()
    handlers.register_process(SHIPPED)

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> None:
        return None

    bus.create_domain("processes")
    for number in range(30):
        bus.start_process(SHIPPED, {"text": LONG}, process_id=f"p-{number:02}")
    Worker(handlers, database_url=database).run(until_idle=True)
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("UPDATE commandbus.process SET state = %s", [json.dumps({"text": LONG})])
        db.execute(
            "INSERT INTO commandbus.process_step "
            "(process, number, name, status, command, domain, command_id, command_type, finished_at, result, "
            "error) "
            "SELECT id, n, 'more', 'FAILED', 0, 'orders', 'c' || n, 'ship', now(), %s, %s "
            "FROM commandbus.process, generate_series(100, 1299) n WHERE process_id = 'p-00'",
            [json.dumps("y" * 2_000), json.dumps({"type": "Error", "message": "z" * 5_000})],
        )


def test_lists_have_no_state_and_one_process_is_bounded(bus: CommandBus, many: None, serve: Serve) -> None:
    visit = serve()
    listed = visit.get("/api/processes", limit=200)
    assert len(listed.json["items"]) == 30
    assert len(listed.text) < 30_000
    assert not {"state", "data"} & listed.json["items"][0].keys()
    assert LONG[:100] not in visit.get("/processes").text
    one = visit.get("/api/process", domain="processes", id="p-00")
    assert one.status == 200
    assert len(one.text) < 500_000
    assert (one.json["state"], len(one.json["steps"])) == (None, 500)
    assert one.json["left_out"].keys() == {"data", "state", "steps"}
    assert one.json["left_out"]["state"] > len(LONG)
    assert one.json["steps"][-1]["error"]["message"] == "its command has it"
    page = visit.get("/process", domain="processes", id="p-00").text
    assert "too many for a page" in page
    assert "steps are left out" in page
    assert len(page) < 500_000
    whole = bus.get_process("processes", "p-00")
    assert whole is not None
    assert whole.state == {"text": LONG}
    assert len(whole.steps) > 1_200
    assert whole.left_out == {}
    assert [step.number for step in whole.steps] == sorted(step.number for step in whole.steps)


def test_what_is_short_is_shown(bus: CommandBus, serve: Serve) -> None:
    bus.create_domain("processes")
    bus.start_process(SHIPPED, {"order": 17}, process_id="p")
    (item,) = bus.processes.summaries("processes")
    assert (item.process_id, item.waits_for) == ("p", "a worker of domain 'processes' to handle its next message")
    record = bus.processes.view("processes", "p")
    assert record is not None
    assert (record.data, record.left_out) == ({"order": 17}, {})
    assert bus.processes.view("processes", "nobody") is None
