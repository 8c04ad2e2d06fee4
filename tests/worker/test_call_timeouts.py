"""`Limit(call_timeout=…)`: how long the call in a block may take, if the block does not say."""

from __future__ import annotations

import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from commandbus import ApiTimeoutError, AsyncCommandBus, CommandBus, CommandStatus, HandlerRegistry, Limit
from support.api_stub import ApiStub, Reply, too_many
from support.waiting import one, until
from support.workers import add, done, either

Db = psycopg.Connection[Any]
Start = Callable[..., Any]
LATE = "no answer from docai within 0.3 s (limit call timeout)"
USED = "SELECT count(*) FROM commandbus.limits, jsonb_object_keys(holders)"


@pytest.fixture
def docai(bus: CommandBus) -> CommandBus:
    bus.declare_limit(Limit("docai", concurrency=5, call_timeout="300ms", breaker_failures=0))
    return bus


@pytest.fixture
def api() -> Iterator[ApiStub]:
    with ApiStub() as api:
        yield api


def errors_of(db: Db) -> list[tuple[str, str, str]]:
    return db.execute("SELECT verdict, error_code, error FROM commandbus.attempt ORDER BY number").fetchall()


def late_by(seconds: float) -> None:
    """A call that nothing interrupts."""
    threading.Event().wait(seconds)


# --- of a program -----------------------------------------------------------------------------------------------


def test_a_block_has_the_call_timeout_of_its_limit(docai: CommandBus, db: Db) -> None:
    with docai.limit("docai") as call:
        assert 0.2 < call.remaining() <= 0.3
    with docai.limit("docai", timeout="5s") as call:
        assert 4 < call.remaining() <= 5
    with docai.limit("docai", timeout=0) as call:
        assert call.remaining() is None
    docai.declare_limit(Limit("vision", concurrency=5))
    with docai.limit("vision") as call:
        assert 59 < call.remaining() <= 60
    docai.declare_limit(Limit("speech", concurrency=5, call_timeout=None))
    with docai.limit("speech") as call:
        assert call.remaining() is None


def test_a_sync_call_that_outlives_it_raises_at_the_end_of_the_block(docai: CommandBus, db: Db) -> None:
    with pytest.raises(ApiTimeoutError) as caught, docai.limit("docai"):
        late_by(0.4)
    assert str(caught.value) == LATE
    assert isinstance(caught.value, TimeoutError)
    until(lambda: one(db, USED) == 0)  # the call has come back: its permit is free
    assert one(db, "SELECT failures FROM commandbus.limits") == 1


def _call(bus: CommandBus, url: str | None) -> None:
    """Late, and then an error: of the API, or of the program itself."""
    with bus.limit("docai"):
        late_by(0.4)
        if url is None:
            raise LookupError("the program's own")
        with closing(urllib.request.urlopen(url, timeout=5)):
            pass


def test_an_error_that_says_more_than_late_stays(docai: CommandBus, api: ApiStub) -> None:
    api.plan(Reply(500), too_many("20"))
    with pytest.raises(ApiTimeoutError, match="no answer") as late:
        _call(docai, api.url)
    assert isinstance(late.value.__cause__, urllib.error.HTTPError)
    with pytest.raises(LookupError):
        _call(docai, None)
    with pytest.raises(urllib.error.HTTPError) as refused:
        _call(docai, api.url)
    until(lambda: docai.get_limit("docai").state == "BACKING_OFF")
    for error in (late.value.__cause__, refused.value):
        error.close()


def test_an_async_call_is_canceled_and_the_others_go_on(docai: CommandBus, database: str, db: Db) -> None:
    async def main() -> list[Any]:
        async with AsyncCommandBus(database) as bus:

            async def call(seconds: float) -> str:
                async with bus.limit("docai"):
                    await asyncio.sleep(seconds)
                return "done"

            return await asyncio.gather(call(60), call(0.01), return_exceptions=True)

    late, quick = asyncio.run(main())
    assert (str(late), type(late), quick) == (LATE, ApiTimeoutError, "done")
    assert one(db, USED) == 1  # until its lease ends: it may go on over there


