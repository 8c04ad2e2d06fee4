"""What strangers wrote, on the command line: shown escaped, still to be named, and never a line of its own."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import psycopg
import pytest
from cli_harness import Program
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from commandbus import CommandStatus
from commandbus.cli.exit_codes import ExitCode
from commandbus.cli.render import print_fields, print_json, print_table
from commandbus.cli.table import columns
from support.unsafe_text import is_unsafe
from support.waiting import until

EVIL = "evil\x1b[2J\n\x85\u202e\U000e0041"
SHOWN = "evil\\x1b[2J\\n\\x85\\u202e\\U000e0041"
FAKE = "2026-01-31T09:30:00.123Z ERROR commandbus.worker: fake line"
any_text = st.text(st.characters(), max_size=40) | st.text(st.sampled_from(EVIL), max_size=40)

SHOP = f"""
from commandbus import HandlerRegistry, PermanentCommandError

registry = HandlerRegistry()

@registry.handler("orders", "ship")
def ship(command, ctx):
    raise PermanentCommandError("no street\\n{FAKE}\\x1b[31m\\u202e", code="NO\\x1b[2J")

@registry.handler("orders", "ship_apart", isolation="process")
def ship_apart(command, ctx):
    ctx.log.error("about to fail\\n{FAKE}")
    raise PermanentCommandError("no street\\n{FAKE}\\x1b[31m\\u202e")
"""


def assert_safe(text: str) -> None:
    assert not any(is_unsafe(char) for char in text if char != "\n")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(any_text)
@example(EVIL)
def test_tables_fields_and_json_do_nothing_to_a_terminal(capsys, text):
    print_table(columns("name note"), [(text, [text]), ({text: text}, text)])
    out = capsys.readouterr().out
    assert out.count("\n") == 3
    assert_safe(out)
    print_fields({"name": text})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert_safe(out)
    print_json({text: text})
    out = capsys.readouterr().out
    assert json.loads(out) == {text: text}
    assert_safe(out)


@pytest.fixture
def evil(orders, bus, database):
    """A command with an id that the API refuses; somebody wrote it with SQL."""
    bus.send("orders", "ship", command_id="placeholder")
    with psycopg.connect(database) as conn:
        conn.execute("UPDATE commandbus.command SET command_id = %s WHERE command_id = 'placeholder'", [EVIL])
    return orders


def test_an_id_with_control_characters_is_found_by_what_was_shown(evil):
    listed = evil("commands")
    assert_safe(listed.out)
    assert SHOWN in listed.out
    for words in (["orders", SHOWN], [SHOWN], ["orders", EVIL], [EVIL]):
        answer = evil("show", *words, "--json")
        assert answer.code == 0, answer.err
        assert_safe(answer.out)
        assert answer.document["command_id"] == EVIL
    answer = evil("show", SHOWN)
    assert SHOWN in answer.out
    assert_safe(answer.out)


@pytest.mark.parametrize("typed", [EVIL, SHOWN, "#{id}"])
def test_it_can_be_canceled(evil, bus, typed):
    record = bus.get_command("orders", EVIL)
    answer = evil("cancel", "orders", typed.format(id=record.id))
    assert answer.code == 0, answer.err
    assert_safe(answer.out)
    assert SHOWN in answer.out
    assert bus.get_command("orders", EVIL).status is CommandStatus.CANCELED


def test_of_two_that_are_shown_alike_none_is_touched_until_somebody_says_which(evil, bus):
    sent = bus.send("orders", "ship", command_id=SHOWN)
    other = bus.get_command("orders", SHOWN)
    answer = evil("cancel", "orders", SHOWN)
    assert answer.code == ExitCode.REFUSED
    assert f"'#{other.id}'" in answer.err
    assert_safe(answer.err)
    assert evil("cancel", "orders", f"#{other.id}").code == 0
    assert bus.get_command("orders", sent.command_id).status is CommandStatus.CANCELED
    assert bus.get_command("orders", EVIL).status is CommandStatus.PENDING


def test_an_unknown_id_is_named_without_harm(orders):
    for words in (["show", "orders", EVIL], ["show", EVIL], ["cancel", "orders", EVIL], ["batch", "show", EVIL]):
        answer = orders(*words)
        assert answer.code == ExitCode.NOT_FOUND, answer.err
        assert_safe(answer.err)


def test_batches_and_processes_are_found_by_what_was_shown(orders, bus):
    batch_id = "b\u202e1"
    bus.create_batch("orders", [], batch_id=batch_id, is_open=True)
    assert "b\\u202e1" in orders("batch", "list").out
    for words in (["b\\u202e1"], ["b\\u202e1", "--domain", "orders"], [batch_id]):
        assert orders("batch", "show", *words, "--json").document["batch_id"] == batch_id


@pytest.mark.slow
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_workers_log_has_no_line_of_a_strangers(orders, bus, database, tmp_path, log_format):
    (tmp_path / "shop.py").write_text(SHOP)
    bus.send("orders", "ship", command_id="a\u202eb")
    bus.send("orders", "ship_apart", command_id="apart")
    with psycopg.connect(database) as conn:
        conn.execute(
            "SELECT pgmq.send('orders__commands', %s)", [json.dumps({"command_type": f"x\n{FAKE}\u202e"})]
        )
    settings = {"COMMANDBUS_LOG_FORMAT": log_format, "COMMANDBUS_LOG_LEVEL": "DEBUG"}
    with Program("worker", "shop:registry", "--database", database, cwd=Path(tmp_path), **settings) as program:
        until(lambda: bus.status("orders")[0].in_tsq == 2 and orders("rejected", "--json").document)
        program.signal(signal.SIGTERM)
        answer = program.end()
    assert answer.code == 0
    assert_safe(answer.err)
    lines = answer.err.splitlines()
    if log_format == "json":
        records = [json.loads(line) for line in lines]
        assert any("fake line" in record["message"] for record in records)
    assert not [line for line in lines if line.startswith(FAKE)]
    assert all(line.startswith(("20", "{", "    ")) for line in lines), lines
    assert re.search(r"fake line\\+x1b|fake line\\+u001b", answer.err)
    for words in (["tsq", "list"], ["rejected"], ["commands"], ["show", "apart", "--traceback"]):
        shown = orders(*words)
        assert_safe(shown.out)
        assert not [line for line in shown.out.splitlines() if line.startswith(FAKE)]
