"""`top`, `stack` and `recycle`: the fleet in a terminal, on a real database with a real worker."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from commandbus import CommandBus, HandlerRegistry, Worker
from commandbus.cli.exit_codes import ExitCode
from commandbus.cli.top_app import TextScreen, TopApp
from commandbus.cli.top_view import look, view_of
from support.waiting import until
from support.workers import quick_settings

HOSTILE = "[red]x[/red]\u202e"


@pytest.fixture
def busy(database: str, orders: object, bus: CommandBus) -> Iterator[Worker]:
    """A worker that runs one command with a hostile id, and has one slot more."""
    handlers, go_on = HandlerRegistry(), threading.Event()

    @handlers.handler("orders", "slow", timeout=60)
    def slow(_command, _ctx):
        go_on.wait()

    worker = Worker(handlers, settings=quick_settings(database, concurrency=2))
    worker.start()
    bus.send("orders", "slow", {}, command_id=HOSTILE)
    until(lambda: any(item.slots for item in bus.watch_slots()))
    yield worker
    go_on.set()
    worker.stop()


# --- top -------------------------------------------------------------------------------------------------


def test_once_prints_one_screen_as_plain_text(cli, busy):
    found = cli("top", "--once")
    assert found.code == ExitCode.OK
    assert "Nothing needs you." in found.out
    assert "orders/slow" in found.out
    assert "running" in found.out
    assert "of 1m" in found.out
    assert busy.id in found.out
    assert "\x1b" not in found.out
    assert "\u202e" not in found.out
    assert "[red]x[/red]\\u202e" in found.out
    document = cli("--json", "top", "--once").document
    assert [row["command"] for row in document["slots"]] == [["orders", HOSTILE], None]
    assert "orders/slow" not in cli("top", "--once", "--filter", "nothing of that").out


def test_without_its_library_top_says_what_to_install(cli, orders, monkeypatch):
    monkeypatch.setitem(sys.modules, "textual.app", None)
    monkeypatch.delitem(sys.modules, "commandbus.cli.top_app", raising=False)
    found = cli("top")
    assert found.code == ExitCode.CONFIGURATION
    assert "needs the extra `top`" in found.err
    assert "pip install 'commandbus-pg[top]'" in found.err
    assert "Nothing needs you." in cli("top", "--once").out


def test_text_of_others_cannot_control_the_terminal(busy, bus):
    found = look(bus)
    odd = "\x1b[2J\x07\u202e"
    workers = [
        replace(item, id=odd, host=odd, health={"state": "CRITICAL", "reasons": [odd]}) for item in found.workers
    ]
    domains = [replace(item, domain=odd, paused_types=[odd]) for item in found.domains]
    slots = [
        replace(item, worker=odd, slots=[replace(slot, command_type=odd, reason=odd) for slot in item.slots])
        for item in found.slots
    ]
    view = view_of(replace(found, workers=workers, domains=domains, slots=slots))
    rows = [*view.domains, *view.slots]
    texts = [view.headline, *view.concerns, *(text for row in rows for text in (*row.cells, *row.details))]
    assert len(rows) == 3
    assert not any(character in text for text in texts for character in odd if not character.isprintable())


async def _until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Wait for a state of the screen, at most a minute."""
    for _ in range(1200):
        await pilot.pause(0.05)
        if condition():
            return
    raise AssertionError("the screen did not get there")


def _rows(app: TopApp, name: str) -> list[str]:
    table = app.query_one(f"#{name}", DataTable)
    return [" ".join(str(cell) for cell in table.get_row_at(n)) for n in range(table.row_count)]


def _lines(app: TopApp) -> str:
    return str(app.screen.query_one("#lines", Static).content)


