"""What a worker tells whoever reads its log, and what it refuses at its start."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from commandbus import (
    BusinessRuleException,
    CommandBus,
    ConfigurationError,
    HandlerRegistry,
    PermanentCommandError,
    RetryPolicy,
    Worker,
    load_settings,
)


@pytest.fixture
def bus(database: str) -> Any:
    with CommandBus(database) as bus:
        bus.create_domain("work")
        yield bus


def test_every_failure_is_one_line_that_names_command_error_and_fate(
    bus: CommandBus, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = HandlerRegistry()

    def fail(command: Any, ctx: Any) -> None:
        raise {"again": ValueError, "never": PermanentCommandError, "rule": BusinessRuleException}[
            command.command_type
        ]("no")

    for name in ("again", "never", "rule"):
        policy = RetryPolicy(max_attempts=2, backoff_schedule=[30], jitter=0)
        handlers.register("work", name, fail, retry_policy=policy)
    for name in ("again", "never", "rule", "unheard_of"):
        bus.send("work", name, command_id=f"{name}-1")
    settings = load_settings({"database_url": database, "unknown_type_timeout": 0})
    with caplog.at_level(logging.INFO, "commandbus.worker"):
        Worker(handlers, settings=settings).run(until_idle=True)
    lines = {
        record.levelname + " " + record.getMessage()
        for record in caplog.records
        if "failed" in record.getMessage()
    }
    assert lines == {
        "WARNING again again-1 of domain work failed (1 of 2 tries used): ValueError: no; tried again in 30 s",
        "ERROR never never-1 of domain work failed (1 of 2 tries used): PermanentCommandError: no; "
        "to the troubleshooting queue",
        "INFO rule rule-1 of domain work failed (1 of 2 tries used): BusinessRuleException: no; FAILED for good",
        "ERROR unheard_of unheard_of-1 of domain work failed (1 of 3 tries used): UnknownCommandTypeError: no "
        "handler for command_type 'unheard_of' in domain 'work' is registered in this worker; "
        "to the troubleshooting queue",
    }


def test_a_value_returned_after_the_transaction_is_noted(bus: CommandBus, database: str) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("work", "late")
    def late(command: Any, ctx: Any) -> Any:
        with ctx.transaction() as tx:
            tx.execute("SELECT 1")
            return {"lost": True}

    sent = bus.send("work", "late")
    Worker(handlers, database_url=database).run(until_idle=True)
    record = bus.get_command("work", sent.command_id)
    assert record is not None
    assert (record.status.value, record.result) == ("COMPLETED", None)
    (note,) = bus.get_attempts("work", sent.command_id)
    assert (note.verdict, note.error_code) == ("NOTE", "RETURNED_TOO_LATE")


def test_a_domain_that_nobody_handles_is_not_created(bus: CommandBus, database: str) -> None:
    handlers = HandlerRegistry()
    handlers.register("work", "x", lambda command, ctx: None)
    with pytest.raises(ConfigurationError, match="domain wrok has no handler"):
        Worker(handlers, domains=["wrok"], database_url=database).start()
    assert [domain.name for domain in bus.list_domains()] == ["orders", "work"]  # orders is the fixture's


def test_swapped_parameters_are_refused() -> None:
    def swapped(ctx: Any, command: Any) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match="command comes first"):
        HandlerRegistry().register("work", "x", swapped)


def test_a_log_that_fails_costs_no_outcome_and_no_slot(bus: CommandBus, database: str) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "failed" in record.getMessage():
                raise OSError("the disk of the log is full")

    handlers = HandlerRegistry()

    @handlers.handler("work", "fail")
    def fail(command: Any, ctx: Any) -> None:
        raise PermanentCommandError("no")

    sent = [bus.send("work", "fail").command_id for _ in range(5)]
    broken = Broken()
    logging.getLogger("commandbus.worker").addHandler(broken)
    try:
        report = Worker(handlers, database_url=database, concurrency=1).run(until_idle=True)
    finally:
        logging.getLogger("commandbus.worker").removeHandler(broken)
    assert (report.settled, report.is_clean) == (5, True)
    assert {bus.get_attempts("work", id_)[0].verdict for id_ in sent} == {"PERMANENT"}


def test_a_pool_size_that_is_capped_is_said_at_the_start(
    bus: CommandBus, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = HandlerRegistry()
    handlers.register("work", "nothing", lambda command, ctx: None)
    for most, says in ((16, True), (4, False), (None, False)):
        caplog.clear()
        settings = load_settings({"database_url": database, "concurrency": 4, "pool_max_size": most})
        with caplog.at_level(logging.INFO, "commandbus.worker"):
            Worker(handlers, settings=settings).run(until_idle=True)
        said = "pool_max_size is 16, but this worker's pool has 4 connections at most: one for each slot"
        assert (said in caplog.messages) is says
