"""The worker command: from a registry's name to exit codes, as real processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from cli_harness import Program, run

from commandbus import CommandStatus
from commandbus.cli.exit_codes import ExitCode
from commandbus.errors import ConfigurationError
from commandbus.worker.load_handlers import load_registry
from support.waiting import until

SHOP = """
import time
from commandbus import HandlerRegistry

class inner:
    registry = HandlerRegistry()

registry = inner.registry
number = 5

@registry.handler("orders", "ship")
def ship(command, ctx):
    ctx.log.info("shipping")
    return {"shipped": command.data}

@registry.handler("orders", "hang")
def hang(command, ctx):
    print("HANGING", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def started(program: Program) -> str:
    return program.read_until("runs 2 handlers", stream="stderr")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_works_until_a_signal_and_ends_with_0(orders, bus, database, shop, number):
    bus.send("orders", "ship", 1, command_id="a")
    with Program("worker", "shop:registry", "--database", database, "--json", cwd=shop) as program:
        started(program)
        until(lambda: bus.get_command("orders", "a").status is CommandStatus.COMPLETED)
        program.signal(number)
        answer = program.end()
        assert answer.code == 0
        assert answer.document["settled"] == 1
        assert answer.document["reason"] == number.name
        assert not program.survivors()
    assert bus.get_command("orders", "a").result == {"shipped": 1}


def test_the_module_runs_from_settings_alone_as_in_a_unit_file(orders, bus, database, shop):
    bus.send("orders", "ship", 2, command_id="a")
    settings = {
        "COMMANDBUS_DATABASE_URL": database,
        "WORKER_HANDLERS": "shop:inner.registry",
        "WORKER_DOMAINS": "orders",
        "COMMANDBUS_LOG_FORMAT": "json",
    }
    with Program(module="commandbus.worker", cwd=shop, **settings) as program:
        until(lambda: bus.get_command("orders", "a").status is CommandStatus.COMPLETED)
        program.signal(signal.SIGTERM)
        answer = program.end()
    assert answer.code == 0
    records = [json.loads(line) for line in answer.err.splitlines()]
    assert {"at", "level", "logger", "message"} <= records[0].keys()
    (shipping,) = [record for record in records if record["message"] == "shipping"]
    assert (shipping["command_id"], shipping["domain"], shipping["attempt"]) == ("a", "orders", 1)


def test_work_left_behind_is_exit_code_7(orders, bus, database, shop):
    bus.send("orders", "hang", command_id="a")
    options = ["--shutdown-timeout", "3s", "--cancel-grace", "1s"]
    with Program("worker", "shop:registry", "--database", database, *options, cwd=shop) as program:
        program.read_until("HANGING")
        program.signal(signal.SIGTERM)
        answer = program.end()
    assert answer.code == ExitCode.LEFT_BEHIND
    assert "1 abandoned" in answer.err


def test_a_worker_that_has_done_its_share_is_replaced_by_a_fresh_one(orders, bus, database, shop):
    options = ["--max-messages", "1", "--json"]
    with Program("worker", "shop:registry", "--database", database, *options, cwd=shop) as program:
        for n in range(3):
            bus.send("orders", "ship", n, command_id=f"c{n}")
            until(lambda n=n: bus.get_command("orders", f"c{n}").status is CommandStatus.COMPLETED)
            until(lambda n=n: len([worker for worker in bus.workers() if worker.state == "STOPPED"]) == n + 1)
        # A worker says STOPPED a moment before it exits: the replacement is counted once its successor is there.
        until(lambda: len([worker for worker in bus.workers() if worker.state != "STOPPED"]) == 1)
        program.signal(signal.SIGTERM)
        answer = program.end()
    assert answer.code == 0
    assert (answer.document["settled"], answer.document["restarts"]) == (3, 3)
    assert len({bus.get_command("orders", f"c{n}").worker for n in range(3)}) == 3


def test_several_processes_share_the_work(orders, bus, database, shop):
    with Program("worker", "shop:registry", "--database", database, "--processes", "2", cwd=shop) as program:
        started(program)
        until(lambda: len([worker for worker in bus.workers() if worker.state == "ACTIVE"]) == 2)
        program.signal(signal.SIGTERM)
        assert program.end().code == 0
        assert not program.survivors()
    assert {worker.state for worker in bus.workers()} == {"STOPPED"}


def test_options_are_made_from_the_settings(orders, database, shop):
    options = ["--concurrency", "3", "--domain", "orders", "--poll-interval", "250ms", "--log-level", "warning"]
    with Program("worker", "shop:registry", "--database", database, *options, cwd=shop) as program:
        worker = until(lambda: orders("workers", "--json").document)[0]
        assert (worker["concurrency"], worker["domains"]) == (3, ["orders"])
        program.signal(signal.SIGTERM)
        assert program.end().err == ""


def test_doubts_about_the_settings_are_logged(database, shop):
    answer = run("worker", "shop:number", "--database", database, cwd=shop, WORKER_CONCURENCY="9")
    assert "WARNING commandbus.worker: environment WORKER_CONCURENCY" in answer.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "WORKER_HANDLERS"),
        (["shop"], "MODULE:REGISTRY"),
        (["shop:registry", "--concurrency", "none"], "concurrency"),
        (["shop:registry", "--statement-timeout", "60s"], "statement_timeout"),
        (["shop:registry", "--domain", "Bad Domain"], "Bad Domain"),
    ],
)
def test_bad_settings_are_exit_code_3(database, shop, words, told):
    answer = run("worker", *words, "--database", database, cwd=shop)
    assert answer.code == ExitCode.CONFIGURATION
    assert told in answer.err
    assert answer.err.count("\n") == 1


