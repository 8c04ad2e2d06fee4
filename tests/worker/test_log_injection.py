"""Nothing that a stranger wrote can fake a line of the log, or write to the terminal of whoever reads it."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from commandbus import CommandBus, HandlerRegistry, PermanentCommandError, Worker
from commandbus.logger import safe_logger
from commandbus.worker.logs import JsonFormatter, TextFormatter
from support.unsafe_text import is_unsafe

HOSTILE = "no\n2026-01-31T09:30:00.123Z ERROR commandbus.worker: fake line\x1b[2J\x9b1m\u202e\U000e0041"
any_text = st.text(st.characters(), max_size=40) | st.text(st.sampled_from(HOSTILE), max_size=40)


def record_of(text: str, *, with_error: bool) -> logging.LogRecord:
    exc_info: Any = None
    if with_error:
        try:
            raise ValueError(text)
        except ValueError as error:
            exc_info = (type(error), error, error.__traceback__)
    record = logging.LogRecord(text, logging.ERROR, "x.py", 1, "failed: %s", (text,), exc_info)
    record.command_id = text
    return record


@given(any_text, st.booleans())
@example(HOSTILE, True)
def test_a_record_is_one_line_and_its_traceback_stands_indented(text, with_error):
    first, *rest = TextFormatter().format(record_of(text, with_error=with_error)).split("\n")
    assert not any(is_unsafe(char) for line in [first, *rest] for char in line)
    assert with_error or not rest
    assert all(line.startswith("    ") for line in rest)


@given(any_text, st.booleans())
@example(HOSTILE, True)
def test_a_record_in_json_is_one_line_that_says_exactly_what_was_said(text, with_error):
    line = JsonFormatter().format(record_of(text, with_error=with_error))
    assert not any(map(is_unsafe, line))
    assert json.loads(line)["command_id"] == text


class Bad:
    def __str__(self) -> str:
        return HOSTILE

    __repr__ = __str__


@pytest.fixture
def foreign_log() -> Any:
    """A log of the application's own, with its own formatter."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(funcName)s %(message)s %(command_id)s"))
    logger = logging.getLogger("commandbus.test_log_injection")
    logger.addHandler(handler)
    logger.propagate = False
    yield stream
    logger.removeHandler(handler)


def test_an_applications_own_formatter_gets_safe_words(foreign_log):
    logger = safe_logger("commandbus.test_log_injection")
    extra = {"command_id": HOSTILE}
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        logger.exception("%s %r %s %d %.1f", HOSTILE, Bad(), error, 3, 0.5, extra=extra)
    logger.warning("failed at", extra=extra, trace="Traceback\n  " + HOSTILE)
    lines = foreign_log.getvalue().splitlines()
    assert not any(is_unsafe(char) for line in lines for char in line)
    records = [line for line in lines if not line.startswith("    ")]
    assert [line.split()[:2] for line in records] == [
        ["ERROR", "test_an_applications_own_formatter_gets_safe_words"],
        ["WARNING", "test_an_applications_own_formatter_gets_safe_words"],
    ]
    assert " 3 0.5 " in records[0]
    assert "    Traceback" in lines


def test_the_exception_itself_is_still_there(caplog):
    error = ValueError(HOSTILE)
    with caplog.at_level(logging.ERROR):
        safe_logger("commandbus.worker").error("it failed", exc_info=error)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error


def test_a_worker_inside_an_application_logs_no_line_of_a_strangers(database, caplog):
    handlers = HandlerRegistry()

    @handlers.handler("work", "charge")
    def charge(command: Any, ctx: Any) -> None:
        ctx.log.info("trying")
        raise PermanentCommandError(HOSTILE, code="BAD\x1b[2J")

    with CommandBus(database) as bus, caplog.at_level(logging.DEBUG, "commandbus"):
        bus.create_domain("work")
        bus.send("work", "charge", command_id="evil\u202e\u2066")
        Worker(handlers, database_url=database).run(until_idle=True)
    said = [record for record in caplog.records if record.name in ("commandbus.worker", "commandbus.handler")]
    assert any("fake line" in record.getMessage() for record in said)
    assert any("fake line" in (record.exc_text or "") for record in said)
    for record in said:
        assert not any(map(is_unsafe, record.getMessage()))
        assert not any(map(is_unsafe, getattr(record, "command_id", "")))
        assert not any(is_unsafe(char) for line in (record.exc_text or "").split("\n") for char in line)