def test_the_screen_is_live_and_goes_by_keys(busy, bus):
    async def drive() -> None:
        app = TopApp(bus, interval=0.2)
        async with app.run_test(size=(160, 50)) as pilot:
            await _until(pilot, lambda: any("orders/slow" in row for row in _rows(app, "slots")))
            assert "Nothing needs you." in str(app.query_one("#sentence", Static).content)
            assert any("[red]x[/red]\\u202e" in row for row in _rows(app, "slots")), "as text, not markup"
            assert _rows(app, "domains")[0].startswith("orders ")

            await pilot.press("question_mark")
            assert "pause the screen" in _lines(app)
            await pilot.press("escape")

            await pilot.press("enter")
            assert "orders: 0 commands could run now" in _lines(app)
            await pilot.press("q")
            assert not isinstance(app.screen, TextScreen), "q closes the box, not the program"

            await pilot.press("tab", "enter")
            await _until(pilot, lambda: "test_cli_top.py:" in _lines(app))
            assert "slow" in _lines(app)
            await pilot.press("escape")

            await pilot.press("p")
            await asyncio.to_thread(bus.pause, "orders", "later")
            await pilot.pause(0.6)  # three intervals in which nothing may change
            assert "Nothing needs you." in str(app.query_one("#sentence", Static).content), "it stands still"
            assert "PAUSED" in str(app.query_one("#state", Static).content)
            await pilot.press("p")
            await _until(pilot, lambda: "1 thing needs you" in str(app.query_one("#sentence", Static).content))

            await pilot.press("slash")
            assert isinstance(app.focused, Input)
            await pilot.press(*"nobody", "enter")
            await _until(pilot, lambda: not _rows(app, "slots") and not _rows(app, "domains"))
            await pilot.press("escape")
            await _until(pilot, lambda: _rows(app, "domains"))
            await pilot.press("q")
        assert app.return_code == 0

    asyncio.run(drive())


def test_a_database_that_is_away_is_said_and_the_screen_stays(busy, bus, monkeypatch):
    async def drive() -> None:
        app = TopApp(bus, interval=0.2)
        async with app.run_test(size=(160, 50)) as pilot:
            await _until(pilot, lambda: _rows(app, "domains"))
            monkeypatch.setattr(CommandBus, "status", lambda _: 1 / 0)
            await _until(pilot, lambda: "does not answer" in str(app.query_one("#state", Static).content))
            assert _rows(app, "domains")
            monkeypatch.undo()
            await _until(pilot, lambda: "does not answer" not in str(app.query_one("#state", Static).content))

    asyncio.run(drive())


# --- stack and recycle -----------------------------------------------------------------------------------


def test_the_stack_of_a_running_command(cli, busy):
    found = cli("stack", "orders", HOSTILE, "--wait", "20s")
    assert found.code == ExitCode.OK
    assert "test_cli_top.py:" in found.out
    assert f"in worker {busy.id}" in found.out
    assert (
        cli("--json", "stack", "orders", HOSTILE).document["stacks"][0]["frames"][-1]["function"].endswith("wait")
    )


def test_a_command_that_does_not_run_has_no_stack(cli, orders, bus):
    bus.send("orders", "slow", {}, command_id="a")
    found = cli("stack", "orders", "a")
    assert (found.code, found.out) == (ExitCode.NO, "it is not running: no worker holds it now\n")
    assert cli("stack", "orders", "b").code == ExitCode.NOT_FOUND
    assert cli("stack", "orders", "a", "--wait", "soon").code == ExitCode.USAGE


def test_a_worker_that_cannot_be_recycled_says_why(cli, busy):
    refused = cli("recycle", busy.id, "--wait", "20s", "--reason", "leaks")
    assert refused.code == ExitCode.REFUSED
    assert "it has no supervisor" in refused.err
    assert "no worker 'nobody' is alive" in cli("recycle", "nobody").err


def test_a_worker_is_paused_and_everybody_sees_it(cli, busy, bus):
    paused = cli("pause-worker", busy.id, "--wait", "20s", "--operator", "ann", "--reason", "odd disk")
    assert (paused.code, paused.out) == (ExitCode.OK, f"worker {busy.id} is paused\n")
    assert "was already paused" in cli("pause-worker", busy.id, "--wait", "20s").out
    (listed,) = cli("workers", "--json").document
    assert listed["state"] == "PAUSED"
    assert "paused by" in str(listed["health"]["reasons"])
    assert "PAUSED" in cli("workers").out
    screen = cli("top", "--once").out
    assert f"worker {busy.id} is paused by" in screen
    assert "paused  1 slot" in " ".join(screen.split()).replace("paused 1", "paused  1")
    assert "orders/slow" in screen, "what runs goes on"
    assert cli("audit", "--action", "pause", "--json").document[-1]["reason"] == "odd disk"
    document = cli("resume-worker", busy.id, "--wait", "20s", "--json").document
    assert document == {"worker": busy.id, "paused": False, "changed": True}
    assert "was not paused" in cli("resume-worker", busy.id, "--wait", "20s").out
    assert "no worker 'nobody' is alive" in cli("resume-worker", "nobody").err