AWAY = ("--database", "postgresql://a:secret@127.0.0.1:1/a")


def test_a_server_that_is_away_or_empty_is_exit_code_6(empty_database, shop):
    away = run("worker", "shop:registry", *AWAY, "--no-wait", cwd=shop)
    assert (away.code, "secret" in away.err) == (ExitCode.DATABASE, False)
    away = run("worker", "shop:registry", *AWAY, cwd=shop, WORKER_WAIT_FOR_DATABASE="false")
    assert away.code == ExitCode.DATABASE
    empty = run("worker", "shop:registry", "--database", empty_database, cwd=shop)
    assert empty.code == ExitCode.DATABASE
    assert "commandbus migrate" in empty.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_away_is_waited_for_until_a_signal(shop, number):
    with Program("worker", "shop:registry", *AWAY, "--json", cwd=shop) as program:
        said = program.read_until("this start waits for it", stream="stderr")
        assert ("Connection refused" in said, "secret" in said) == (True, False)
        program.signal(number)
        answer = program.end()
        assert (answer.code, answer.document["reason"]) == (0, number.name)
        assert not program.survivors()


# --- the registry -------------------------------------------------------------------------------------------


def test_a_file_in_place_of_a_module_gets_a_hint(bare_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    answer = bare_cli("worker", "mine.py:handlers", "--database", "postgresql://127.0.0.1:1/a")
    assert answer.code == ExitCode.CONFIGURATION
    assert "did you mean mine:handlers?" in answer.err


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("missing_a", None, "there is no module 'missing_a'"),
        ("broken_b", "x = 1\nraise RuntimeError('at import')\n", "broken_b.py:2: RuntimeError: at import"),
        ("syntax_c", "x = 1\ndef (:\n", "syntax_c.py:2: SyntaxError"),
        ("import_d", "import no_such_thing_e\n", "import_d.py:1: ModuleNotFoundError"),
        ("exit_f", "import sys\nsys.exit(3)\n", "exit_f.py:2: SystemExit: 3"),
        ("lacking_g", "x = 1\n", "has no 'registry'"),
        (
            "hint_h",
            "from commandbus import HandlerRegistry\nhandlers = HandlerRegistry()\n",
            "did you mean 'handlers'",
        ),
        ("wrong_i", "registry = {}\n", "is a dict, not a HandlerRegistry"),
    ],
)
def test_what_is_wrong_with_a_registry_is_told(tmp_path, monkeypatch, name, content, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    if content is not None:
        (tmp_path / f"{name}.py").write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        load_registry(f"{name}:registry")
    assert told in str(caught.value)
    assert os.getcwd() in sys.path or "" in sys.path
