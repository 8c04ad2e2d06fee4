"""docs/limits.md is true: its code, settings and command lines run, and its lists are those of the code.

That the example prints what the page shows is tested in tests/limits/test_ocr_pipeline_example.py.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commandbus import CommandBus, CommandStatus, HandlerRegistry, Limit, Worker, load_settings
from commandbus.flow.limits.metrics import FleetFigures, LimitFigures
from commandbus.flow.limits.redis_outage import DEGRADED, JOINING, REDIS
from commandbus.limits.stores.redis.outage import LOST
from commandbus.model.limit import BACKOFF_SECONDS, KEY_OPTIONS
from commandbus.supervisor.fleet_metrics import shared_metrics
from support.waiting import until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "limits.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def block(language: str, containing: str) -> str:
    found = [code for kind, code in BLOCKS if kind == language and containing in code]
    assert len(found) == 1, f"the page has {len(found)} {language} blocks with {containing!r}"
    return found[0]


@pytest.fixture
def bus(database: str) -> Iterator[CommandBus]:
    with CommandBus(database) as bus:
        for domain in ("ocr", "orders"):
            bus.create_domain(domain)
        bus.declare_limit(Limit("docai", concurrency=5, rate="120/m"))
        yield bus


@pytest.fixture
def api() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"text")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


# --- the page as such -------------------------------------------------------------------------------------------


def test_every_block_of_the_page_is_run_by_a_test() -> None:
    known = ("[limits.docai]", "def page(", "bus.limit(", "bus.estimate(", "raise_for_rate_limit(", "[breakers.",
             "commandbus limits", "The document is whole")  # fmt: skip
    assert [code for _, code in BLOCKS if not any(mark in code for mark in known)] == []


def test_the_links_lead_somewhere() -> None:
    heads = {
        re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^## (.*)", PAGE, re.M)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) == heads
    for path in re.findall(r"\]\(([^#)]+)[#)]", PAGE):
        assert (ROOT / "docs" / path).exists(), path


def test_the_modes_are_those_of_the_back_end() -> None:
    assert re.findall(r"^\| (redis|lost|degraded|joining) \|", PAGE, re.M) == [REDIS, LOST, DEGRADED, JOINING]


def test_every_metric_is_named() -> None:
    empty = {field.name: 0 for field in fields(LimitFigures)}
    told = shared_metrics(FleetFigures((LimitFigures(**empty),)))  # type: ignore[arg-type]
    (listed,) = re.findall(r"`/metrics`, each(.*?)They are the fleet's", PAGE, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", listed)) - {"limit"}  # the label
    full = {name if name.startswith("commandbus") else f"commandbus_limit{name}" for name in named}
    assert full == {metric.name for metric in told if not metric.name.startswith("commandbus_schedule_")}


def test_every_call_that_is_named_exists() -> None:
    named = set(re.findall(r"`bus\.(\w+)", PAGE)) | {
        "get_limit", "set_limit", "unset_limit", "breakers", "open_breaker", "close_breaker", "reset_breaker",
    }  # fmt: skip
    assert [name for name in named if not callable(getattr(CommandBus, name, None))] == []


# --- its settings -----------------------------------------------------------------------------------------------


def test_the_settings_of_a_limit_are_what_the_page_calls_defaults(tmp_path: Path) -> None:
    (tmp_path / "commandbus.toml").write_text(block("toml", "[limits.docai]"))
    settings = load_settings(environ={}, directory=tmp_path)
    (limit,) = settings.limits
    assert limit == Limit("docai", concurrency=5, rate="120/m")
    assert limit.backoff == BACKOFF_SECONDS
    options = {field.name for field in fields(Limit)} - {"name", "store", "environment", *KEY_OPTIONS}
    assert set(re.findall(r"^(\w+) = ", block("toml", "[limits.docai]"), re.M)) == options | {"environment"}


def test_the_settings_of_a_breaker(tmp_path: Path) -> None:
    (tmp_path / "commandbus.toml").write_text(block("toml", "[breakers."))
    breaker = load_settings(environ={}, directory=tmp_path).breaker_of("orders", "ship")
    assert (breaker.stuck, breaker.failures, breaker.window, breaker.reset) == (5, 20, 3600, 60)
    assert breaker.refuses


# --- its code ---------------------------------------------------------------------------------------------------


def test_the_handler_runs(bus: CommandBus, database: str, api: str) -> None:
    names: dict[str, Any] = {}
    exec(block("python", "def page("), names)
    bus.send("ocr", "page", {"url": api}, command_id="page-1")
    Worker(names["handlers"], database_url=database).run(until_idle=True)
    record = bus.get_command("ocr", "page-1")
    assert record is not None
    assert (record.status, record.result) == (CommandStatus.COMPLETED, {"letters": 4}), record.error
    assert bus.get_limit("docai").granted == 1, "the block used the place that the handler had"
    until(lambda: not bus.get_limit("docai").in_use)


def test_the_block_of_a_plain_program_runs(bus: CommandBus) -> None:
    asked: list[float] = []
    exec(block("python", "bus.limit("), {"bus": bus, "fetch": lambda timeout: asked.append(timeout)})
    assert 50 < asked[0] <= 60
    assert bus.get_limit("docai").granted == 1
    until(lambda: not bus.get_limit("docai").in_use)


def test_the_estimate_prints_what_the_comment_says(bus: CommandBus, capsys: pytest.CaptureFixture[str]) -> None:
    code = block("python", "bus.estimate(")
    exec(code, {"bus": bus})
    assert f"# {capsys.readouterr().out.strip()}\n" in code


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        (SimpleNamespace(status_code=429, headers={"Retry-After": "60"}, url="https://docai.example/"),
         "429 from docai, step 1 of the back-off"),
        (SimpleNamespace(status_code=200, headers={}, json=lambda: {"error": "quota"}),
         "quota used up, step 1 of the back-off"),
    ],
)  # fmt: skip
def test_what_is_refused_is_parked(bus: CommandBus, database: str, answer: Any, note: str) -> None:
    handlers = HandlerRegistry()
    exec(block("python", "raise_for_rate_limit("), {"handlers": handlers, "ask": lambda data: answer})
    bus.send("ocr", "table", {}, command_id="table-1")
    Worker(handlers, database_url=database).run(until_idle=True)
    record = bus.get_command("ocr", "table-1")
    assert record is not None
    assert (record.status, record.waiting_for, record.waiting_note) == (CommandStatus.PENDING, "limit", note)
    assert record.waiting_until is not None
    info = bus.get_limit("docai")
    assert info.state == "BACKING_OFF"
    assert re.fullmatch(rf"until \d\d:\d\d:\d\d \(in about .+\): {re.escape(note)}", info.text)


# --- its command lines ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_lines_run(bus: CommandBus, database: str, tmp_path: Path) -> None:
    for line in block("sh", "commandbus limits").splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "commandbus"
        done = subprocess.run(
            [sys.executable, "-m", "commandbus.cli", *words[1:]],
            cwd=tmp_path, env={**os.environ, "COMMANDBUS_DATABASE_URL": database}, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        if words[1:] == ["breakers", "open", "orders", "ship"]:  # no worker of the page runs here
            assert done.stderr.startswith("warning: nobody knows command type 'ship' of domain 'orders'")
        else:
            assert done.stderr == "", line
    info = bus.get_limit("docai")
    assert (info.concurrency, info.rate, info.state) == (3, "120/m", "AVAILABLE")
