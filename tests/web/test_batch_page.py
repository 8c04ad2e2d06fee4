"""A batch: how far it is, what failed first, and retrying what did not succeed."""

from __future__ import annotations

from typing import Any

from commandbus import (
    BusinessRuleException,
    CommandBus,
    HandlerRegistry,
    NewCommand,
    PermanentCommandError,
    Worker,
)
from support.workers import quick_settings
from web.conftest import Serve

HOSTILE = "<script>alert(1)</script>"


def settled(bus: CommandBus, database: str) -> None:
    """Thirty completed commands, then one that failed for good, and one that needs a person."""
    handlers = HandlerRegistry()

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> None:
        if command.data == "fail":
            raise BusinessRuleException(HOSTILE)
        if command.data == "trouble":
            raise PermanentCommandError("no address")

    members = [
        NewCommand("ship", "fail", command_id="failed"),
        NewCommand("ship", "trouble", command_id="troubled"),
    ]
    members += [NewCommand("ship", command_id=f"good-{n:02}") for n in range(60)]
    bus.create_batch("orders", members, batch_id="b")
    Worker(handlers, settings=quick_settings(database)).run(until_idle=True)


def test_what_failed_comes_first(bus: CommandBus, database: str, serve: Serve) -> None:
    settled(bus, database)
    visit = serve()
    page = visit.get("/batch", domain="orders", id="b").text
    assert page.index("troubled</a>") < page.index("failed</a>") < page.index("All commands")
    assert "Need a person" in page
    assert "Failed for good" in page
    assert HOSTILE not in page
    assert "BusinessRuleException" in page
    only = visit.get("/batch", domain="orders", id="b", status="FAILED").text
    assert "failed</a>" in only
    assert "good-" not in only
    second = visit.get(
        "/batch", domain="orders", id="b", cursor=bus.batches.list_commands("orders", "b").next_cursor
    )
    assert "Need a person" not in second.text.replace("1 need a person", "")
    assert visit.get("/batch", domain="orders", id="b", status="NOSUCH").status == 422
    assert visit.get("/batch", domain="orders", id="nosuch").status == 404
    document = visit.get("/api/batch/commands", domain="orders", id="b", status="FAILED").json
    assert [(item["command_id"], item["error_type"]) for item in document["items"]] == [
        ("failed", "BusinessRuleException")
    ]
    assert "data" not in document["items"][0]


def test_how_long_it_takes(bus: CommandBus, serve: Serve) -> None:
    bus.create_batch("orders", [NewCommand("ship")], batch_id="new")
    page = serve().get("/batch", domain="orders", id="new").text
    assert "Nobody can say how long the rest takes" in page


def test_what_did_not_succeed_is_retried(bus: CommandBus, database: str, serve: Serve) -> None:
    settled(bus, database)
    visit = serve()
    done = visit.act("retry-batch", "/batch?domain=orders&id=b", domain="orders", id="b", reason="fixed")
    assert "1 retried, 1 sent again in batch" in done.text
    record = bus.get_batch("orders", "b")
    assert record is not None
    assert record.in_tsq == 0
    (new,) = [item for item in bus.query_batches("orders") if item.retry_of == "b"]
    assert new.total == 1
