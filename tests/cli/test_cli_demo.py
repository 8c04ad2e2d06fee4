"""The demo: to its end, a second time, interrupted, and kept. It never leaves a process behind unasked."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess

import pytest
from cli_harness import SOURCES, Program, run

from commandbus import CommandBus
from commandbus.embedded import EmbeddedPostgres
from support.access import password_in
from support.waiting import until

pytestmark = pytest.mark.slow

FIGURES = re.compile(r"^(\w+) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)", re.MULTILINE)


def figures(text: str) -> dict[str, tuple[int, ...]]:
    """Type → sent, completed, failed, in TSQ, attempts."""
    return {name: tuple(map(int, numbers)) for name, *numbers in FIGURES.findall(text)}


def copied(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line as a reader would who copied it."""
    environment = dict(os.environ, PYTHONPATH=SOURCES)
    return subprocess.run(
        shlex.split(line), capture_output=True, text=True, env=environment, check=False, timeout=60
    )


def lines_to_copy(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.startswith("  ") and " -m commandbus.cli " in line]


def test_it_runs_to_its_end_twice_and_its_lines_can_be_copied(folder):
    place = str(folder / "data")
    for _ in range(2):
        with Program("demo", "--folder", place, "--commands", "100") as program:
            answer = program.end()
            assert (answer.code, answer.err) == (0, "")
            assert figures(answer.out) == {
                "greet": (58, 58, 0, 0, 58),
                "call_flaky_service": (20, 20, 0, 0, 60),
                "import_file": (10, 0, 0, 10, 10),
                "withdraw": (10, 0, 10, 0, 10),
                "hang": (2, 0, 0, 2, 2),
                "total": (100, 78, 10, 12, 140),
            }
            assert "Nothing was lost: 100 sent" in answer.out
            assert not program.survivors()
            assert not EmbeddedPostgres(place).running
    found = lines_to_copy(answer.out)
    assert len(found) == 11
    for line in found:
        done = copied(line)
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout


@pytest.mark.parametrize(
    "when", ["starting PostgreSQL", "answers at", "worker processes start", "sent", " running"]
)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_leaves_nothing_behind(folder, number, code, when):
    with Program("demo", "--folder", str(folder / "data"), "--commands", "2000") as program:
        program.read_until(when)
        program.signal(number)
        answer = program.end()
        assert (answer.code, answer.err) == (code, "")
        until(lambda: not program.survivors())
        assert not EmbeddedPostgres(folder / "data").running


def test_even_kill_9_leaves_no_worker_behind(database, folder):
    with Program("demo", "--database", database, "--commands", "2000", TMPDIR=str(folder)) as program:
        program.read_until(" running")
        program.process.kill()
        program.process.wait()
        until(lambda: not program.survivors())


def test_on_a_server_of_the_readers_own(database):
    answer = run("demo", "--database", database, "--commands", "20", "--json")
    assert answer.code == 0
    assert answer.document["problems"] == []
    assert sum(group["found"] for group in answer.document["groups"]) == 20
    with CommandBus(database) as bus:
        page = bus.query_commands(correlation_id=answer.document["correlation_id"], limit=100)
    assert len(page.items) == 20


def test_a_password_is_not_among_the_lines_to_copy(database):
    password = password_in(os.environ["PGPASSFILE"])
    address = database.replace("postgres@", f"postgres:{password}@")
    answer = run("demo", "--database", address, "--commands", "10")
    assert answer.code == 0
    assert password not in answer.out + answer.err
    assert "COMMANDBUS_DATABASE_URL" in answer.out


def test_keep_leaves_everything_up_and_says_how_to_stop_it(folder):
    place = folder / "data"
    with Program("demo", "--keep", "--folder", str(place), "--commands", "10") as program:
        answer = program.end()
        try:
            assert answer.code == 0
            assert "workers: 2 workers alive" in copied(lines_to_copy(answer.out)[-2]).stdout
            (kill,) = re.findall(r"kill -TERM (\d+) (\d+)", answer.out)
            for pid in kill:
                os.kill(int(pid), signal.SIGTERM)
            assert copied(lines_to_copy(answer.out)[-1]).stdout.startswith("stopped")
        finally:
            run("embedded", "stop", "--folder", str(place))
        until(lambda: not program.survivors())


def test_workers_that_cannot_run_are_told(database):
    answer = run("demo", "--database", database, "--commands", "5", WORKER_VISIBILITY_TIMEOUT="20s")
    assert answer.code != 0
    assert "statement_timeout" in answer.err


def test_folder_and_database_do_not_go_together(database, folder):
    assert run("demo", "--database", database, "--folder", str(folder)).code == 2