# --- of a handler -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [[], ["docai"]])
def test_a_call_of_a_handler_that_takes_too_long_is_a_timeout(
    docai: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start, lane: str, names: list[str]
) -> None:
    async def page(command: Any, ctx: Any) -> None:
        async with either(ctx.limit("docai")):
            await done(ctx.sleep(60))

    add(handlers, lane, "page", page, on_timeout="fail", limits=names)
    sent = docai.send("orders", "page")
    start_worker(handlers)
    until(lambda: docai.get_command("orders", sent.command_id).status is CommandStatus.FAILED)
    assert errors_of(db) == [("TIMED_OUT", "TIMEOUT", LATE)]
    assert "timeout" in docai.get_command("orders", sent.command_id).error


def test_a_call_that_comes_back_within_the_grace_is_a_timeout_all_the_same(
    docai: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: Start
) -> None:
    @handlers.handler("orders", "page", on_timeout="fail")
    def page(command: Any, ctx: Any) -> str:
        with ctx.limit("docai"):
            late_by(0.5)
        return "too late"

    sent = docai.send("orders", "page")
    start_worker(handlers, cancel_grace=8)
    until(lambda: docai.get_command("orders", sent.command_id).status is CommandStatus.FAILED)
    assert errors_of(db) == [("TIMED_OUT", "TIMEOUT", LATE)]
    until(lambda: one(db, USED) == 0)


def test_a_handler_that_only_names_a_limit_keeps_its_own_timeout_and_grace(
    docai: CommandBus, handlers: HandlerRegistry, start_worker: Start
) -> None:
    @handlers.handler("orders", "long", limits=["docai"])
    def long(command: Any, ctx: Any) -> float | None:
        late_by(0.5)  # longer than a call may take
        return ctx.remaining()

    @handlers.handler("orders", "grace", limits=["docai"], timeout=0.3)
    def grace(command: Any, ctx: Any) -> str:
        late_by(0.5)
        return "within the grace"

    sent = [docai.send("orders", name).command_id for name in ("long", "grace")]
    start_worker(handlers, cancel_grace=8)
    for command_id in sent:
        until(lambda one=command_id: docai.get_command("orders", one).status is CommandStatus.COMPLETED)
    left, said = (docai.get_command("orders", command_id).result for command_id in sent)
    assert left > 5
    assert said == "within the grace"


def test_a_block_may_say_otherwise_and_the_attempts_deadline_comes_first(
    docai: CommandBus, handlers: HandlerRegistry, start_worker: Start, lane: str
) -> None:
    async def page(command: Any, ctx: Any) -> list[float]:
        left = []
        for timeout in (None, 5, 0, 1000):
            async with either(ctx.limit("docai", timeout=timeout)) as call:
                left.append(call.remaining())
        return left

    add(handlers, lane, "page", page, timeout=20)
    sent = docai.send("orders", "page")
    start_worker(handlers)
    until(lambda: docai.get_command("orders", sent.command_id).status is CommandStatus.COMPLETED)
    limits, block, attempt, beyond = docai.get_command("orders", sent.command_id).result
    assert limits <= 0.3 < block <= 5 < attempt <= 20
    assert 5 < beyond <= 20


def test_a_change_at_run_time_holds_for_the_next_block(docai: CommandBus, db: Db) -> None:
    with docai.limit("docai"):
        pass
    assert docai.set_limit("docai", call_timeout="90s").call_timeout_seconds == 90
    until(lambda: _left(docai) > 60)
    assert docai.set_limit("docai", call_timeout=None).call_timeout_seconds is None
    assert docai.unset_limit("docai", "call_timeout").call_timeout_seconds == 0.3


def _left(bus: CommandBus) -> float:
    with bus.limit("docai") as call:
        return call.remaining() or 0.0
