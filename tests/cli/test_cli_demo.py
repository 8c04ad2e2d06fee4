"""The demo: to its end, a second time, interrupted, and kept. It never leaves a process behind unasked."""

from __future__ import annotations

import itertools
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
from support.running import examples
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


def test_it_runs_to_its_end_and_what_it_started_ends_with_it(folder, bare_cli):
    place = str(folder / "data")
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
    done = copied(found[0])
    assert done.returncode == 0, (found[0], done.stderr)
    assert "demo" in done.stdout, "the server was started again for this line"
    assert not EmbeddedPostgres(place).running

    # A second time: it reports its own commands only, and keeps everything up.
    with Program("demo", "--keep", "--folder", place, "--commands", "10") as program:
        answer = program.end()
        try:
            check_what_is_kept(answer.out, bare_cli)
        finally:
            run("embedded", "stop", "--folder", place)
        until(lambda: not program.survivors())


def check_what_is_kept(out, bare_cli):
    assert figures(out)["total"] == (10, 6, 1, 3, 14)
    assert "the schema is there" in out
    *lines, doctor, stop = lines_to_copy(out)
    assert len(lines) == 10
    for line in lines:
        _, _, _, *arguments = shlex.split(line)  # python -m commandbus.cli
        done = bare_cli(*arguments)
        assert done.code == 0, (line, done.err)
        assert done.out
    assert "workers: 2 workers alive" in copied(doctor).stdout
    ((first, second),) = re.findall(r"kill -TERM (\d+) (\d+)", out)
    for pid in (first, second):
        os.kill(int(pid), signal.SIGTERM)
    assert copied(stop).stdout.startswith("stopped")


MOMENTS = ["starting PostgreSQL", "answers at", "worker processes start", "sent", " running"]
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
# Every moment has one of the two signals; `--thorough` sends both.
INTERRUPTS = list(itertools.product(SIGNALS, MOMENTS))[:: examples(2, thorough=1)]


@pytest.mark.parametrize(("told", "when"), INTERRUPTS)
def test_a_signal_in_the_middle_leaves_nothing_behind(folder, told, when):
    number, code = told
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
    answer = run("demo", "--database", database, "--commands", "5", "--json")
    assert answer.code == 0
    assert answer.document["problems"] == []
    assert sum(group["found"] for group in answer.document["groups"]) == 5
    with CommandBus(database) as bus:
        page = bus.query_commands(correlation_id=answer.document["correlation_id"], limit=100)
    assert len(page.items) == 5


def test_a_password_is_not_among_the_lines_to_copy(database):
    password = password_in(os.environ["PGPASSFILE"])
    address = database.replace("postgres@", f"postgres:{password}@")
    answer = run("demo", "--database", address, "--commands", "1")
    assert answer.code == 0
    assert password not in answer.out + answer.err
    assert "COMMANDBUS_DATABASE_URL" in answer.out


def test_workers_that_cannot_run_are_told(database):
    answer = run("demo", "--database", database, "--commands", "5", WORKER_VISIBILITY_TIMEOUT="20s")
    assert answer.code != 0
    assert "statement_timeout" in answer.err


def test_folder_and_database_do_not_go_together(database, folder):
    assert run("demo", "--database", database, "--folder", str(folder)).code == 2
