"""One limit in detail: who holds its permits, its line, and its back-offs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, Limit, NewCommand, RateLimitError, UnknownLimitError, Worker
from commandbus.flow.limits.detail import LimitBackoff
from commandbus.flow.limits.permits import answer
from commandbus.model.limit_state import ApiAnswer
from commandbus.web.charts import HEIGHT, WIDTH, backoff_chart
from support.waiting import one, until
from support.workers import quick_settings
from web.conftest import Serve

NOW = datetime(2026, 11, 17, 12, tzinfo=UTC)


@pytest.fixture
def busy(bus: CommandBus, database: str) -> Iterator[Worker]:
    """A worker whose limit of one permit is held by `first`, with two in line."""
    handlers, gate = HandlerRegistry(), threading.Event()
    started = threading.Event()

    @handlers.handler("orders", "scan", limits=[Limit("docai", concurrency=1, backoff=[600])])
    def scan(command: Any, ctx: Any) -> None:
        started.set()
        gate.wait(60)
        if command.command_id == "first":
            raise RateLimitError("429 <b>slow</b> down")

    worker = Worker(handlers, settings=quick_settings(database, concurrency=4))
    worker.start()
    bus.send("orders", "scan", command_id="first")
    assert started.wait(60)
    bus.send_many("orders", [NewCommand("scan", command_id=name) for name in ("second", "third")])
    until(lambda: len(bus.limit_detail("docai").line) == 2)
    worker.gate = gate  # type: ignore[attr-defined]
    yield worker
    gate.set()
    worker.stop()


def test_who_holds_since_when_who_waits_and_what_happened(bus: CommandBus, busy: Worker, serve: Serve) -> None:
    found = bus.limit_detail("docai")
    (holder,) = found.holders
    assert (holder.domain, holder.command_id, holder.command_type) == ("orders", "first", "scan")
    assert holder.worker == busy.id
    assert holder.since is not None
    assert abs((datetime.now(UTC) - holder.since).total_seconds()) < 60
    assert [(item.ahead, item.command_id) for item in found.line] == [(0, "second"), (1, "third")]
    assert found.backoffs == []
    visit = serve()
    page = visit.get("/limit", name="docai").text
    assert "Nobody called for" in page
    assert 'href="/command?domain=orders&amp;id=second"' in page
    busy.gate.set()  # type: ignore[attr-defined]
    until(lambda: bus.limit_detail("docai").backoffs)
    (event,) = bus.limit_detail("docai").backoffs
    assert (event.answer, event.step, event.breaker_open) == ("rate_limited", 1, False)
    assert 300 < event.seconds <= 900
    until(lambda: len(bus.limit_detail("docai").line) == 3)
    notes = {item.note for item in bus.limit_detail("docai").line}
    assert notes == {"429 <b>slow</b> down, step 1 of the back-off"}, (
        "as it is now, not as it was when they were parked"
    )
    after = visit.get("/limit", name="docai").text
    assert after.count("Blocked for") == 1
    assert "for about" not in after, "how long it is blocked is said once"
    assert "429 &lt;b&gt;slow&lt;/b&gt; down, step 1 of the back-off." in after
    assert 'class="backoff backoff-rate_limited"' in after
    assert "<b>slow</b>" not in after
    document = visit.get("/api/limit", name="docai").json
    assert document["backoffs"][0]["answer"] == "rate_limited"
    assert {item["command_id"] for item in document["line"]} >= {"second", "third"}


def test_permits_in_redis(bus: CommandBus, database: str, redis_url: str) -> None:
    handlers, go_on = HandlerRegistry(), threading.Event()

    @handlers.handler("orders", "scan", limits=[Limit("docai", concurrency=1, store="redis", backoff=[600])])
    def scan(command: Any, ctx: Any) -> None:
        go_on.wait(60)
        raise RateLimitError("429")

    settings = quick_settings(database, redis_url=redis_url)
    with CommandBus(settings=settings) as near, Worker(handlers, settings=settings):
        bus.send("orders", "scan", command_id="first")
        until(lambda: near.limit_detail("docai").holders)
        bus.send("orders", "scan", command_id="second")
        until(lambda: near.limit_detail("docai").line)
        found = near.limit_detail("docai")
        assert [(item.command_id, item.since is not None) for item in found.holders] == [("first", True)]
        assert [item.command_id for item in found.line] == ["second"]
        # A program that cannot reach Redis says so, and shows the rest.
        far = bus.limit_detail("docai")
        assert (far.limit.mode, far.holders, len(far.line)) == ("unknown", [], 1)
        go_on.set()
        until(lambda: near.limit_detail("docai").backoffs)
        assert near.limit_detail("docai").backoffs[0].answer == "rate_limited"


def test_old_back_offs_are_pruned(bus: CommandBus, database: str) -> None:
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO commandbus.limit_backoff (limit_name, at, answer, step, seconds, breaker_open) "
            "SELECT 'docai', now() - n * interval '2 days', 'timeout', 1, 2, false FROM generate_series(0, 3) n"
        )
        bus.prune(age="5d")
        assert one(conn, "SELECT count(*) FROM commandbus.limit_backoff") == 3


def test_an_unknown_limit_is_not_found(bus: CommandBus, serve: Serve) -> None:
    with pytest.raises(UnknownLimitError, match="'nosuch'"):
        bus.limit_detail("nosuch")
    visit = serve()
    for name in ("nosuch", "", "x" * 500, "\u202e", "<script>", "a\nb", "%00"):
        assert visit.get("/limit", name=name).status in (400, 404)
        assert visit.get("/api/limit", name=name).status in (400, 404, 422)


def test_of_each_limit_the_last_500_back_offs_are_kept(bus: CommandBus, database: str) -> None:
    bus.set_limit("docai", concurrency=1)
    bus.set_limit("other", concurrency=1)
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO commandbus.limit_backoff (limit_name, answer, step, seconds, breaker_open) "
            "SELECT name, 'rate_limited', 1, 2, false "
            "FROM unnest(ARRAY['docai', 'other']) name, generate_series(1, 600)"
        )
        bus.run(answer("docai", None, ApiAnswer.RATE_LIMITED, gives=False, reason="429"))
        assert one(conn, "SELECT count(*) FROM commandbus.limit_backoff WHERE limit_name = 'docai'") == 500
        assert one(conn, "SELECT count(*) FROM commandbus.limit_backoff WHERE limit_name = 'other'") == 600
        # A 429 of a call that was under way already changes nothing, so it is no event of its own.
        bus.run(answer("docai", None, ApiAnswer.RATE_LIMITED, gives=False, reason="429"))
        assert one(conn, "SELECT max(id) FROM commandbus.limit_backoff") == 1201
    newest = bus.limit_detail("docai").backoffs[0]
    assert newest.reason is not None
    assert "429" in newest.reason


def test_the_breaker_of_a_type_shows_its_history(bus: CommandBus, serve: Serve) -> None:
    bus.open_breaker("orders", "ship", operator="ann", reason="<script>")
    visit = serve()
    assert 'href="/breaker?name=orders%2Fship"' in visit.get("/limits").text
    page = visit.get("/breaker", name="orders/ship").text
    assert "open by ann: &lt;script&gt;" in page
    visit.act("close-breaker", "/breaker?name=orders%2Fship", domain="orders", command_type="ship")
    done = visit.get("/api/breaker/actions", name="orders/ship").json
    assert [item["action"] for item in done] == ["CLOSE", "OPEN"]
    assert visit.get("/breaker", name="nosuch/<b>").status == 404
    for path in ("/breaker", "/limit", "/api/limit", "/api/breaker/actions", "/api/schedules/timeline"):
        for name in ("\0", "a\0b", "\ud800".encode("utf-8", "surrogatepass"), "x" * 2000):
            assert visit.get(path, name=name).status < 500, (path, name)
    for path in ("/batch", "/process", "/api/batch/commands", "/api/process/graph"):
        assert visit.get(path, domain="orders\0", id="\0").status < 500, path
        assert visit.get(path, domain="orders", id="\0", cursor="\0").status < 500, path


def test_bars_lie_within_the_chart() -> None:
    events = [
        LimitBackoff(
            NOW - timedelta(hours=hours), "rate_limited", step, seconds, breaker_open=step == 3, reason=None
        )
        for hours, step, seconds in [(25, 1, 5.0), (23.9, 0, 2.0), (2, 3, 90000.0), (0, 2, 60.0), (-1, 1, 1.0)]
    ]
    chart = backoff_chart(events, NOW)
    assert len(chart.bars) == 4, "what is older than a day is not shown"
    for bar in chart.bars:
        assert 0 <= bar.x < bar.x + bar.width <= WIDTH
        assert 0 <= bar.y < bar.y + bar.height <= HEIGHT
    assert [bar.kind for bar in chart.bars] == ["rate_limited", "opened", "rate_limited", "rate_limited"]
    assert [tick.text for tick in chart.ticks] == ["12:00", "16:00", "20:00", "00:00", "04:00", "08:00"]
