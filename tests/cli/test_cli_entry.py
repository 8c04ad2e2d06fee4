"""The frame of the command line: help, exit codes, errors in one line, signals, pipes, passwords unsaid."""

from __future__ import annotations

import importlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import click
import psycopg
import pytest
from cli_harness import Answer, Program, run
from psycopg import errors as pg

from commandbus import errors
from commandbus.cli import entry
from commandbus.cli import exit_codes as exits
from commandbus.cli.exit_codes import ExitCode
from commandbus.embedded import EmbeddedPostgres
from support.waiting import until

PASSWORD = "pa55-w0rd"


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            yield from leaves(command.get_command(ctx, name), (*path, name))
    else:
        yield path, command


ALL_COMMANDS = dict(leaves(entry.root))


def assert_one_line_error(answer: Answer, code: ExitCode) -> None:
    assert answer.code == code
    assert answer.out == ""
    assert answer.err.startswith("commandbus: error: ")
    assert answer.err.count("\n") == 1
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("path", ALL_COMMANDS, ids=" ".join)
def test_every_command_has_help_and_takes_the_options_that_stand_everywhere(bare_cli, path):
    answer = bare_cli(*path, "--help")
    assert answer.code == ExitCode.OK
    assert ALL_COMMANDS[path].help
    for option in ("--json", "--database", "--config", "--debug"):
        assert option in answer.out


@pytest.mark.parametrize("name", entry.COMMANDS)
def test_the_list_of_commands_begins_as_their_help_does(name):
    help_ = entry.root.get_command(click.Context(entry.root), name).help
    assert " ".join(help_.split()).startswith(entry.COMMANDS[name][1].removesuffix("."))


def test_every_command_of_a_module_is_listed():
    modules = {module for module, _ in entry.COMMANDS.values()}
    found = {
        command.name
        for module in modules
        for command in importlib.import_module(f"commandbus.cli.{module}").COMMANDS
    }
    assert found == set(entry.COMMANDS)


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["-h"]])
def test_what_needs_no_database_does_not_load_its_driver(words):
    program = (
        "import sys; from commandbus.cli import entry; code = entry.run(sys.argv[1:]); "
        "sys.exit(code or 'psycopg' in sys.modules or 'asyncio' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, *words], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("words", [[], ["tsq"], ["domain"], ["embedded"]])
def test_a_group_alone_shows_its_help(bare_cli, words):
    answer = bare_cli(*words)
    assert answer.code == ExitCode.OK
    assert answer.out.startswith("Usage: ")


def test_version(bare_cli):
    assert bare_cli("--version").out.startswith("commandbus ")


@pytest.mark.parametrize(
    "words", [["nonsense"], ["status", "--nonsense"], ["send"], ["commands", "--limit", "0"], ["show"]]
)
def test_a_wrong_line_is_a_usage_error(bare_cli, words):
    assert_one_line_error(bare_cli(*words), ExitCode.USAGE)


def test_the_table_of_exit_codes_names_each_code():
    for code in ExitCode:
        assert f"| {code.value:<5}| {code.name:<13}|" in exits.__doc__


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigurationError("x"), ExitCode.CONFIGURATION),
        (errors.InvalidCommandError("x"), ExitCode.USAGE),
        (errors.UnknownDomainError("x"), ExitCode.NOT_FOUND),
        (errors.CommandNotFoundError("x"), ExitCode.NOT_FOUND),
        (errors.InvalidOperationError("x"), ExitCode.REFUSED),
        (errors.DuplicateCommandError("d", "i", "data"), ExitCode.REFUSED),
        (errors.MissingPrivilegeError("x"), ExitCode.REFUSED),
        (errors.SchemaError("x"), ExitCode.DATABASE),
        (errors.EmbeddedPostgresError("x"), ExitCode.DATABASE),
        (psycopg.OperationalError("x"), ExitCode.DATABASE),
        (pg.InsufficientPrivilege("x"), ExitCode.REFUSED),
        (RuntimeError("x"), ExitCode.BUG),
    ],
)
def test_each_error_has_its_code(error, code):
    assert exits.code_for(error) is code
    assert "\n" not in exits.sentence_for(error)


def test_debug_shows_where_an_error_came_from(cli):
    quiet, loud = cli("send", "nowhere", "x"), cli("send", "nowhere", "x", "--debug")
    assert_one_line_error(quiet, ExitCode.NOT_FOUND)
    assert "Traceback" in loud.err
    assert loud.code == quiet.code


def test_json_may_stand_before_and_after_the_command(orders):
    documents = [orders(*words).document for words in (["--json", "status"], ["status", "--json"])]
    assert [[item["domain"] for item in found] for found in documents] == [["orders"], ["orders"]]


# --- the database is not there ------------------------------------------------------------------------------


def test_a_refused_connection_is_told_at_once_in_libpqs_words(bare_cli):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        answer = bare_cli("status", "--database", f"postgresql://app:{PASSWORD}@127.0.0.1:{port}/app")
    assert_one_line_error(answer, ExitCode.DATABASE)
    assert "refused" in answer.err
    assert PASSWORD not in answer.err


