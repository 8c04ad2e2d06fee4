"""Now with its sparklines and slots, and the page that says where a running command is."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, HourFigures, MinuteFigures, Saga, VersionMark, Worker, step
from commandbus.web import sparkline
from commandbus.web.access import Access, Visitor
from support.waiting import until
from support.workers import quick_settings
from web.conftest import Serve

START = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
HOSTILE_ID = '<b>"1"</b>\u202e'


@pytest.fixture
def running(database: str, bus: CommandBus) -> Iterator[threading.Event]:
    """A worker with one command that hangs, given up after a while, and one that runs. The event lets them go."""
    handlers, go_on = HandlerRegistry(), threading.Event()

    @handlers.handler("orders", "hang", timeout=0.2, on_timeout="fail")
    def hang(_command: Any, _ctx: Any) -> None:
        go_on.wait()

    @handlers.handler("orders", "slow", timeout=60)
    def slow(_command: Any, _ctx: Any) -> None:
        go_on.wait()

    worker = Worker(handlers, settings=quick_settings(database, concurrency=3, cancel_grace=0.2))
    worker.start()
    go_on.worker = worker  # type: ignore[attr-defined]
    bus.send("orders", "hang", {}, command_id=HOSTILE_ID)
    bus.send("orders", "slow", {}, command_id="slow-1")
    yield go_on
    go_on.set()
    worker.stop()


def test_now_shows_every_slot_and_a_stuck_one_in_words(
    bus: CommandBus, running: threading.Event, serve: Serve
) -> None:
    visit = serve()
    first = visit.get("/").text
    assert "It was asked what its slots run." in first or "slot-running" in first

    def shown() -> str:
        text = visit.get("/").text
        return text if "▲ STUCK" in text and "slot-running" in text else ""

    text = until(shown)
    assert "hangs in worker" in text, "it needs a person, too"
    assert "orders/slow" in text
    assert "of 1m" in text, "how far into its deadline"
    assert re.search(r'aria-label="\d+% of its time"', text)
    assert text.count("slot-idle") == 2, "two of three slots: the stuck one was replaced"
    assert "<b>" not in text
    assert "\u202e" not in text
    assert "style=" not in text
    assert any("hangs in worker" in item["text"] for item in visit.get("/api/concerns").json)
    api = visit.get("/api/slots").json
    assert {slot["phase"] for slot in api[0]["slots"]} == {"STUCK", "RUNNING"}


def test_slots_are_those_that_commands_can_use(database: str, bus: CommandBus, serve: Serve) -> None:
    handlers = HandlerRegistry()
    handlers.register_process(Saga("trip", step("book", "orders")))
    handlers.register("orders", "book", lambda command, ctx: None)
    with Worker(handlers, settings=quick_settings(database, concurrency=2)):
        visit = serve()
        text = until(lambda: found if "slot-idle" in (found := visit.get("/").text) else "")
    said = re.search(r"0 of (\d+) slots", text)
    assert said is not None
    assert int(said[1]) == text.count("slot-idle") == 2, "without those for messages of processes"


def test_a_slot_for_messages_is_shown_while_it_runs_one(database: str, bus: CommandBus, serve: Serve) -> None:
    go_on = threading.Event()

    class Slow(Saga):
        def on_started(self, process: Any, tx: Any) -> None:
            go_on.wait(60)

    handlers = HandlerRegistry()
    handlers.register_process(saga := Slow("trip", step("book", "orders")))
    handlers.register("orders", "book", lambda command, ctx: None)
    with Worker(handlers, settings=quick_settings(database, concurrency=2)):
        bus.start_process(saga, {}, process_id="p")
        (shown,) = until(lambda: [item for item in bus.watch_slots() if item.slots])
        text = serve().get("/workers").text
        now = serve().get("/").text
        go_on.set()
    assert (shown.slots[0].kind, shown.size, shown.busy, shown.idle) == ("messages", 2, 0, 2)
    assert ", for processes" in text
    assert "0 of 2 slots" in now
    assert text.count("slot-idle") == 2


def test_where_a_running_command_is(bus: CommandBus, running: threading.Event, serve: Serve) -> None:
    visit = serve()
    until(lambda: bus.request_stack("orders", "slow-1").stacks)
    assert 'action="/stack"' in visit.get("/command", domain="orders", id="slow-1").text
    text = visit.get("/stack", domain="orders", id="slow-1").text
    assert "fixture running" not in text
    assert "slow</code>" in text
    assert "test_fleet_pages.py, line" in text
    found = visit.get("/api/stack", domain="orders", id="slow-1", wait=4).json
    assert any(frame["function"].endswith("slow") for frame in found["stacks"][0]["frames"])
    bus.send("orders", "slow", {}, command_id=HOSTILE_ID + "2", delay=60)
    waiting = visit.get("/stack", domain="orders", id=HOSTILE_ID + "2")
    assert "it is not running: no worker holds it now" in waiting.text
    assert "<b>" not in waiting.text
    assert visit.get("/stack", domain="orders", id="nothing").status == 404
    assert visit.get("/api/stack", domain="orders", id="slow-1", wait=99).status == 422


def test_figures_that_nobody_knows_are_no_zeros(bus: CommandBus, database: str, serve: Serve) -> None:
    visit = serve()
    text = visit.get("/").text
    assert text.count("no figures yet") == 3
    assert "no worker</span>" in text
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO commandbus.minute_figure (at, domain, settled, ready, waits) "
            "SELECT date_trunc('minute', now()) - make_interval(mins => n), 'orders', n * 10, n, "
            "       array_fill(0, ARRAY[20]) || 1::bigint FROM generate_series(1, 3) n"
        )
    text = visit.get("/").text
    assert "settled per minute in the last hour: last 10, most 30, not known for 57 of 60 minutes" in text
    assert "ready in the last hour: last 1, most 3, not known for 57 of 60 minutes" in text
    hour = visit.get("/api/hours", domain="orders").json[0]
    assert [minute["settled"] for minute in hour["minutes"][-4:]] == [None, 30, 20, 10]
    assert hour["wait_p99"] == pytest.approx(1.0, rel=0.25)


def test_workers_by_supervisor_with_health_and_post_mortems(bus: CommandBus, database: str, serve: Serve) -> None:
    odd = '<i>"\x1b[31m'
    sent = bus.send("orders", "slow", {}, command_id=HOSTILE_ID)
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO commandbus.worker (id, host, pid, supervisor, domains, types, concurrency, version, "
            "                               state, health, died_at, death) VALUES "
            "('alive', 'm1', 1, 'sup', '{orders}', '{orders/slow}', 2, '1', 'ACTIVE', %s, NULL, NULL), "
            "('lone', 'm1', 2, NULL, '{orders}', '{}', 2, '1', 'ACTIVE', NULL, NULL, NULL), "
            "('dead', 'm1', 3, 'sup', '{orders}', '{}', 2, '1', 'STOPPED', NULL, now(), %s)",
            (json.dumps({"state": "DEGRADED", "reasons": [odd]}), f"died of SIGSEGV {odd}"),
        )
        conn.execute(
            "INSERT INTO commandbus.attempt (command, number, verdict, worker, rung, error) VALUES "
            "(%s, 1, 'RETRY', 'dead', 'crash', 'it did it'), (%s, 2, 'WAIVED', 'dead', 'crash', 'only near')",
            (sent.id, sent.id),
        )
    operator, reader = Visitor("ann", "operator"), Visitor("bob", "reader")
    access = Access(tokens={"a" * 20: operator, "b" * 20: reader})
    text = serve(access, headers={"Authorization": "Bearer " + "a" * 20}).get("/workers").text
    assert (
        text.index("Supervisor sup") < text.index("alive") < text.index("Inside applications") < text.index("lone")
    )
    assert "<strong>degraded</strong>: &lt;i&gt;" in text
    assert text.count("actions/recycle-worker") == 1, "only for a live worker that has a supervisor"
    assert "died of SIGSEGV" in text
    assert "<strong>charged</strong>: orders/slow" in text
    assert "<strong>not charged</strong>: orders/slow" in text
    assert "<i>" not in text
    assert "\x1b" not in text
    visit = serve(access, headers={"Authorization": "Bearer " + "b" * 20})
    assert "actions/recycle-worker" not in visit.get("/workers").text
    assert visit.post_json("/api/actions/recycle-worker", {"fields": {"worker": "alive"}}).status == 403
    (dead,) = visit.get("/api/post-mortems").json
    assert [item["is_charged"] for item in dead["attempts"]] == [True, False]


def test_a_sparkline_has_gaps_and_marks_and_no_markup_of_others() -> None:
    values = [1, None, 3, 4, *[None] * 56]
    minutes = [
        MinuteFigures(START + timedelta(minutes=n), value, None, None, None) for n, value in enumerate(values)
    ]
    mark = VersionMark(START + timedelta(minutes=30), '<script>"8f3a')
    made = sparkline.settled(HourFigures("orders", minutes, None, None, [mark]))
    assert made.count("<polyline") == 1
    assert made.count("<circle") == 1, "a minute alone is a dot"
    assert made.count('class="spark-axis"') == 1, "the whole hour is seen, also where nothing is known"
    assert "version &lt;script&gt;" in made
    assert "<script" not in made
    assert sparkline.ready(HourFigures("orders", minutes, None, None)) == sparkline.ready(None)


def test_a_worker_is_paused_and_resumed_on_its_page(
    bus: CommandBus, running: threading.Event, serve: Serve
) -> None:
    ann = serve(Access(user_header="X-User", operators={"ann"}), headers={"X-User": "ann"})
    (worker,) = until(lambda: bus.workers().items)
    assert "a replacement is not paused" in ann.get("/workers").text
    done = ann.act("pause-worker", "/workers", worker=worker.id, reason="<odd> disk")
    assert "is paused: it claims nothing more" in done.text
    page = ann.get("/workers").text
    assert '<span class="status status-paused">paused</span>' in page
    assert "paused by ann: &lt;odd&gt; disk" in page
    assert f"worker {worker.id} is paused by ann" in ann.get("/").text
    (listed,) = ann.get("/api/workers").json
    assert listed["state"] == "PAUSED"
    until(lambda: '<li class="slot slot-idle">paused</li>' in ann.get("/workers").text)
    bus.send("orders", "other", command_id="waits")
    until(lambda: "could run, but all of its workers are paused" in ann.get("/").text)
    bus.cancel("orders", "waits")
    mark = ann.mark("/workers")
    answer = ann.post_json("/api/actions/resume-worker", {"fields": {"worker": worker.id}}, X_Mark=mark)
    assert answer.json == {"done": f"worker {worker.id} goes on"}
    assert f"worker {worker.id} is paused" not in ann.get("/").text
    found = [
        (item.action, item.operator) for item in bus.audit.list_actions() if item.subject.startswith("worker ")
    ]
    assert found == [("RESUME", "ann"), ("PAUSE", "ann")]
    reader = serve(Access(user_header="X-User", operators={"ann"}), headers={"X-User": "bob"})
    assert "pause-worker" not in reader.get("/workers").text
    assert reader.post("/actions/pause-worker", {"worker": worker.id}).status == 403


def test_a_critical_worker_needs_a_person(bus: CommandBus, running: threading.Event, serve: Serve) -> None:
    """As a real worker writes its health, not as a test would."""
    (worker,) = until(lambda: bus.workers().items)
    visit = serve()
    assert "is critical" not in str(visit.get("/api/concerns").json)
    running.worker.health_status.set_critical("disk", "the disk is full")  # type: ignore[attr-defined]
    until(lambda: f"worker {worker.id} is critical: the disk is full" in str(visit.get("/api/concerns").json))
