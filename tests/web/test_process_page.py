"""A process as a graph: steps, compensations, what it waits for, and what a cancel would undo."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from commandbus import (
    BusinessRuleException,
    CommandBus,
    HandlerRegistry,
    Saga,
    Worker,
    parallel,
    sleep,
    step,
    wait_for,
)
from commandbus.model.process_graph import MOST_NODES, process_graph
from commandbus.web.charts import drawn_process
from support.waiting import until
from support.workers import quick_settings
from web.conftest import Serve

HOSTILE = '"><script>'


def run(database: str, saga: Saga, *failing: str) -> None:
    handlers = HandlerRegistry()

    def work(command: Any, ctx: Any) -> None:
        if command.command_type in failing:
            raise BusinessRuleException("no")

    for name in ("reserve", "release", "charge", "refund", "pack", "ship"):
        handlers.register("orders", name, work)
    handlers.register_process(saga)
    Worker(handlers, settings=quick_settings(database)).run(until_idle=True)


@pytest.fixture
def waiting(bus: CommandBus, database: str) -> None:
    """A process that has reserved, charged and packed, and waits for a signal."""
    bus.create_domain("processes")
    saga = Saga(
        "order",
        step("reserve", "orders", undo="release"),
        parallel(step("charge", "orders", undo="refund"), step("pack", "orders")),
        wait_for("approved"),
        step("ship", "orders"),
    )
    bus.start_process(saga, {}, process_id=HOSTILE)
    run(database, saga)
    until(lambda: bus.get_process("processes", HOSTILE).waits_for)  # type: ignore[union-attr]


def test_a_graph_of_what_was_done_and_what_is_waited_for(bus: CommandBus, waiting: None, serve: Serve) -> None:
    record = bus.get_process("processes", HOSTILE)
    assert record is not None
    graph = process_graph(record)
    places = {node.name: (node.column, node.row) for node in graph.nodes}
    assert places["reserve"] == (0, 0)
    assert {places["charge"], places["pack"]} == {(1, 0), (1, 1)}
    assert places["approved"] == (2, 0)
    names = {node.number: node.name for node in graph.nodes}
    asked = {names[edge.end]: edge.waits_for for edge in graph.edges if edge.waits_for}
    assert asked == {"approved": "the signal approved"}
    assert (graph.would_undo, graph.may_undo, graph.stays_done) == (["charge", "reserve"], [], ["pack"])
    drawn = drawn_process(graph)
    assert all(0 <= box.x < drawn.width and 0 <= box.y < drawn.height for box in drawn.nodes)
    visit = serve()
    page = visit.get("/process", domain="processes", id=HOSTILE).text
    assert "the signal approved" in page
    assert "Cancel will undo: charge, reserve. These have no undo, and stay done: pack." in page
    assert page.count('class="node ') == 4
    assert page.count(">waits for</text>") == 1, "of two edges to one step, one says it"
    assert HOSTILE not in page
    document = visit.get("/api/process/graph", domain="processes", id=HOSTILE).json
    assert document["would_undo"] == graph.would_undo
    assert visit.get("/api/process/graph", domain="processes", id="nosuch").status == 404


def test_a_cancel_promises_no_undo_that_there_is_not(bus: CommandBus, database: str, serve: Serve) -> None:
    bus.create_domain("processes")
    saga = Saga("approved", step("ship", "orders"), wait_for("approval"))
    bus.start_process(saga, {}, process_id="p")
    run(database, saga)
    visit = serve()
    page = visit.get("/process", domain="processes", id="p").text
    assert "These have no undo, and stay done: ship. Cancel will undo nothing." in page
    with psycopg.connect(database) as db:  # as an older program writes it, or one that decides late
        db.execute("UPDATE commandbus.process_step SET has_undo = NULL")
    page = visit.get("/process", domain="processes", id="p").text
    assert "Cancel will undo, if their program has an undo: ship." in page
    graph = visit.get("/api/process/graph", domain="processes", id="p").json
    assert (graph["would_undo"], graph["may_undo"], graph["stays_done"]) == ([], ["ship"], [])


def test_moments_are_shown_in_the_zone_of_the_viewer(bus: CommandBus, database: str, serve: Serve) -> None:
    bus.create_domain("processes")
    saga = Saga("nap", parallel(wait_for("approved", deadline="1h"), sleep("2d")))
    bus.start_process(saga, {}, process_id="p")
    run(database, saga)
    record = bus.get_process("processes", "p")
    assert record is not None
    signal, nap = record.steps
    assert nap.deadline_at is not None
    assert record.waits_for_moments == [signal.sent_at, signal.deadline_at, nap.deadline_at]
    assert record.waits_for_kinds == ["signal", "sleep"]
    visit = serve()
    times = [f'<time datetime="{moment.isoformat()}">' for moment in record.waits_for_moments]
    for page in (visit.get("/process", domain="processes", id="p").text, visit.get("/processes").text):
        assert all(time in page for time in times)
        assert "waiting for signal, sleep" in page
        assert "waiting for reply" not in page
    drawn = f'data-moment="{nap.deadline_at.isoformat()}">'
    assert drawn in visit.get("/process", domain="processes", id="p").text


def test_compensations_stand_below_what_they_undo(bus: CommandBus, database: str, serve: Serve) -> None:
    bus.create_domain("processes")
    saga = Saga(
        "order",
        step("reserve", "orders", undo="release"),
        step("charge", "orders", undo="refund"),
        step("ship", "orders"),
    )
    bus.start_process(saga, {}, process_id="p")
    run(database, saga, "ship")
    record = bus.get_process("processes", "p")
    assert record is not None
    graph = process_graph(record)
    undone = {node.undoes: (node.column, node.row) for node in graph.nodes if node.undoes is not None}
    forward = {node.number: (node.column, node.row) for node in graph.nodes if node.undoes is None}
    assert len(undone) == 2
    for number, (column, row) in undone.items():
        assert number is not None
        assert (column, row) == (forward[number][0], forward[number][1] + 1)
    assert sum(edge.is_undo for edge in graph.edges) == 2
    assert graph.would_undo == [], "it has ended"
    page = serve().get("/process", domain="processes", id="p").text
    assert page.count("node-undo") == 2
    assert "Cancel will undo" not in page


def test_a_long_process_has_a_bounded_graph(bus: CommandBus, waiting: None) -> None:
    record = bus.get_process("processes", HOSTILE)
    assert record is not None
    first = record.steps[0]
    more = [replace(first, number=n, sent_at=first.sent_at + timedelta(seconds=n)) for n in range(100, 400)]
    graph = process_graph(replace(record, steps=[*record.steps, *more]))
    assert len(graph.nodes) == MOST_NODES
    assert graph.left_out == len(more) + len(record.steps) - MOST_NODES
    assert graph.columns == MOST_NODES
