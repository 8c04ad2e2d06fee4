"""What the log says of failures: what needs a person is an ERROR with its traceback. No library breaks a line."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from commandbus import (
    BusinessRuleException,
    CommandBus,
    CommandStatus,
    HandlerRegistry,
    PermanentCommandError,
    RetryPolicy,
    Worker,
)
from commandbus.db.pool import open_pool
from support.waiting import until
from support.workers import quick_settings

ENDED = (CommandStatus.FAILED, CommandStatus.IN_TROUBLESHOOTING_QUEUE)
ONCE = RetryPolicy(max_attempts=2, backoff_schedule=[0.01])


class NastyError(Exception):
    def __str__(self) -> str:
        raise SystemExit("not me")


def raising(make: Callable[[], Exception]) -> Any:
    def handle(command: Any, ctx: Any) -> None:
        raise make()

    return handle


@pytest.fixture
def said(database: str, caplog: pytest.LogCaptureFixture) -> Any:
    """The records of the worker about one command whose handler raises this."""

    def run(make: Callable[[], Exception]) -> list[logging.LogRecord]:
        handlers = HandlerRegistry()
        handlers.register("work", "charge", raising(make), retry_policy=ONCE)
        with CommandBus(database) as bus, caplog.at_level(logging.DEBUG, "commandbus"):
            bus.create_domain("work")
            bus.send("work", "charge", command_id="c1")
            with Worker(handlers, settings=quick_settings(database)):
                until(lambda: bus.get_command("work", "c1").status in ENDED)
        return [record for record in caplog.records if "c1 of domain work failed" in record.getMessage()]

    return run


def test_used_up_attempts_are_an_error_with_the_traceback_and_the_exception(said: Any) -> None:
    first, *_, last = said(lambda: ValueError("no such street"))
    assert (first.levelno, first.exc_info, first.exc_text) == (logging.WARNING, None, None)
    assert last.levelno == logging.ERROR
    assert "2 of 2 tries used" in last.getMessage()
    assert "to the troubleshooting queue" in last.getMessage()
    assert isinstance(last.exc_info[1], ValueError)
    assert "in handle" in last.exc_text
    assert "ValueError: no such street" in last.exc_text
    assert "execute.py" not in last.exc_text, "our own frames say nothing"
    assert last.command_id == "c1"


def test_what_is_permanent_needs_a_person_too(said: Any) -> None:
    found = said(lambda: PermanentCommandError("no", code="NO"))
    (record,) = [item for item in found if item.levelno >= logging.WARNING]
    assert record.levelno == logging.ERROR
    assert "PermanentCommandError" in record.exc_text


def test_what_a_business_rule_says_is_no_error(said: Any) -> None:
    found = said(lambda: BusinessRuleException("no", code="NO"))
    assert {record.levelno for record in found} == {logging.INFO, logging.DEBUG}


def test_an_exception_that_cannot_be_shown_costs_nothing(said: Any) -> None:
    """Its text raises SystemExit, which is no Exception; a handler of the log asks for it."""
    asked = []

    class Asking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                asked.append(record)
                str(record.exc_info[1])

    handler = Asking()
    logging.getLogger("commandbus.worker").addHandler(handler)
    try:
        said(NastyError)  # the command reaches the troubleshooting queue all the same
    finally:
        logging.getLogger("commandbus.worker").removeHandler(handler)
    assert asked


def test_what_the_pool_says_of_a_server_that_is_away_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        port = nobody_listens.getsockname()[1]
        settings = quick_settings(f"postgresql://postgres@127.0.0.1:{port}/nowhere", pool_min_size=1)
        pool = open_pool(settings, name="test", max_size=1)
        try:
            until(lambda: any("error connecting in 'commandbus-test'" in line for line in caplog.messages))
        finally:
            pool.close()
    (first, *_) = [record.getMessage() for record in caplog.records if record.name == "psycopg.pool"]
    assert "Connection refused" in first
    assert "Is the server running" in first
    assert "\n" not in first


def test_what_others_pools_say_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("psycopg.pool").warning("error connecting in %r: %s", "shop", "a\nb")
    assert caplog.messages == ["error connecting in 'shop': a\nb"]


WARNS = """
import sys, warnings, asyncio, logging
from commandbus.worker.logs import set_up_logging
from commandbus.settings import load_settings
set_up_logging(load_settings({"log_format": sys.argv[1]}))
warnings.warn("two\\nlines", UserWarning)

async def fail():
    raise ValueError("one\\ntwo")

async def main():
    task = asyncio.get_running_loop().create_task(fail())
    await asyncio.sleep(0.01)

asyncio.run(main())
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_warning_of_pythons_and_a_lost_task_are_records_like_others(form: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", WARNS, form], capture_output=True, text=True, check=True, timeout=60
    )
    lines = done.stderr.splitlines()
    if form == "json":
        assert {json.loads(line)["logger"] for line in lines} == {"py.warnings", "asyncio"}
    else:
        records = [line for line in lines if not line.startswith("    ")]
        assert [line.split()[2] for line in records] == ["py.warnings:", "asyncio:"]
