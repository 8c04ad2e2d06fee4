"""Failures that are alike: counted together, by the frame of the application's own code, and by its version."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from commandbus import (
    AsyncCommandBus,
    CommandBus,
    FailureGroup,
    HandlerRegistry,
    InvalidCommandError,
    Page,
    RetryPolicy,
    TroubleshootingQueue,
    Worker,
)
from commandbus.worker.own_code import OwnCode, hash_of_code
from support.waiting import one, until, until_settled
from support.workers import AT_ONCE

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]


def helper(text: str) -> None:
    json.loads(text)


def ship(command: Any, ctx: Any) -> str:
    if command.data == "good":
        return "done"
    if command.data == "other":
        raise KeyError(command.command_id)
    helper("{")
    raise AssertionError


def groups(bus: CommandBus, **filters: Any) -> dict[str, FailureGroup]:
    return {item.error_type or "": item for item in bus.list_failures(**filters)}


def test_failures_are_grouped_by_the_innermost_frame_of_own_code(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "ship", ship)
    handlers.register("orders", "bill", ship)
    start_worker(handlers, retry_policy=AT_ONCE, code_version="v1")
    for n in range(3):
        bus.send("orders", "ship", "bad", command_id=f"bad{n}")
        bus.send("orders", "ship", "good")
    bus.send("orders", "ship", "other", command_id="other")
    bus.send("orders", "bill", "bad", command_id="bill")
    until_settled(db)
    found = bus.list_failures("orders", "ship")
    assert len(found.items) == 2
    decode, key = groups(bus, command_type="ship")["JSONDecodeError"], groups(bus, command_type="ship")["KeyError"]
    assert (decode.own_frame or "").endswith("test_failure_groups.py: helper"), "not json's, and not ours"
    assert (key.own_frame or "").endswith("test_failure_groups.py: ship")
    assert (decode.count, decode.in_troubleshooting, decode.since_version) == (9, 3, "v1")
    assert decode.share == pytest.approx(9 / (9 + 3 + 3))
    assert decode.first_seen < decode.last_seen
    assert decode.error is not None
    assert not decode.is_new, "there was no other version before it"
    assert len({item.fingerprint for item in bus.list_failures()}) == 3
    assert bus.list_failures(since=datetime.now(UTC) + timedelta(hours=1)).items == []
    queue = TroubleshootingQueue(bus)
    assert {item.command_id for item in queue.list(fingerprint=decode.fingerprint)} == {"bad0", "bad1", "bad2"}
    assert queue.count(fingerprint=decode.fingerprint) == 3
    plan = bus.plans.preview("orders", "cancel", fingerprint=decode.fingerprint)
    assert (plan.total, plan.filter.fingerprint) == (3, decode.fingerprint)
    assert f"with failure {decode.fingerprint}" in plan.text
    for entry in queue.list(fingerprint=key.fingerprint):
        queue.operator_cancel("orders", entry.command_id)
    assert [item.error_type for item in bus.list_failures("orders", "ship", in_troubleshooting=True)] == [
        "JSONDecodeError"
    ]
    assert groups(bus, command_type="ship")["KeyError"].in_troubleshooting == 0


def test_a_failure_that_came_with_a_new_version_says_so(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "ship", ship)
    once = RetryPolicy(max_attempts=1)
    old = start_worker(handlers, retry_policy=once, code_version="v1")
    bus.send("orders", "ship", "other", command_id="other")
    until_settled(db)
    old.stop()
    start_worker(handlers, retry_policy=once, code_version="v2")
    bus.send("orders", "ship", "bad", command_id="bad")
    bus.send("orders", "ship", "other", command_id="again")
    until_settled(db)
    until(lambda: {worker.code_version for worker in bus.workers()} == {"v1", "v2"})
    new, known = groups(bus)["JSONDecodeError"], groups(bus)["KeyError"]
    assert (new.since_version, new.is_new) == ("v2", True)
    assert (known.since_version, known.last_version, known.is_new) == ("v1", "v2", False)


def test_a_completion_has_no_fingerprint_and_a_cancel_is_no_failure(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "ship", ship)
    bus.send("orders", "ship", "good")
    bus.send("orders", "ship", "good", command_id="no", delay=3600)
    start_worker(handlers)
    bus.cancel("orders", "no")
    until_settled(db)
    assert bus.list_failures().items == []
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 0


def test_the_code_version_is_a_hash_of_the_code_unless_it_is_set(
    bus: CommandBus, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "ship", ship)
    start_worker(handlers)
    assert until(lambda: [worker.code_version for worker in bus.workers()]) == [hash_of_code(handlers)]
    before = hash_of_code(handlers)
    handlers.register("orders", "bill", ship)
    assert hash_of_code(handlers) != before
    assert len(before) == 8


def test_an_installed_package_with_handlers_is_own_code() -> None:
    registry = HandlerRegistry()
    registry.register("orders", "ship", ship)
    name_of = OwnCode(list(registry)).name_of
    top = __name__.partition(".")[0]
    assert name_of(f"/venv/lib/python3.11/site-packages/{top}/jobs.py") == f"{top}/jobs.py"
    assert name_of("/venv/lib/python3.11/site-packages/httpx/client.py") is None
    assert name_of(json.__file__) is None
    assert name_of("<frozen importlib>") is None
    assert name_of("/srv/elsewhere/app/jobs.py") == "app/jobs.py"


def test_bad_filters_and_the_async_bus(database: str, bus: CommandBus) -> None:
    with pytest.raises(InvalidCommandError, match="since must be a datetime with a time zone"):
        bus.list_failures(since=datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(InvalidCommandError, match="fingerprint must be the twelve hexadecimal digits"):
        TroubleshootingQueue(bus).list(fingerprint="nonsense")

    async def ask() -> Page[FailureGroup]:
        async with AsyncCommandBus(database) as own:
            return await own.list_failures()

    assert asyncio.run(ask()).items == []