def test_a_deaf_server_is_given_up_within_seconds(bare_cli):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        started = time.monotonic()
        answer = bare_cli("status", "--database", f"postgresql://app@127.0.0.1:{deaf.getsockname()[1]}/app")
    assert time.monotonic() - started < 8
    assert_one_line_error(answer, ExitCode.DATABASE)
    assert "timeout" in answer.err


def test_no_database_and_an_unreadable_file_are_configuration_errors(bare_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_one_line_error(bare_cli("status"), ExitCode.CONFIGURATION)
    assert_one_line_error(bare_cli("status", "--config", "nowhere.toml"), ExitCode.CONFIGURATION)


@pytest.mark.parametrize(
    "line",
    ["domain list", "domain create x", "status", "commands", "show x", "pauses", "pause x", "prune", "workers",
     "rejected", "tsq list", "tsq count", "roles", "send x y"],
)  # fmt: skip
def test_without_the_schema_every_command_says_to_migrate(bare_cli, empty_database, line):
    answer = bare_cli(*line.split(), "--database", empty_database)
    assert_one_line_error(answer, ExitCode.DATABASE)
    assert "commandbus migrate" in answer.err


@pytest.mark.parametrize(
    "words", [["config"], ["config", "--json"], ["status"], ["doctor"], ["migrate", "--debug"]]
)
@pytest.mark.parametrize(
    "address",
    [
        f"postgresql://app:{PASSWORD}@127.0.0.1:1/app",
        f"host=127.0.0.1 port=1 user=app password={PASSWORD}",
        f"postgresql://app:{PASSWORD}@@127.0.0.1:1/app",
        f"postgres+psycopg://app:{PASSWORD}@127.0.0.1/app",
    ],
)
def test_a_password_is_never_shown(bare_cli, words, address):
    answer = bare_cli(*words, "--database", address)
    assert PASSWORD not in answer.out + answer.err


# --- as a process -------------------------------------------------------------------------------------------


def test_a_reader_who_goes_away_gets_no_complaint(database):
    with Program("status", "--watch", "--interval", "20ms", "--json", "--database", database) as program:
        assert program.process.stdout.readline() == "[]\n"
        program.process.stdout.close()
        assert program.process.wait(20) == ExitCode.BROKEN_PIPE
        assert program.process.stderr.read() == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_quietly(database, number, code):
    with Program("status", "--watch", "--json", "--database", database) as program:
        program.read_until("[]")
        program.signal(number)
        assert (program.process.wait(20), program.process.stderr.read()) == (code, "")


def test_an_embedded_server_does_not_outlive_its_command_on_sigterm(folder):
    address = f"embedded:{folder / 'data'}"
    with Program("migrate", "--database", address) as first:
        assert first.end().code == 0
    with Program("status", "--watch", "--json", "--database", address) as program:
        program.read_until("[]")
        assert EmbeddedPostgres(folder / "data").running
        program.signal(signal.SIGTERM)
        assert program.process.wait(30) == 143
        until(lambda: not program.survivors())
        until(lambda: not EmbeddedPostgres(folder / "data").running)


@pytest.mark.parametrize("module", ["commandbus", "commandbus.cli"])
def test_it_runs_as_a_module(module):
    assert run("--version", module=module).out.startswith("commandbus ")


def test_a_table_is_the_same_without_rich(database, tmp_path):
    (tmp_path / "rich.py").write_text("raise ImportError('not here')")
    code = (
        "import sys; sys.stdout.isatty = lambda: True\n"
        "from commandbus.cli import main; main(['config', '--changed', '--database', sys.argv[1]])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, database], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}", "PATH": "", "COLUMNS": "200"},
    ).stdout  # fmt: skip
    assert shown.splitlines()[0].split() == ["SETTING", "VALUE", "FROM", "TOML", "ENVIRONMENT"]


def test_it_completes_words_in_a_shell():
    answer = run(_COMMANDBUS_COMPLETE="bash_complete", COMP_WORDS="commandbus stat", COMP_CWORD="1")
    assert "plain,status" in answer.out


def test_json_is_json_whatever_the_encoding_of_the_terminal(orders, database):
    orders("send", "orders", "grüße", '"日本"', "--id", "é")
    answer = run("show", "orders", "é", "--json", "--database", database, PYTHONIOENCODING="ascii")
    assert json.loads(answer.out)["data"] == "日本"


def test_ctrl_c_while_a_string_is_executed_has_its_exit_code(tmp_path):
    """Imports execute strings. Python then ends `python -m` by the signal, unless its note is cleared."""
    (tmp_path / "interrupted.py").write_text(
        "from commandbus.cli import entry\n"
        "entry._invoke = lambda arguments, session: exec('raise KeyboardInterrupt')\n"
        "entry.main([])\n"
    )
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
